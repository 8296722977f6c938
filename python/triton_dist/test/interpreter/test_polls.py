"""Poll loops that users write themselves: they see what they wait for, end when they are bounded, and never end another
kernel by mistake."""

import pytest
import torch

import triton_dist
from triton_dist import check, shmem
import triton_dist.language as dl
from triton_dist.errors import DeadlockError
from triton_dist.testing import Ranks
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton_dist.interpreted, reason="checks the CPU engine; kernels are compiled here")


@triton.jit
def released_by_a_later_program(flags, HOW: tl.constexpr):
    lanes = tl.arange(0, 4)
    if tl.program_id(0) == 0:
        if HOW == "plain block":
            while tl.sum(tl.load(flags + lanes), 0) < 4:
                pass
        elif HOW == "atomic block":
            while tl.sum(tl.atomic_add(flags + lanes, 0), 0) < 4:
                pass
        elif HOW == "exchange":
            while tl.atomic_xchg(flags, 0) == 0:
                pass
        elif HOW == "counts by a store":
            n = 0
            while tl.load(flags, volatile=True) < 1:
                n += 1
                tl.store(flags + 8, n)
        elif HOW == "masked lane":
            while tl.sum(tl.load(flags + lanes, mask=lanes > 0, other=0, volatile=True), 0) < 3:
                pass
        elif HOW == "two words":
            while (tl.load(flags, volatile=True) < 1) | (tl.load(flags + 1, volatile=True) < 1):
                pass
        else:
            tl.static_assert(HOW == "volatile block")
            while tl.min(tl.load(flags + lanes, volatile=True), 0) < 1:
                pass
    else:
        tl.store(flags + 3 - lanes, 1)


LOOPS = ["plain block", "atomic block", "exchange", "counts by a store", "masked lane", "two words", "volatile block"]


@pytest.mark.parametrize("how", LOOPS)
def test_every_kind_of_loop_lets_the_other_programs_run(how):
    flags = torch.zeros(9, dtype=torch.int32)
    if how == "volatile block":
        flags[0] = 1  # the first lane never changes
    released_by_a_later_program[(2,)](flags, how)


@triton.jit
def half_flag(flag):
    if tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) < 1:
            pass
    else:
        tl.store(flag, 1)


def test_a_flag_of_any_type_can_be_polled():
    for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.int64):
        half_flag[(2,)](torch.zeros(1, dtype=dtype))


@triton.jit
def horner(scale, out, n):
    acc = 0.0
    for i in range(n):
        acc += tl.load(scale) * i
    tl.store(out, acc)


def test_a_loop_that_reads_one_scalar_over_and_over_is_no_deadlock():
    out = torch.zeros(1)
    horner[(1,)](torch.ones(1), out, 8000)
    assert out.item() == pytest.approx(sum(range(8000)), rel=1e-3)


@triton.jit
def one_after_another(flags):
    pid = tl.program_id(0)
    if pid == 0:
        while tl.load(flags, volatile=True) < 1:
            pass
        while tl.load(flags + 1, volatile=True) < 1:
            pass
    elif pid == 1:
        tl.store(flags, 1)
        _ = tl.load(flags + 2, volatile=True) + tl.load(flags + 2, volatile=True)  # lets the others run
        tl.store(flags, 2)  # of which program 0 read the old value before its second loop
    else:
        for _ in range(100):
            tl.load(flags + 2, volatile=True)
        tl.store(flags + 1, 1)


def test_a_word_of_an_earlier_loop_does_not_keep_a_loop_awake():
    flags = torch.zeros(3, dtype=torch.int32)
    one_after_another[(3,)](flags)
    assert flags.tolist() == [2, 1, 0]
    report = check.explore(lambda: one_after_another[(3,)](flags.zero_()), world_size=1, schedules=1, races=False, seconds=60)
    assert report.ok, report


@triton.jit
def first_of(sig, out, n, ctx):
    hit = -1
    while hit < 0:
        for i in range(n):
            if dl.test(dl.signal_at(sig, i), 1, ctx):
                hit = i
    tl.store(out, hit)


def first_signal_wins(nobody):
    sig, out = shmem.create_signals(3), torch.full((1,), -1, dtype=torch.int32)
    shmem.barrier_all()
    if nobody:
        with pytest.raises(DeadlockError, match="polls rank"):
            first_of[(1,)](sig, out, 3, shmem.context())
        return True
    if shmem.my_pe() == 1:
        first_of[(1,)](sig, out, 3, shmem.context())
        return out.item() == 2
    shmem.peer_tensor(sig, 1)[2, 0] = 1
    return True


def test_waiting_for_any_of_several_signals_works_and_is_explained():
    with Ranks(2) as ranks:
        assert ranks.run(first_signal_wins, False) == [True, True]
        assert ranks.run(first_signal_wins, True, timeout=120) == [True, True]


@triton.jit
def bounded_tries(sig, out, tries, ctx):
    n = 0
    while (dl.test(sig, 1, ctx) == 0) & (n < tries):
        n += 1
    tl.store(out, n)


def some_thousand_tries():
    sig, out = shmem.create_signals(1), torch.zeros(1, dtype=torch.int32)
    bounded_tries[(1,)](sig, out, 2500, shmem.context())
    return out.item()


def test_a_few_thousand_bounded_tries_end_by_themselves():
    with Ranks(1) as ranks:
        assert ranks.run(some_thousand_tries, timeout=120) == [2500]
