"""Loops that touch no memory and wait for nothing end in a finding that names them; slow programs that are right do not."""

import re
import signal
import threading
import time

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import check, shmem
from triton_dist.interpreter import scheduler

import torch
import triton
import triton.language as tl

STALL = 0.6  # seconds


@triton.jit
def endless_kernel(x, ctx):
    n = 0
    while n < dl.num_ranks(ctx):
        n += 0  # the kernel's loop
    tl.store(x, n)


@triton.jit
def store_kernel(x):
    tl.store(x, 1)


def in_host():
    if shmem.my_pe() == 1:
        while True:
            pass
    shmem.barrier_all()


def in_kernel():
    endless_kernel[(2,)](shmem.aclshmem_create_tensor((1,), torch.int32), shmem.context())


def in_torch():
    y = torch.zeros(3)
    while True:
        y = y + 0


def asleep():
    time.sleep(1000)


def swallowing_exceptions():
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def swallowing_everything():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass


def in_finally():
    try:
        while True:
            pass
    finally:
        while True:
            pass


ENDLESS = [in_host, in_kernel, in_torch, asleep, swallowing_exceptions, swallowing_everything, in_finally]


@pytest.mark.parametrize("program", ENDLESS)
def test_an_endless_loop_is_a_finding_with_its_place(program):
    began = time.monotonic()
    report = check.explore(program, world_size=2, schedules=3, stall_seconds=STALL)
    assert time.monotonic() - began < 30
    assert report.kinds == ["livelock"], report
    line = endless_kernel if program is in_kernel else program
    assert re.search(rf"test_watchdog.py:\d+ in {line.__name__}: runs for [\d.]+ s without touching", str(report)), report
    assert scheduler.observer is None and not shmem.aclshmemx_init_status()
    check.explore(in_order, world_size=2, schedules=2).raise_if_found()  # nothing is left behind


def in_order():
    store_kernel[(1,)](torch.zeros(1))
    shmem.barrier_all()


@pytest.mark.parametrize("program", [in_host, in_kernel, swallowing_exceptions])
def test_in_a_thread_that_is_not_the_main_one(program):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(check.explore(program, schedules=2, stall_seconds=STALL)))
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and reports[0].kinds == ["livelock"]
    assert "runs for" in str(reports[0]) and "test_watchdog.py" in str(reports[0])


def meeting_for_ever():
    while True:
        shmem.barrier_all()


def launching_for_ever():
    while True:
        try:
            store_kernel[(1,)](torch.zeros(1))
        except Exception:
            pass


@pytest.mark.parametrize("program", [meeting_for_ever, launching_for_ever])
def test_a_loop_of_meetings_or_launches_ends_too(program):
    report = check.explore(program, world_size=2, schedules=1, max_steps=3000)
    assert report.kinds == ["livelock"] and "runs on after 3001" in str(report), report


def polling():
    signals = shmem.create_signals(1)
    word, me = signals.data_ptr(), shmem.my_pe()
    if me == 0:
        while signals[0, 0].item() == 0:
            pass
    else:
        source = torch.ones(1, dtype=torch.int32)
        shmem.aclshmemx_putmem_signal(word, source.data_ptr(), 0, word, 1, shmem.SignalOp.SIGNAL_SET, 0)


def polling_in_vain():
    signals = shmem.create_signals(1)
    while signals[0, 0].item() == 0:
        pass


def test_a_host_that_polls_symmetric_memory_lets_the_others_run():
    report = check.explore(polling, world_size=2, schedules=5, keep_going=True)
    assert set(report.kinds) <= {"data-race", "missing-acquire", "missing-release"} and report.flagged == 5  # and no livelock


def test_a_host_that_polls_in_vain_is_a_deadlock():
    report = check.explore(polling_in_vain, world_size=2, schedules=1)
    assert report.kinds == ["deadlock"] and "polls rank 1's 1 signals, element [0, 0] (heap+0x0), sees 0" in str(report)


def computing():
    """Reads the same elements again and again, of a matrix, and a few of them many times."""
    a = shmem.aclshmem_create_tensor((9, 9), torch.int32)
    a.fill_(1)
    assert sum(a[i, k].item() * a[k, j].item() for i in range(9) for j in range(9) for k in range(9)) == 729
    assert sum(a[i % 3, 0].item() for i in range(2000)) == 2000
    shmem.barrier_all()


def test_a_host_that_computes_with_symmetric_memory_is_not_taken_for_polling():
    check.explore(computing, world_size=2, schedules=2).raise_if_found()


def slow(n):
    torch.linalg.svdvals(torch.randn(n, n))  # one call, longer than the limit
    shmem.barrier_all()


def seconds_of(function, *args):
    began = time.monotonic()
    function(*args)
    return time.monotonic() - began


def test_a_long_call_of_torch_is_not_taken_for_endless():
    check.explore(slow, 10, world_size=2, schedules=1).raise_if_found()  # torch imports much when it is first called
    n = 800
    while (alone := seconds_of(torch.linalg.svdvals, torch.randn(n, n))) < 0.75:  # whatever the machine's speed
        n = n * 5 // 4
    limit = alone / 2.5
    reports = []
    took = seconds_of(lambda: reports.append(check.explore(slow, n, world_size=2, schedules=1, stall_seconds=limit)))
    assert reports[0].ok and took > limit, (reports, took, limit)


def test_the_time_given_holds_inside_of_a_schedule():
    began = time.monotonic()
    report = check.explore(meeting_for_ever, world_size=2, schedules=3, seconds=1)
    assert time.monotonic() - began < 20
    assert report.kinds == ["livelock"] and "the time given (1 s) was over before the first schedule was" in str(report)
    assert "meeting_for_ever" in report.findings[0].text


def test_the_time_given_may_end_in_a_later_schedule():
    calls = []

    def program():
        calls.append(None)
        while len(calls) > 2:
            shmem.barrier_all()

    check.explore(in_order, world_size=2, schedules=1)  # what is slow but once
    report = check.explore(program, world_size=2, schedules=3, seconds=1)
    assert report.ok and report.schedules == 1 and report.cut and "then the time given was over: nothing found" in str(report)


def test_the_handler_is_the_callers_again():
    def mine(*about):
        pass

    outer = signal.signal(signal.SIGURG, mine)
    try:
        check.explore(in_order, world_size=2, schedules=1)
        assert signal.getsignal(signal.SIGURG) is mine
    finally:
        signal.signal(signal.SIGURG, outer)


@pytest.mark.parametrize("options", [dict(seconds=0), dict(stall_seconds=-1), dict(stall_seconds=None)])
def test_wrong_limits_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        check.explore(in_order, **options)
