"""The command, the pytest plugin, and the README's program under both."""

import json
import os
import re
import subprocess
import sys

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist import check
from triton_dist.check import pytest_plugin

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 4))


def python(*args, cwd):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    env["PYTHONPATH"] = ROOT
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def ring(tmp_path):
    """The README's ring.py."""
    with open(os.path.join(ROOT, "README.md")) as file:
        source = next(one for one in re.findall(r"```python\n(.*?)```", file.read(), re.S) if "def ring" in one)
    (tmp_path / "ring.py").write_text(source)
    return tmp_path, source


def test_the_command_passes_the_readme_program(ring):
    folder, _ = ring
    code, out = python("-m", "triton_dist.check", "ring.py", "--world-size", "3", "--schedules", "12", cwd=folder)
    assert code == 0 and re.match(r"ring.py, 3 ranks, 12 schedules explored in .* s: nothing found", out), out


def test_the_command_reports_a_missing_wait_and_replays_it(ring):
    folder, source = ring
    (folder / "ring.py").write_text(source.replace("dl.wait(sig, 1, ctx)", "0"))
    code, out = python("-m", "triton_dist.check", "--world-size", "2", "ring.py", cwd=folder)
    assert code == 1 and "data-race: " in out and "put (write) by rank" in out and "at ring.py:10 in ring" in out, out
    seed = re.search(r"--triton-dist-seed (\w+)", out)[1]
    again = python("-m", "triton_dist.check", "ring.py", "--world-size", "2", "--triton-dist-seed", seed, cwd=folder)
    assert again[0] == 1 and "data-race: " in again[1]


def test_the_command_says_what_is_wrong_with_its_arguments(tmp_path):
    code, out = python("-m", "triton_dist.check", "none.py", cwd=tmp_path)
    assert code == 2 and "cannot read none.py" in out
    (tmp_path / "empty.py").write_text("")
    code, out = python("-m", "triton_dist.check", "empty.py", "--world-size", "99", cwd=tmp_path)
    assert code == 2 and "world_size is 99" in out
    for seed in ("foo", "1.5", "path:x", "-1"):
        code, out = python("-m", "triton_dist.check", "empty.py", f"--triton-dist-seed={seed}", cwd=tmp_path)
        assert code == 2 and f"seed is {seed!r}: give 0 or more" in out, out


def test_the_command_leaves_the_script_options_that_begin_like_its_own(tmp_path):
    (tmp_path / "options.py").write_text("import sys\nassert sys.argv[1:] == ['--world', '8', '--keep', 'x'], sys.argv\n")
    code, out = python("-m", "triton_dist.check", "options.py", "--world", "8", "--keep", "x", "--schedules", "1", cwd=tmp_path)
    assert code == 0 and "options.py, 2 ranks, 1 schedules" in out, out


PLUGIN_TEST = """
import triton_dist
import triton_dist.language as dl
from triton_dist import shmem
from triton_dist.check.pytest_plugin import explored
import pytest
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, sig, ctx, WAIT: tl.constexpr):
    dl.put_signal(x + 8, x, 8, sig, 1 - dl.rank(ctx), ctx)
    if WAIT:
        _ = dl.wait(sig, 1, ctx)
    tl.store(x, tl.load(x + 8))

def program(wait):
    x = shmem.aclshmem_create_tensor((16,), torch.int32)
    kernel[(1,)](x, shmem.create_signals(1), shmem.context(), wait)

def test_right(explore):
    assert explore(program, True).schedules == 7

def test_wrong(explore):
    explore(program, False)

@explored
def test_decorated():
    program(True)

@pytest.mark.parametrize("wait", [True])
@explored(world_size=2)
def test_parameters(wait, tmp_path):
    program(wait)
    assert tmp_path.exists()

class TestMethods:
    @explored(world_size=2)
    def test_method(self):
        program(True)

@explored(world_size=2)
def test_decorated_wrong():
    program(False)
"""


