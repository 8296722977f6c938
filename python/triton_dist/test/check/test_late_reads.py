"""Weak memory: a plain read may come after a store that nothing orders behind it, and after no other."""

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import check, shmem

import torch
import triton
import triton.language as tl


@triton.jit
def credit_kernel(buffer, credit, got, ctx, GIVE: tl.constexpr, TAKE: tl.constexpr):
    """Rank 0 reads its buffer and gives it back to rank 1, which writes it."""
    if dl.rank(ctx) == 0:
        tl.store(got, tl.load(buffer))
        if GIVE == "fence":
            dl.fence(ctx)
        if GIVE == "notify":
            dl.notify(credit, 1, ctx, 1)
        else:
            tl.atomic_xchg(dl.symm_at(credit, 1, ctx), 1, sem="relaxed", scope="sys")
    else:
        if TAKE == "wait":
            _ = dl.wait(credit, 1, ctx)
        else:
            while tl.load(credit, volatile=True) < 1:
                pass
        if TAKE == "fence":
            dl.fence(ctx)
        dl.remote_store(buffer, 5, 0, ctx)


def credit(give, take):
    buffer, signal = shmem.aclshmem_create_tensor((1,), torch.int32), shmem.create_signals(1)
    got = torch.full((1,), -1, dtype=torch.int32)
    buffer.fill_(3)
    shmem.barrier_all()
    credit_kernel[(1,)](buffer, signal, got, shmem.context(), give, take)
    shmem.barrier_all()
    assert shmem.my_pe() or got.item() == 3
    assert shmem.my_pe() or buffer.item() == 5


@pytest.mark.parametrize("give, take", [("notify", "wait"), ("fence", "wait"), ("notify", "fence"), ("fence", "fence")])
def test_a_buffer_that_is_given_back_in_order_is_read_before_it_is_written(give, take):
    report = check.explore(credit, give, take, schedules=40, weak=True)
    assert report.ok, report


@pytest.mark.parametrize("give, take", [("relaxed", "wait"), ("notify", "relaxed"), ("relaxed", "relaxed")])
def test_a_buffer_that_is_given_back_without_an_order_is_read_too_late(give, take):
    report = check.explore(credit, give, take, schedules=40, weak=True, races=False)
    assert report.kinds == ["wrong-result"], report
    text = str(report)
    assert "load by rank 0 program (0, 0, 0) at" in text and "comes late, and sees store by rank 1 program (0, 0, 0) at" in text
    again = check.explore(credit, give, take, seed=report.findings[0].seed, races=False)
    assert [one.key for one in again.findings] == [one.key for one in report.findings]
    assert check.explore(credit, give, take, schedules=40, weak=False, races=False).ok


@triton.jit
def buffering_kernel(cells, got, ctx, HOW: tl.constexpr):
    """Each reads a word at rank 0 and writes the other one: 1, or one more than it has read."""
    me = dl.rank(ctx)
    X, Y = dl.symm_at(cells, 0, ctx), dl.symm_at(cells + 16, 0, ctx)
    if me == 1:
        X, Y = Y, X
    a = tl.load(X, volatile=HOW == "volatile")
    if HOW == "sum":
        tl.store(Y, a + me)
    else:
        tl.store(Y, 1)
    tl.store(dl.symm_at(got, 0, ctx) + me, a)


def buffering(how, seen, wanted):
    cells, got = shmem.create_signals(2), shmem.aclshmem_create_tensor((2,), torch.int32)
    got.fill_(-1)
    shmem.barrier_all()
    buffering_kernel[(1,)](cells, got, shmem.context(), how)
    shmem.barrier_all()
    values = tuple(shmem.peer_tensor(got, 0).tolist())
    seen.append(values)
    shmem.barrier_all()
    assert values != wanted


def test_each_may_read_what_the_other_writes_later():
    assert check.explore(buffering, "plain", [], (1, 1), schedules=100, weak=True, races=False).kinds == ["wrong-result"]
    assert check.explore(buffering, "volatile", [], (1, 1), schedules=100, weak=True, races=False).ok


def test_no_value_comes_from_nowhere():
    """Rank 1 writes one more than it reads of what rank 0 passes on: what rank 0 reads late cannot be based on itself."""
    seen = []
    report = check.explore(buffering, "sum", seen, (1, 1), schedules=100, weak=True, races=False)
    assert report.ok, report
    assert len(seen) > 2 * report.schedules  # promises were made
    assert (1, 1) in seen  # and those that were not kept do not count


@triton.jit
def heard_kernel(buffer, signal, got, ctx):
    """Rank 1 overwrites what rank 0 reads; rank 2 reads it after rank 0, in order."""
    me = dl.rank(ctx)
    if me == 0:
        a = tl.load(buffer)
        tl.store(got, a)
        tl.atomic_xchg(dl.symm_at(signal, 1, ctx), 1, sem="relaxed", scope="sys")
        dl.notify(signal, 2, ctx, 1)
    elif me == 1:
        _ = dl.wait(signal, 1, ctx)
        dl.remote_store(buffer, 5, 0, ctx)
    else:
        _ = dl.wait(signal, 1, ctx)
        dl.remote_store(got + 1, dl.remote_load(buffer, 0, ctx), 0, ctx)


def heard(seen, forbidden):
    buffer, signal = shmem.aclshmem_create_tensor((1,), torch.int32), shmem.create_signals(1)
    got = shmem.aclshmem_create_tensor((2,), torch.int32)
    buffer.fill_(3), got.fill_(-1)
    shmem.barrier_all()
    heard_kernel[(1,)](buffer, signal, got, shmem.context())
    shmem.barrier_all()
    values = tuple(shmem.peer_tensor(got, 0).tolist())
    seen.add(values)
    shmem.barrier_all()
    assert values not in forbidden


def test_who_is_ordered_after_a_late_read_sees_no_older_value():
    seen = set()
    assert check.explore(heard, seen, [(5, 3)], world_size=3, schedules=100, weak=True, races=False).ok
    assert {(3, 3), (3, 5), (5, 5)} <= seen


@triton.jit
def own_kernel(buffer, signal, got, ctx):
    """Rank 0 reads, then writes the word itself; what rank 1 writes later lies above that."""
    if dl.rank(ctx) == 0:
        tl.store(got, tl.load(buffer))
        tl.store(buffer, 4)
        tl.atomic_xchg(dl.symm_at(signal, 1, ctx), 1, sem="relaxed", scope="sys")
    else:
        _ = dl.wait(signal, 1, ctx)
        dl.remote_store(buffer, 5, 0, ctx)


def own():
    buffer, signal = shmem.aclshmem_create_tensor((1,), torch.int32), shmem.create_signals(1)
    got = torch.full((1,), -1, dtype=torch.int32)
    buffer.fill_(3)
    shmem.barrier_all()
    own_kernel[(1,)](buffer, signal, got, shmem.context())
    shmem.barrier_all()
    assert shmem.my_pe() or (got.item(), buffer.item()) != (5, 5)


def test_a_read_does_not_come_after_a_store_of_its_own_program():
    assert check.explore(own, schedules=100, weak=True, races=False).ok
