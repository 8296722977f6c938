"""Every word, operator and tutorial lowers to final HIVM for an Ascend NPU with its meaning intact, or is refused by name.

Needs no NPU: the Ascend toolchain has a virtual environment of its own, made on first use (see docs/ascend.md). When pip
cannot make it, these tests fail and say why.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from third_party.ascend import chips, lower, pool, toolchain
from third_party.ascend.cases import all_cases

ROOT = Path(__file__).parents[4]
CASES = all_cases()
# Other chips differ in core counts and memory sizes: one case of each kernel shows whether it fits there.
FIRST_OF_EACH_KERNEL = list({case.source: case for case in reversed(CASES) if case.refused is None}.values())


@pytest.fixture(scope="module")
def lowered():
    """{case's name: Result} for Ascend910B2."""
    return {result.case.name: result for result in pool.run(CASES, processes=2)}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_kernel_lowers_with_its_meaning_or_is_refused_by_name(lowered, name):
    result = lowered[name]
    assert not result.failures, f"{name} ({result.case.source}): " + "\n".join(result.failures)


def test_the_checks_apply_to_what_they_are_about(lowered):
    """A check that finds nothing to check in anything would pass everywhere."""
    applied = {}
    for result in lowered.values():
        for check, passed, _ in result.checks:
            applied.setdefault(check, []).append(passed)
    for check, outcomes in applied.items():
        assert outcomes.count(True) >= 5, check
    assert {"waits", "publishes", "remote", "dot signals", "complete", "atomics"} <= set(applied)
    waiting = ("wait ge i32", "barrier", "all_gather i16", "allgather_gemm fp16", "tutorial 04", "moe_dispatch bf16 ids i32")
    for name in waiting:
        assert dict((check, passed) for check, passed, _ in lowered[name].checks)["waits"] is True, name


@pytest.mark.parametrize("chip", chips.CHIPS[1:])
def test_every_kernel_lowers_for_the_other_chips(chip):
    results = pool.run(FIRST_OF_EACH_KERNEL, chip, processes=2)
    wrong = {result.case.name: result.failures for result in results if result.failures}
    assert not wrong


# Kernels of methods that contexts refuse on Ascend: kernels/arguments.py, NOT_ON_ASCEND.
NVIDIA_METHODS = {
    "all_reduce_flagged.py": "flagged", "all_reduce_sentinel.py": "sentinel", "all_reduce_pipelined.py": "pipelined",
    "moe_dispatch_pipelined.py": "pipelined", "moe_dispatch_pipelined_tokens.py": "pipelined",
    "moe_combine_pipelined.py": "pipelined",
    "gemm_allreduce_tma.py": "tma", "gemm_reduce_scatter_tma.py": "tma",
    "gemm_reduce_scatter_columns.py": "columns", "gemm_allreduce_columns.py": "columns",
}  # fmt: skip


def test_methods_that_ascend_does_not_have_are_refused_by_name(monkeypatch):
    import triton_dist
    from triton_dist.kernels.arguments import NOT_ON_ASCEND, platform_problem

    assert set(NVIDIA_METHODS.values()) <= set(NOT_ON_ASCEND)
    assert not any(map(platform_problem, NOT_ON_ASCEND))  # the cpu platform has them
    monkeypatch.setattr(triton_dist, "backend", "ascend")
    for method in NOT_ON_ASCEND:
        assert f"the method {method} is not for the ascend platform" in platform_problem(method)
    assert platform_problem(None) is None and platform_problem("two_shot") is None


def test_the_cases_are_all_kernels_of_the_library_and_all_words():
    """A kernel or a word that nobody put into the cases is seen here."""
    sources = {case.source for case in CASES}
    launched = re.compile(r"^@triton\.jit\ndef (\w+_kernel|kernel)\(", re.M)
    for folder in ("triton_dist/kernels", "tutorials/ascend"):
        for path in sorted((ROOT / folder).glob("*.py")):
            for kernel in launched.findall(path.read_text()):
                assert f"{folder}/{path.name}:{kernel}" in sources or path.name in NVIDIA_METHODS
    language = (ROOT / "triton_dist/language/__init__.py").read_text()
    words = set(re.findall(r'^    "(\w+)",$', language, re.M)) - {"device_function", "target"}
    used = set(re.findall(r"\bdl\.(\w+)\(", (ROOT / "third_party/ascend/cases/word_kernels.py").read_text()))
    kernels = "".join(path.read_text() for path in (ROOT / "triton_dist/kernels").glob("*.py"))
    assert words - used - set(re.findall(r"\bdl\.(\w+)\(", kernels)) == set()


# -- the command


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "third_party.ascend.lower", *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


KERNEL = '''
import torch
import triton
import triton.language as tl
import triton_dist.language as dl

LIMIT = torch.iinfo(torch.int32).max


@triton.jit
def send(x, sig, n, ctx, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    dl.remote_store(x + i, tl.load(x + i, mask=i < n), 1, ctx, mask=i < n)
    dl.notify(sig, 1, ctx)


@triton.jit
def deaf(x, sig, n, ctx, BLOCK: tl.constexpr):
    while tl.load(sig, volatile=True) < n:
        pass
    tl.store(x + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float16))


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, i.to(DTYPE), mask=i < n)


@triton.jit
def misspelt(x, ctx, BLOCK: tl.constexpr):
    dl.putt(x, x, BLOCK, 1, ctx)


@triton.jit
def bare_wait(x, sig, n, ctx, BLOCK: tl.constexpr):
    if n > 3:
        dl.wait(sig, n, ctx)
    tl.store(x + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float16))


@triton.jit
def pointer_in_if(x, n, BLOCK: tl.constexpr):
    p = x
    if n > 3:
        p = x + n
    tl.store(p + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float16))
'''


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(KERNEL)
    return path


@pytest.mark.parametrize("signature", ["*fp16, *i32, i32, *i64", "x: *fp16, sig: *i32, n: i32, ctx: *i64"])
def test_the_command_lowers_a_users_kernel(source, signature):
    done = command(f"{source}:send", "--signature", signature, "--constexpr", "BLOCK=64", "--emit", source.parent / "ir")
    assert done.returncode == lower.EXIT_RIGHT, done.stdout + done.stderr
    header, row, *_ = done.stdout.splitlines()
    assert header.split()[:2] == ["kernel", "stage"] and row.split()[:2] == ["send", "hivm"]
    assert "FAILED" not in row and row.count("passed") >= 3
    suffixes = {path.name.split(".")[2] for path in (source.parent / "ir").iterdir()}
    assert suffixes == {"ttir", "ttadapter", "hivm"}


def test_the_command_in_the_readme_lowers_the_kernel_in_the_readme(tmp_path):
    readme = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"```python\n(import os\n.*?def ring.*?)```", readme, re.S)
    (tmp_path / "ring.py").write_text(script)
    (line,) = re.findall(r"-m third_party.ascend.lower ring.py:(.*)", readme)
    kernel, *options = shlex.split(line)
    done = command(f"{tmp_path / 'ring.py'}:{kernel}", *options)
    assert done.returncode == lower.EXIT_RIGHT, done.stdout + done.stderr


