"""The reduced search reaches every outcome that the search of all interleavings reaches."""

import math

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import check, shmem
from triton_dist.check import exploration
from triton_dist.check.exhaustive import Exhaustive

import torch
import triton
import triton.language as tl


class Everything(Exhaustive):
    """No reduction at all."""

    def pick(self, ready):
        fresh = self.depth == len(self.nodes)
        task = super().pick(ready)
        if fresh:
            self.nodes[-1].sleep = {}
            self.nodes[-1].todo = set(self.nodes[-1].enabled)
        return task

    def _analyse(self):
        pass


def outcomes(program, search, monkeypatch, world_size, *args):
    """(the set of what rank 0 returned in any run, the kinds of findings, runs)"""
    seen = set()

    def record():
        result = program(*args)
        if shmem.my_pe() == 0:
            seen.add(result)

    monkeypatch.setattr(exploration, "Exhaustive", search)
    report = check.explore(
        record, world_size=world_size, exhaustive=True, schedules=30_000, keep_going=True, heap_bytes=1 << 14
    )
    assert report.complete
    return seen, report.kinds, report.schedules


@triton.jit
def race_kernel(cells, out, ctx, V: tl.constexpr):
    """What each program sees depends on who came when. Results lie at this rank; nobody's plain accesses race."""
    me, pid = dl.rank(ctx), tl.program_id(0)
    at = out + pid * 2
    if V == "counter":
        tl.store(at, dl.atomic_add(cells, 1, 0, ctx))
        tl.store(at + 1, dl.atomic_add(cells, 1, 0, ctx))
    elif V == "exchange":
        tl.store(at, dl.atomic_xchg(cells, 1 + me, 0, ctx))
        tl.store(at + 1, dl.atomic_xchg(dl.signal_at(cells, 1), 1 + me, 0, ctx))
    elif V == "flags":  # Dekker: can both see that the other has not come?
        dl.notify(dl.signal_at(cells, me), 1 - me, ctx, 1)
        tl.store(at, dl.test(dl.signal_at(cells, 1 - me), 1, ctx).to(tl.int32))
    elif V == "swap":
        tl.store(at, dl.atomic_cas(cells, 0, 1 + me, 0, ctx))
        tl.store(at + 1, dl.atomic_cas(cells, 1, 5, 0, ctx))
    elif V == "overshoot":
        if me == 1:
            dl.notify(cells, 0, ctx, 1)
            dl.notify(cells, 0, ctx, 2)
            dl.notify(cells, 0, ctx, 1 if pid == 0 else 3)
        else:
            _ = dl.wait(cells, 1, ctx, "eq")
            _ = dl.wait(cells, 2, ctx, "ge")
    elif V == "spin":
        if me == 1:
            dl.notify(cells, 0, ctx, 1)
            dl.notify(cells, 0, ctx, 2)
        else:
            seen = dl.atomic_add(cells, 0, 0, ctx)
            while seen < 1:
                seen = dl.atomic_add(cells, 0, 0, ctx)
            tl.store(at, seen)


def race(V, programs):
    cells, out = shmem.create_signals(2), torch.zeros(2 * programs, dtype=torch.int32)
    race_kernel[(programs,)](cells, out, shmem.context(), V)
    shmem.barrier_all()
    return tuple(out.tolist()), cells[0, 0].item(), cells[1, 0].item()


CASES = [("counter", 2, 1), ("exchange", 2, 1), ("flags", 2, 1), ("swap", 2, 1), ("overshoot", 2, 1), ("spin", 2, 1)]


@pytest.mark.parametrize("V, world, programs", CASES)
def test_the_reduction_loses_no_outcome(V, world, programs, monkeypatch):
    reduced = outcomes(race, Exhaustive, monkeypatch, world, V, programs)
    everything = outcomes(race, Everything, monkeypatch, world, V, programs)
    assert reduced[:2] == everything[:2]
    assert len(reduced[0]) > 1 or V == "overshoot"
    assert reduced[2] < everything[2]


def test_a_path_repeats_its_run():
    report = check.explore(race, "overshoot", 1, exhaustive=True, schedules=1000)
    assert report.kinds == ["deadlock"] and not report.complete
    again = check.explore(race, "overshoot", 1, seed=report.findings[0].seed)
    assert again.kinds == ["deadlock"] and again.schedules == 1
    assert again.findings[0].text == report.findings[0].text


@pytest.mark.parametrize("seed", ["path", "fifo", 3, "weak:0"])
def test_a_seed_runs_its_schedule_in_place_of_the_search(seed):
    """A test that searches is replayed by --triton-dist-seed, without a change to the test."""
    report = check.explore(race, "overshoot", 1, exhaustive=True, schedules=1000)
    seed = report.findings[0].seed if seed == "path" else seed
    again = check.explore(race, "overshoot", 1, exhaustive=True, seed=seed, schedules=1000)
    alone = check.explore(race, "overshoot", 1, seed=seed)
    assert again.schedules == 1 and not again.complete
    assert [one.text for one in again.findings] == [one.text for one in alone.findings]
    assert str(seed).startswith("path") <= (again.kinds == ["deadlock"])


def test_complete_says_so():
    report = check.explore(race, "counter", 1, exhaustive=True, schedules=1000)
    assert report.ok and report.complete and f"all {report.schedules} schedules explored" in str(report)
    assert not check.explore(race, "counter", 1, exhaustive=True, schedules=2).complete


@triton.jit
def arrivals_kernel(cells, times, ctx, APART: tl.constexpr):
    for _ in range(0, times):
        dl.atomic_add(dl.signal_at(cells, dl.rank(ctx) if APART else 0), 1, 0, ctx)


def arrivals(times, apart):
    arrivals_kernel[(1,)](shmem.create_signals(4), times, shmem.context(), apart)


@pytest.mark.parametrize("world, times", [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)])
def test_there_are_as_many_schedules_as_orders_of_arrival(world, times):
    """Each rank adds to one counter: (world * times)! / times!^world orders. To counters of their own: one."""
    orders = math.factorial(world * times) // math.factorial(times) ** world
    for apart, expected in ((False, orders), (True, 1)):
        report = check.explore(
            arrivals, times, apart, world_size=world, exhaustive=True, schedules=1000, heap_bytes=1 << 14
        )
        assert report.complete and report.ok and report.schedules == expected
