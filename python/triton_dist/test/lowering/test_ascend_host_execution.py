"""Kernels as triton-ascend lowers them, executed by ranks on this machine: right data, and what cannot run so is listed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import triton_dist.language as dl
from third_party.ascend import run_on_host
from third_party.ascend.host_execution import host_ir
from third_party.ascend.host_execution.cases import CASES
from third_party.ascend.host_execution.run import NOT_EXECUTABLE, Execution, Result, compare, problem, run_all
from triton_dist import kernels
from triton_dist.testing import RanksFailed

import torch

sys.path.insert(0, str(Path(__file__).parent))  # of the ranks, too
import ascend_host_bodies as bodies

ROOT = Path(__file__).parents[4]
WORLDS = [2, 4]


def test_every_case_gives_the_reference_or_is_refused_as_listed():
    results = list(run_all(list(CASES), WORLDS))
    assert {(r.case, r.world) for r in results} == {(case, world) for case in CASES for world in WORLDS}
    wrong = [f"{r.case}, {r.world} ranks, seed {r.seed}: {problem(r)}" for r in results if problem(r)]
    assert not wrong, "\n".join(wrong)


def test_every_word_and_operator_is_in_a_case():
    folder = ROOT / "third_party" / "ascend" / "host_execution" / "cases"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    words = text + "".join(path.read_text() for path in (ROOT / "triton_dist" / "kernels").glob("*.py"))
    missing = [word for word in dl.__all__ if callable(getattr(dl, word)) and not re.search(rf"\bdl\.{word}\(", words)]
    assert missing == ["device_function"]  # a decorator, not a word
    operators = [name for name in kernels.__all__ if name[0].islower() and not name.startswith(("create_", "concurrent"))]
    assert len(operators) > 15
    dynamic = {"gemm_reduce_scatter", "gemm_allreduce"}  # called by name
    assert [name for name in operators if f"kernels.{name}(" not in text and name not in dynamic] == []
    assert all(f'"{name}"' in text for name in dynamic)


def test_what_is_listed_is_a_case_and_in_the_documentation():
    documentation = (ROOT / "docs" / "ascend-host-execution.md").read_text()
    for case, entry in NOT_EXECUTABLE.items():
        assert case in CASES and f"`{case}`" in documentation
        assert set(entry) == {"stage", "reason", "why"} and entry["stage"] in ("ttir", "ttadapter", "host")


@pytest.fixture(scope="module")
def execution():
    with Execution() as execution:
        yield execution


def test_a_put_to_the_wrong_peer_is_found(execution):
    for difference, part in execution.ranks(2).run(bodies.wrong_peer, execution.address):
        assert difference > 0 and part == float("inf")


def test_arguments_of_every_kind(execution):
    for results, ran in execution.ranks(2).run(bodies.arguments, execution.address):
        assert all(torch.equal(got, expected) for got, expected in results)
        assert ran == {"takes_a_tensor": 3}


def test_a_dtype_as_constexpr(execution):
    for got, expected in execution.ranks(2).run(bodies.dtypes, execution.address):
        assert torch.equal(got, expected)


def test_a_wait_that_nobody_ends_names_its_programs_at_the_limit(execution):
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"Stuck: wait_for_nobody, grid \(3, 1, 1\): after 1 s .*still wait: \[\(1, 0, 0\)\]"):
        execution.ranks(2).run(bodies.waits, execution.address, 1.0, timeout=40)
    assert time.monotonic() - begin < 35


def test_a_loop_that_passes_no_barrier_ends_its_process(execution):
    with pytest.raises(RanksFailed, match=r"spin, grid \(2, 1, 1\): .* pass no barrier: \[\(0, 0, 0\), \(1, 0, 0\)\]"):
        execution.ranks(2).run(bodies.spins, execution.address, 0.5, timeout=50)


def test_nothing_is_left_when_the_compile_server_ends():
    with Execution() as execution:
        address, process = execution.address, execution._compiler._process.pid
        assert os.path.exists(address)
    assert not os.path.exists(os.path.dirname(address))
    assert not os.path.exists(f"/proc/{process}")


@pytest.mark.parametrize("what", [["all_gather", "dl.wait", "--ranks", "2,3"], ["--script", "{script}", "--ranks", "2"]])
def test_sigterm_ends_the_ranks_and_leaves_nothing(tmp_path, what):
    script = tmp_path / "sleeps.py"
    script.write_text("import time\nprint('asleep', flush=True)\ntime.sleep(100)\n")
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    command = [sys.executable, "-m", "third_party.ascend.run_on_host", *(word.format(script=script) for word in what)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp)}, start_new_session=True)
    end = time.monotonic() + 60
    while not list(tmp.glob("*/socket")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    time.sleep(1)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert list(tmp.iterdir()) == []
    ours = [p for p in Path("/proc").glob("[0-9]*/environ") if f"TMPDIR={tmp}".encode() in _read(p)]
    assert ours == []


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_an_operation_without_a_host_form_is_named():
    text = "module {\n  func.func @k(%arg0: memref<?xi8>) {\n    hivm.hir.strange %arg0\n    return\n  }\n}\n"
    with pytest.raises(host_ir.NotForTheHost, match="hivm.hir.strange"):
        host_ir.to_host(text)


def test_compare_lets_nothing_pass():
    one = torch.ones(3)
    assert compare(one, one.clone(), 0) == (0.0, 0.0)
    assert compare(one, one + 0.5, 1.0) == (0.5, 0.5)
    assert compare(one, one + 0.5, torch.tensor([1.0, 0.25, 1.0])) == (0.5, 2.0)
    for other in (one[:2], one.double(), one * float("nan"), -one):
        assert compare(one, other, 0)[1] == float("inf")
    assert compare(torch.zeros(1), -torch.zeros(1), 0)[1] == float("inf")
    assert compare(one * float("nan"), one, 1.0)[1] == float("inf")


def test_an_entry_of_the_list_that_comes_to_run_speaks_up():
    case, entry = next(iter(NOT_EXECUTABLE.items()))
    assert "runs now" in problem(Result(case, 2, "exact"))
    assert problem(Result(case, 2, "refused", stage=entry["stage"], reason=f"k: {entry['reason']}!")) is None
    assert "says that" in problem(Result(case, 2, "refused", stage="host", reason="k: something else"))
    assert problem(Result("all_gather", 2, "refused", stage="host", reason="x")) == "refused: x"
    assert problem(Result("all_gather", 2, "WRONG", reason="rank 0: y")) == "WRONG: rank 0: y"


def test_a_tutorial_runs_as_lowered_code(capsys):
    script = ROOT / "tutorials" / "ascend" / "05-ascend-reverse-all2all-barrier.py"
    sizes = ["--S", "60", "--H", "3", "--D", "20"]
    assert run_on_host.main(["--script", str(script), "--ranks", "2", "--", *sizes]) == 0
    out = capsys.readouterr().out
    assert "rank 0: [PASS]" in out and "rank 1: [PASS]" in out
    assert re.search(r"2 ranks: ran as lowered code on rank 0: \w+_kernel x [1-9]", out)


def test_the_kernel_of_the_readme_runs_as_lowered_code(tmp_path, capsys):
    script = tmp_path / "ring.py"
    script.write_text(re.search(r"```python\n(import os\n.*?)```", (ROOT / "README.md").read_text(), re.S)[1])
    assert run_on_host.main(["--script", str(script), "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "rank 1: 1.0 = 1 + 0" in out and "3 ranks: ran as lowered code on rank 0: ring x 1" in out


def test_a_script_that_fails_shows_its_output_and_status(tmp_path, capsys):
    script = tmp_path / "fails.py"
    script.write_text("import os\nprint('here')\nraise SystemExit(int(os.environ['RANK']))\n")
    assert run_on_host.main(["--script", str(script), "--ranks", "2"]) == 1
    assert "1 of 2 ranks failed" in (text := capsys.readouterr().err) and "here" in text


def test_the_command_lists_its_cases_and_refuses_unknown_ones(capsys):
    assert run_on_host.main(["--list"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == list(CASES)
    wrong = ((["all_gahter"], "no case all_gahter"), ([], "give --all"), (["--all", "--ranks", "0"], "--ranks is '0'"))
    wrong += ((["--script", "no/such.py"], "there is no file 'no/such.py'"),)
    for arguments, text in wrong:
        with pytest.raises(SystemExit) as end:
            run_on_host.main(arguments)
        assert end.value.code == 2
        assert text in capsys.readouterr().err
