"""The timeline of an ordinary run: a valid trace in which every wait is met by the arrow of its notify, and a summary."""

import json
import os
import re
import subprocess
import sys

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem
from triton_dist.check.timeline import timeline
from triton_dist.interpreter import scheduler
from triton_dist.testing import run_ranks

import torch
import triton

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 4))


@triton.jit
def ping_kernel(x, inbox, sig, rounds, ctx):
    me = dl.rank(ctx)
    for r in range(0, rounds):
        dl.put(inbox, x, 64, 1 - me, ctx)
        dl.notify(sig, 1 - me, ctx, r + 1)
        _ = dl.wait(sig, r + 1, ctx)


def ping(path):
    x, inbox, sig = torch.ones(64), shmem.aclshmem_create_tensor((64,), torch.float32), shmem.create_signals(1)
    with timeline(path) as recorder:
        ping_kernel[(1,)](x, inbox, sig, 3, shmem.context())
        with pytest.raises(RuntimeError, match="recorded or checked already"), timeline(path):
            pass
    assert scheduler.observer is None
    return recorder.summary()


@pytest.mark.dist
def test_a_trace_of_two_ranks(tmp_path):
    path = str(tmp_path / "trace.json")
    summaries = run_ranks(ping, 2, path)
    with open(path) as file:
        events = json.load(file)
    slices = [event for event in events if event["ph"] == "X"]
    for rank in range(2):
        mine = [event for event in slices if event["pid"] == rank]
        names = [event["name"] for event in mine]
        assert names.count("put") == names.count("wait") == names.count("notify (set)") == 3
        program = next(event for event in mine if event["name"].startswith("ping_kernel"))
        for event in mine:  # inside of the program's slice
            assert program["ts"] <= event["ts"] and event["dur"] > 0
            assert event["ts"] + event["dur"] <= program["ts"] + program["dur"] + 1
        puts = [event["args"] for event in mine if event["name"] == "put"]
        assert all(about["bytes"] == 256 and about["peer"] == 1 - rank for about in puts)
        assert all("test_timeline.py" in event["args"]["at"] for event in mine if event["name"] == "wait")
        assert re.search(rf"^rank {rank}: 1 launches\n  bytes to rank {1 - rank}: 768$", summaries[rank], re.MULTILINE)
        assert "longest wait: " in summaries[rank] and f"rank {rank}'s 1 signals, element [0, 0]" in summaries[rank]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = [event for event in events if event["ph"] == "f"]
    assert len(starts) == 6 and len(ends) == 6
    for end in ends:
        start = starts[end["id"]]
        assert start["pid"] != end["pid"] and start["ts"] <= end["ts"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "program (0, 0, 0)"}


@pytest.mark.dist
def test_the_command_records_an_unedited_script(tmp_path):
    with open(os.path.join(ROOT, "README.md")) as file:
        source = next(one for one in re.findall(r"```python\n(.*?)```", file.read(), re.S) if "def ring" in one)
    (tmp_path / "ring.py").write_text(source)
    (tmp_path / "trace.json").write_text("from an earlier run")
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "triton_dist.check.timeline"]
    env["PYTHONPATH"] = ROOT
    command = [*run, "trace.json", "ring.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0: 1.0 = 0 + 1" in done.stdout and "bytes to rank 1: 4000" in done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in events} == {0, 1} and sum(event["name"] == "wait" for event in events) == 2