def test_the_command_fails_when_a_kernel_lost_its_meaning(source):
    done = command(f"{source}:deaf", "--signature", "*fp16, *i32, i32, *i64", "--constexpr", "BLOCK=64")
    assert done.returncode == lower.EXIT_WRONG, done.stdout + done.stderr
    assert "FAILED" in done.stdout and "waits:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{path}:send", "--signature", "*fp16, *i32"], "BLOCK"),
        (["{path}:send", "--signature", "*fp16, *i32", "--constexpr", "BLOCK=64"], "4 types are needed, 2 were given"),
        (["{path}:send", "--signature", "y: *fp16", "--constexpr", "BLOCK=64"], "has no parameter y"),
        (["{path}:absent", "--signature", "*fp16"], "send, deaf, tuned"),
        (["{path}:send", "--signature", "*float"], "'*float' is no type; the types are i1, "),
        (["{path}:send", "--jobs", "-1"], "give 1 or more"),
        (["{path}:send", "--constexpr", "BLOCK={{1,2}}"], "is a set: a constant is"),
        (["{path}:deaf", "--signature", "*fp16, *i32, i32, *i64", "--constexpr", "BLOCK=tl.f17"], "has no dtype 'f17'"),
        (["--all", "fence", "--option", "nonsense=3"], "has no option nonsense; it has "),
        (["{path}:send", "--emit", "{path}/ir"], "no IR can be written there: Not a directory"),
        (["{path}x:send", "--signature", "*fp16"], "there is no file"),
        (["{path}:send", "--signature", "x: *fp16, *i32"], "name all parameters or none"),
        (["{path}"], "path.py:kernel"),
        ([], "path.py:kernel, or --all"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(source, arguments, says):
    done = command(*(argument.format(path=source) for argument in arguments))
    assert done.returncode == lower.EXIT_USAGE and says in done.stdout + done.stderr, done.stdout + done.stderr


def test_host_code_that_fails_above_a_kernel_is_named(source):
    text = source.read_text().replace("LIMIT =", "import os; RANK = os.environ['NO_SUCH_VARIABLE']; LIMIT =")
    source.write_text(text)
    done = command(f"{source}:send", "--signature", "*fp16, *i32, i32, *i64", "--constexpr", "BLOCK=64")
    assert done.returncode == lower.EXIT_USAGE, done.stdout + done.stderr
    assert "mine.py:7: KeyError: 'NO_SUCH_VARIABLE'; the file's host code failed before the kernel 'send'" in done.stderr


def test_an_autotuned_kernel_and_a_dtype_as_constexpr(source):
    constants = ("--constexpr", "BLOCK=64", "--constexpr", "DTYPE=tl.float16")
    done = command(f"{source}:tuned", "--signature", "*fp16, i32", *constants, "--emit", source.parent / "ir")
    assert done.returncode == lower.EXIT_RIGHT, done.stdout + done.stderr
    assert "1 of 1 right (1 to final HIVM, 0 refused by name)" in done.stdout
    assert "tensor<64xf16>" in next((source.parent / "ir").glob("*.ttir.mlir")).read_text()


@pytest.mark.parametrize(
    ("kernel", "signature", "block", "says"),
    [
        ("misspelt", "*fp16, *i64", 64, r"no attribute 'putt', at /.*mine.py:33: dl.putt\(x, x, BLOCK, 1, ctx\)"),
        ("bare_wait", "*fp16, *i32, i32, *i64", 64, r"hint: .*token = dl.wait\(...\)"),
        ("pointer_in_if", "*fp16, i32", 64, r"hint: a pointer that is assigned in an `if`"),
        ("deaf", "*fp16, *i32, i32, *i64", 1 << 18, r"after stage ttadapter: error: ub overflow, requires \d+ bits"),
    ],
)
def test_a_kernel_that_does_not_lower_says_what_to_do(source, kernel, signature, block, says):
    done = command(f"{source}:{kernel}", "--signature", signature, "--constexpr", f"BLOCK={block}")
    assert done.returncode == lower.EXIT_WRONG, done.stdout + done.stderr
    assert re.search(says, done.stdout), done.stdout
    assert "0 of 1 right (0 to final HIVM, 0 refused by name; 1 wrong)" in done.stdout


# -- the toolchain


def test_a_toolchain_that_cannot_be_installed_is_an_error_that_says_why(tmp_path):
    absent = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_INDEX": "1"}
    done = command("--all", "fence", TRITON_DIST_ASCEND_VENV=str(tmp_path / "venv"), **absent)
    assert done.returncode == lower.EXIT_NO_TOOLCHAIN
    assert "pip cannot install triton-ascend==" in done.stderr and "TRITON_DIST_ASCEND_VENV" in done.stderr
    assert not (tmp_path / "venv").exists(), "a later call must not take the half of it for a whole"


def test_a_folder_that_is_no_toolchain_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("do not delete")
    done = command("--all", "fence", TRITON_DIST_ASCEND_VENV=str(tmp_path))
    assert done.returncode == lower.EXIT_NO_TOOLCHAIN and "it is no virtual environment" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_an_environment_without_an_interpreter_or_of_other_versions_is_not_taken(tmp_path, monkeypatch):
    (tmp_path / "triton_dist_complete").write_text(toolchain._marker())
    done = command("--all", "fence", TRITON_DIST_ASCEND_VENV=str(tmp_path))
    assert done.returncode == lower.EXIT_NO_TOOLCHAIN and "there is no bin/python" in done.stderr
    (tmp_path / "triton_dist_complete").write_text("triton-ascend==1.0\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    done = command("--all", "fence", TRITON_DIST_ASCEND_VENV=str(tmp_path))
    assert done.returncode == lower.EXIT_NO_TOOLCHAIN and "triton-ascend==3.2.0 (found: " in done.stderr
    # An environment in the user's cache is made again.
    made = []
    monkeypatch.delenv("TRITON_DIST_ASCEND_VENV", raising=False)
    monkeypatch.setattr(toolchain, "folder", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "_make", lambda *place: made.append(place))
    toolchain.python()
    assert made == [(tmp_path, tmp_path / "bin" / "python")]


def test_the_environment_is_found_again(monkeypatch):
    place = toolchain.python()
    monkeypatch.setattr(toolchain, "_make", lambda *_: pytest.fail("made again"))
    assert toolchain.python() == place
