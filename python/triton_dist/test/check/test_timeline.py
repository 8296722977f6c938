"""The timeline of an ordinary run: a valid trace in which every wait is met by the arrow of its notify, and a summary."""

import json
import os
import re
import subprocess
import sys

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import check, shmem
from triton_dist.check import recorder
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


def test_a_path_that_cannot_be_written_is_said_before_anything_runs():
    with pytest.raises(OSError, match="timeline: /nowhere/trace.json cannot be written"), timeline("/nowhere/trace.json"):
        pytest.fail("ran")
    assert scheduler.observer is None


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
    assert "RuntimeWarning" not in done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in events} == {0, 1} and sum(event["name"] == "wait" for event in events) == 2


def pings(unordered=False):
    x, inbox, sig = torch.ones(64), shmem.aclshmem_create_tensor((64,), torch.float32), shmem.create_signals(1)
    ping_kernel[(1,)](x, inbox, sig, 3, shmem.context())
    if unordered:
        shmem.peer_tensor(inbox, 0).fill_(0)


def read(path):
    events = json.loads(path.read_text())
    return events, {event["pid"] for event in events}


def test_a_trace_of_a_simulated_schedule_counts_in_steps(tmp_path):
    path = tmp_path / "trace.json"
    report = check.explore(pings, world_size=2, schedules=4, timeline=path)
    events, ranks = read(path)
    assert report.ok and ranks == {0, 1} and report.timeline.startswith(f"Timeline of the schedule fifo: {path}\n")
    for rank in range(2):
        mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        names = [event["name"] for event in mine]
        assert names.count("put") == names.count("wait") == names.count("notify (set)") == 3
        program = next(event for event in mine if event["name"].startswith("ping_kernel"))
        assert all(program["ts"] <= event["ts"] for event in mine if event["tid"] == program["tid"])
        assert any(event["name"] == "kernel ping_kernel" for event in mine)  # the host waits for it
        assert re.search(rf"rank {rank}: 1 launches\n +bytes to rank {1 - rank}: 768\n +blocked \d+ steps on", report.timeline)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = [event for event in events if event["ph"] == "f"]
    assert len(starts) == len(ends) == 6
    assert all(starts[end["id"]]["ts"] < end["ts"] and starts[end["id"]]["pid"] != end["pid"] for end in ends)
    again = tmp_path / "again.json"
    check.explore(pings, world_size=2, schedules=1, timeline=again)
    assert again.read_text() == path.read_text()  # a schedule is the same every time, so is its trace


def test_the_trace_is_that_of_the_first_schedule_that_shows_a_fault(tmp_path):
    path = tmp_path / "trace.json"

    def sometimes():  # a fault from the third schedule on
        calls.append(None)
        pings(len(calls) > 4)

    calls = []
    report = check.explore(sometimes, world_size=2, schedules=5, timeline=path, keep_going=True)
    assert report.findings[0].seed == 1 and f"Timeline of the schedule 1: {path}" in str(report)


def test_a_trace_ends_after_so_many_events(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "LIMIT", 10)
    report = check.explore(pings, world_size=2, schedules=1, timeline=tmp_path / "trace.json")
    events, _ = read(tmp_path / "trace.json")
    assert sum(event["ph"] != "M" for event in events) == 20 and "the trace ends after 10 events; " in report.timeline
