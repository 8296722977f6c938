"""Tutorial 01 as a reader starts it."""

import os
import re
import subprocess
import sys
import time

import pytest

import triton_dist

pytestmark = pytest.mark.dist

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 4))
TUTORIAL = os.path.join(ROOT, "tutorials", "ascend", "01-ascend-allgather-gemm.py")
SMALL = ["--M", "700", "--N", "300", "--K", "200"]


def environment():
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**clean, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}


def start(world, script=TUTORIAL, *args):
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", script, *args]
    return subprocess.Popen(launch, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, timeout=120):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def expected(world, rtol="1e-3", atol="1e-3"):
    lines = [f"[INFO] Rank {r} of {world} initialized" for r in range(world)]
    lines += [
        f"[PASS] Rank {r}: C_golden and C match within tolerances (rtol={rtol}, atol={atol})." for r in range(world)
    ]
    return sorted([*lines, f"[INFO] Test passed successfully for {world} ranks!"])


@pytest.mark.parametrize(
    "world, args, tolerance",
    [(1, [], "1e-3"), (2, [], "1e-3"), (3, ["--dtype", "bf16"], "8e-3"), (2, ["--dtype", "fp32", "--warmup", "2"], "1e-3")],
    ids=["1 rank", "2 ranks", "3 ranks, bf16", "2 ranks, fp32, warm"],
)
def test_it_prints_exactly_what_the_page_says(world, args, tolerance, need_devices):
    need_devices(world)
    code, out, err = finish(start(world, TUTORIAL, *SMALL, *args))
    assert code == 0, err
    assert sorted(out.splitlines()) == expected(world, tolerance, tolerance), out + err
    assert out.splitlines()[-1] == f"[INFO] Test passed successfully for {world} ranks!"


def test_three_runs_at_once_do_not_meet(need_devices):
    need_devices(2)
    runs = [start(2, TUTORIAL, "--M", "64", "--N", "64", "--K", "64", "--seed", str(i)) for i in range(3)]
    for code, out, err in [finish(run) for run in runs]:
        assert code == 0 and sorted(out.splitlines()) == expected(2), out + err


def test_with_iters_it_prints_both_times(need_devices):
    need_devices(1)
    code, out, _ = finish(start(1, TUTORIAL, *SMALL, "--iters", "2"))
    assert code == 0
    assert re.search(r"\[TIME\] Rank 0: kernel [\d.e-]+ s, fp32 matmul of the same size [\d.e-]+ s", out), out


def test_plain_python_explains_torchrun():
    done = subprocess.run([sys.executable, TUTORIAL], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node=2" in done.stderr and "Traceback" not in done.stderr


def test_sizes_below_one_are_refused():
    code, out, err = finish(start(1, TUTORIAL, "--K", "0"))
    assert code != 0 and "must be at least 1" in err and not out


BROKEN = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("tutorial", {tutorial!r})
tutorial = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tutorial)
right = tutorial.golden
def wrong(a, b):
    {body}
if os.environ["RANK"] == "1":
    tutorial.golden = wrong
tutorial.main()
"""


@pytest.mark.parametrize(
    "body, sign",
    [("return right(a, b) + 1", "[FAIL] Rank 1: C_golden and C differ"), ("raise ValueError('no reference')", "no reference")],
    ids=["wrong result", "exception"],
)
def test_one_failing_rank_fails_all_promptly(tmp_path, body, sign, need_devices):
    need_devices(2)
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(tutorial=TUTORIAL, body=body))
    began = time.monotonic()
    code, out, err = finish(start(2, str(script), *SMALL))
    assert code != 0 and sign in out + err, out + err
    assert "Test passed" not in out
    assert time.monotonic() - began < 60


@pytest.mark.skipif(triton_dist.backend != "cpu", reason="looks at the shared memory of the cpu platform")
def test_it_leaves_nothing_behind():
    before = set(os.listdir("/dev/shm"))
    code, _, err = finish(start(2, TUTORIAL, "--M", "64", "--N", "64", "--K", "64"))
    assert code == 0, err
    assert set(os.listdir("/dev/shm")) <= before