def test_the_plugin(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["triton_dist.check.pytest_plugin"]\n')
    (tmp_path / "test_plugin.py").write_text(PLUGIN_TEST)
    run = "-m", "pytest", "-q", "-p", "no:cacheprovider"
    code, out = python(*run, "--triton-dist-schedules", "7", cwd=tmp_path)
    assert code == 1 and "2 failed, 4 passed" in out, out
    assert "data-race: two accesses that nothing orders" in out and "test_plugin.py:14 in kernel" in out
    seed = re.search(r"--triton-dist-seed (\w+)", out)[1]
    code, out = python(*run, "test_plugin.py::test_wrong", "--triton-dist-seed", seed, cwd=tmp_path)
    assert code == 1 and "1 schedules" in out and "data-race" in out, out


def fails():
    assert False, "as it should"  # noqa: B011


@pytest.mark.parametrize("line", [dict(weak=True), dict(seed="path:"), dict(seed="weak:3", weak=True)], ids=str)
def test_the_options_of_the_command_line_serve_a_test_that_searches(line, monkeypatch):
    monkeypatch.setattr(pytest_plugin, "_options", {**pytest_plugin._options, **line})
    with pytest.raises(pytest.fail.Exception, match="AssertionError: as it should"):
        pytest_plugin._checked(fails, exhaustive=True)


WRONG_ARGUMENTS = [
    (dict(world_size=0), "world_size is 0: give 1 to 64"),
    (dict(world_size=1.5), "world_size is 1.5: give 1 to 64"),
    (dict(world_size="2"), "world_size is '2': give 1 to 64"),
    (dict(schedules=0), "schedules is 0: give 1 or more"),
    (dict(resident=1.5), "resident is 1.5: give 1 or more"),
    (dict(resident=0), "resident is 0: give 1 or more"),
    (dict(max_steps=0), "max_steps is 0: give 1 or more"),
    (dict(seed=True), "seed is True: give 0 or more"),
    (dict(stall_seconds=None), "stall_seconds is None: give seconds"),
]


@pytest.mark.parametrize("arguments, message", WRONG_ARGUMENTS, ids=str)
def test_explore_refuses_wrong_arguments_by_name(arguments, message):
    with pytest.raises(ValueError, match=re.escape(f"explore: {message}")):
        check.explore(print, **arguments)


def test_explore_wants_a_function():
    with pytest.raises(TypeError, match="explore: program is 3: give the function"):
        check.explore(3)


def test_the_command_replays_a_path_and_writes_a_timeline(ring):
    folder, source = ring
    (folder / "ring.py").write_text(source.replace("dl.notify(sig, right, ctx, 1) ", "dl.notify(sig, right, ctx, 0) "))
    run = "-m", "triton_dist.check", "ring.py", "--world-size", "2"
    code, out = python(*run, "--exhaustive", "--timeline", "trace.json", cwd=folder)
    seed = re.search(r"--triton-dist-seed (path:[0-9.]*)\)", out)[1]
    assert code == 1 and "deadlock: " in out and f"Timeline of the schedule {seed}: trace.json" in out, out
    assert any(event["name"] == "put" for event in json.loads((folder / "trace.json").read_text()))
    code, out = python(*run, "--triton-dist-seed", seed, cwd=folder)
    assert code == 1 and "1 schedules explored" in out and "deadlock: " in out, out
    code, out = python(*run, "--timeline", "none/trace.json", cwd=folder)
    assert code == 2 and "none/trace.json" in out, out


ARRIVALS = """
import os, triton_dist, triton_dist.language as dl
from triton_dist import shmem
import torch, triton

@triton.jit
def arrive(counter, places, ctx):
    for _ in range(0, 3):
        place = dl.atomic_add(counter, 1, 0, ctx)
        dl.remote_store(places + place, dl.rank(ctx), 0, ctx)

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert shmem.aclshmem_init(shmem.InitAttr(rank, world, "", 1 << 16)) == 0
counter, places = shmem.create_signals(1), shmem.aclshmem_create_tensor((64,), torch.int32)
arrive[(2,)](counter, places, shmem.context())
shmem.barrier_all()
assert rank != 0, places[: 6 * world].tolist()
shmem.aclshmem_finalize()
"""


@pytest.mark.parametrize("seed", ["2", "3", "weak:1"])
def test_a_seed_is_the_same_schedule_in_another_process(tmp_path, monkeypatch, seed):
    (tmp_path / "arrivals.py").write_text(ARRIVALS)
    orders = set()
    for hashes in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hashes)
        run = "-m", "triton_dist.check", "arrivals.py", "--world-size", "3", "--triton-dist-seed", seed
        code, out = python(*run, cwd=tmp_path)
        orders.add(re.search(r"AssertionError: (\[.*\])", out)[1])
    assert code == 1 and len(orders) == 1, orders
