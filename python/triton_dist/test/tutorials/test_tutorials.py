"""Tutorials 02 to 10 as a reader starts them: sizes that are ragged everywhere, two dtypes, two world sizes."""

import os
import re
import subprocess
import sys
import time

import pytest

import triton_dist  # noqa: F401  before triton

pytestmark = pytest.mark.dist

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 4))
FOLDER = os.path.join(ROOT, "tutorials", "ascend")

GEMM = ["--M", "701", "--N", "300", "--K", "203"]
EXCHANGE = ["--S", "600", "--H", "3", "--D", "20"]
MOE = ["--tokens", "70", "--hidden", "300", "--topk", "3", "--experts", "10", "--drop", "0.2"]
GEMM_RUNS = [(2, [], "1e-3"), (3, ["--dtype", "bf16", "--K", "4"], "8e-3")]
EXCHANGE_RUNS = [(2, ["--warmup", "2"], "0"), (3, ["--dtype", "fp32"], "0")]

# file: (name of the result, sizes, runs of (ranks, options, tolerance))
TUTORIALS = {
    "02-ascend-gemm-reduce-scatter.py": ("C", GEMM, [GEMM_RUNS[0], (3, ["--dtype", "bf16", "--M", "4"], "8e-3")]),
    "03-ascend-gemm-allreduce-oneshot.py": ("C", GEMM, GEMM_RUNS),
    "04-ascend-reverse-all2all.py": ("Y", EXCHANGE, EXCHANGE_RUNS),
    "05-ascend-reverse-all2all-barrier.py": ("Y", EXCHANGE, EXCHANGE_RUNS),
    "06-ascend-gemm-ar-notify.py": ("C", GEMM, GEMM_RUNS),
    "07-ascend-qkv-alltoall.py": (
        "QKV",
        ["--S", "600", "--D", "20"],
        [(2, ["--Hq", "8", "--Hkv", "2"], "0"), (3, ["--Hq", "6", "--Hkv", "1", "--dtype", "fp32"], "0")],
    ),
    "08-ascend-transpose-all2all.py": ("Y", EXCHANGE, EXCHANGE_RUNS),
    "09-ascend-dispatch-all2all.py": ("tokens", MOE, [(2, ["--warmup", "2"], "0"), (3, ["--dtype", "fp16"], "0")]),
    "10-ascend-combine-all2all.py": ("out", MOE, [(2, ["--warmup", "2"], "8e-3"), (3, ["--dtype", "fp16"], "1e-3")]),
}
RUNS = [(name, *run) for name, (_, _, runs) in TUTORIALS.items() for run in runs]


def environment():
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**clean, "PYTHONPATH": ROOT}


@pytest.fixture
def torchrun(need_devices):
    """`torchrun(world, script, *args)`: (exit code, stdout, stderr)."""

    def run(world, script, *args):
        need_devices(world)
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", script, *args]
        done = subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=150)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize("name, world, args, tolerance", RUNS, ids=[f"{n[:2]}-{w}-ranks" for n, w, _, _ in RUNS])
def test_it_prints_exactly_what_a_tutorial_prints(name, world, args, tolerance, torchrun):
    result, sizes, _ = TUTORIALS[name]
    code, out, err = torchrun(world, os.path.join(FOLDER, name), *sizes, *args)
    assert code == 0, out + err
    match = f"{result}_golden and {result} match within tolerances (rtol={tolerance}, atol={tolerance})."
    lines = [f"[INFO] Rank {r} of {world} initialized" for r in range(world)]
    lines += [f"[PASS] Rank {r}: {match}" for r in range(world)]
    last = f"[INFO] Test passed successfully for {world} ranks!"
    assert sorted(out.splitlines()) == sorted([*lines, last]), out + err
    assert out.splitlines()[-1] == last


@pytest.mark.parametrize("name", TUTORIALS, ids=lambda name: name[:2])
def test_plain_python_explains_torchrun(name):
    done = subprocess.run(
        [sys.executable, os.path.join(FOLDER, name)], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "torchrun --nproc-per-node=2" in done.stderr and "Traceback" not in done.stderr


WRONG = [
    ("02-ascend-gemm-reduce-scatter.py", ["--M", "0"], "--M, --N and --K must be at least 1"),
    ("04-ascend-reverse-all2all.py", ["--S", "0"], "--S, --H and --D must be at least 1"),
    ("07-ascend-qkv-alltoall.py", ["--S", "0"], "--S, --Hq, --Hkv and --D must be at least 1"),
    ("07-ascend-qkv-alltoall.py", ["--Hq", "7"], "--Hq is 7: give a multiple of the 2 ranks and of --Hkv 2"),
    ("07-ascend-qkv-alltoall.py", ["--Hq", "6", "--Hkv", "4"], "--Hq is 6: give a multiple of the 2 ranks and of --Hkv 4"),
    ("09-ascend-dispatch-all2all.py", ["--topk", "9", "--experts", "4"], "--topk 9 is more than --experts 4"),
    ("10-ascend-combine-all2all.py", ["--drop", "1.5"], "--drop is 1.5: give a share of 0 to 1"),
]


@pytest.mark.parametrize("name, args, text", WRONG, ids=[f"{n[:2]}{''.join(a)}" for n, a, _ in WRONG])
def test_wrong_sizes_are_named_before_any_rank_communicates(name, args, text):
    # Started without torchrun, which ends one rank when the other has failed; and nobody answers at the meeting's port.
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, os.path.join(FOLDER, name), *args],
            env={**environment(), **place, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert rank.returncode == 2 and f"error: {text}" in err and "Traceback" not in err and not out, out + err
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("name", ["03-ascend-gemm-allreduce-oneshot.py", "10-ascend-combine-all2all.py"])
def test_with_iters_it_prints_times(name, torchrun):
    code, out, err = torchrun(1, os.path.join(FOLDER, name), *TUTORIALS[name][1], "--iters", "2")
    assert code == 0 and re.search(r"^\[TIME\] Rank 0: ", out, re.MULTILINE), out + err


BROKEN = """
import importlib.util, os
spec = importlib.util.spec_from_file_location("tutorial", {tutorial!r})
tutorial = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tutorial)
def broken(*args, **kwargs):
    raise ValueError("no reference")
if os.environ["RANK"] == "1":
    tutorial.golden = broken
tutorial.main()
"""


@pytest.mark.parametrize("name", ["02-ascend-gemm-reduce-scatter.py", "09-ascend-dispatch-all2all.py"])
def test_one_failing_rank_fails_all_promptly(tmp_path, name, torchrun):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(tutorial=os.path.join(FOLDER, name)))
    began = time.monotonic()
    code, out, err = torchrun(2, str(script), *TUTORIALS[name][1])
    assert code != 0 and "no reference" in err and "Test passed" not in out, out + err
    assert time.monotonic() - began < 60
