"""Remote atomics: no update is lost or doubled, old values are what was there, masks hold, small dtypes are refused.

Every rank and every program work on the same words at once. Floats hold small integers, so sums are exact in any order.
"""

import numpy as np
import pytest
import torch
import triton_dist
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

from .refusals import refusal

pytestmark = pytest.mark.dist

ON_ASCEND = triton_dist.backend == "ascend"
POISON = -99
PROGRAMS = 4
NAMES = {
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.uint8: "uint8",
}
WIDE = [dtype for dtype in NAMES if dtype.itemsize >= 4]
WORDS = ("atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas")


def supported(word, dtype):
    if dtype not in WIDE or (word == "atomic_cas" and dtype.is_floating_point):
        return False
    if ON_ASCEND:  # no xchg, no cas, no 64-bit words, no unsigned order
        ordered = word in ("atomic_max", "atomic_min")
        return (word == "atomic_add" or ordered) and dtype.itemsize == 4 and not (ordered and dtype == torch.uint32)
    return True


def for_each(word):
    return [dtype for dtype in WIDE if supported(word, dtype)]


def numbers(values, dtype):
    """A host tensor of exact numbers, unsigned ones included."""
    return torch.from_numpy(np.array(values, dtype=str(dtype).removeprefix("torch.")))


def symmetric(values, dtype):
    """A symmetric tensor that holds `values` at every rank."""
    source = numbers(values, dtype)
    tensor = shmem.aclshmem_create_tensor(tuple(source.shape), dtype)
    tensor.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))
    return tensor


def local(shape, dtype):
    tensor = torch.empty(shape, dtype=dtype, device=shmem.device())
    tensor.view(-1).view(torch.uint8).fill_(0xA5)
    return tensor


def listed(tensor):
    return tensor.cpu().numpy().tolist()


def everybodys(tensor):
    """The elements of all ranks' copies; everybody has finished when it returns."""
    shmem.barrier_all()
    everything = [x for peer in range(shmem.pe_count()) for x in listed(shmem.peer_tensor(tensor, peer).flatten())]
    shmem.barrier_all()
    return everything


# -- sums


@triton.jit
def add_from_all(cell, block, turns, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    me, pid = dl.rank(ctx), tl.program_id(0)
    for _turn in range(0, turns):
        for peer in range(0, dl.num_ranks(ctx)):
            dl.atomic_add(cell, me + pid + 1, peer, ctx)
            dl.atomic_add(block + lanes, lanes + me, peer, ctx)
            dl.atomic_add(block + LANES + lanes, 1, peer, ctx, lanes < LANES // 2 + 1)
            dl.atomic_add(cell + 1 + lanes * 0, 1, peer, ctx)  # all lanes on one word


def sums():
    world, ctx, turns, lanes = shmem.pe_count(), shmem.context(), 5, 32
    for dtype in for_each("atomic_add"):
        cell, block = symmetric([5, 0], dtype), symmetric([[7] * lanes] * 2, dtype)
        shmem.barrier_all()
        add_from_all[(PROGRAMS,)](cell, block, turns, ctx, LANES=lanes)
        shmem.barrier_all()
        one = sum(rank + pid + 1 for rank in range(world) for pid in range(PROGRAMS))
        calls = world * PROGRAMS * turns
        assert listed(cell) == [5 + turns * one, calls * lanes], dtype
        first = [7 + PROGRAMS * turns * sum(lane + rank for rank in range(world)) for lane in range(lanes)]
        second = [7 + calls * (lane < lanes // 2 + 1) for lane in range(lanes)]
        assert listed(block) == [first, second], dtype


@pytest.mark.parametrize("world", [1, 2, 3])
def test_adds_of_all_programs_of_all_ranks_sum_exactly_in_scalars_blocks_and_under_masks(ranks, world):
    ranks(world).run(sums)


@triton.jit
def add_constant(cell, amount, peer, ctx):
    dl.atomic_add(cell, tl.load(amount), peer, ctx)


def unsigned_and_negative_sums():
    me, world, ctx, device = shmem.my_pe(), shmem.pe_count(), shmem.context(), shmem.device()
    cases = [
        (torch.int32, 2**31 - 1, 1, -(2**31)),
        (torch.int32, -5, -7, -12),
        (torch.int64, 2**40, -(2**41), -(2**40)),
        (torch.int64, 2**63 - 1, 1, -(2**63)),
        (torch.uint32, 2**32 - 3, 2, 2**32 - 1),
        (torch.uint32, 2**32 - 1, 2, 1),
        (torch.uint64, 2**63, 2**62, 2**63 + 2**62),
        (torch.uint64, 2**64 - 1, 1, 0),
        (torch.float32, -0.5, 0.25, -0.25),
        (torch.float64, 2.0**52, 1.0, 2.0**52 + 1),
    ]
    for dtype, start, amount, total in cases:
        if supported("atomic_add", dtype):
            cell = symmetric([start], dtype)
            shmem.barrier_all()
            add_constant[(1,)](cell, numbers([amount], dtype).to(device), (me + 1) % world, ctx)
            shmem.barrier_all()
            assert listed(cell) == [total], f"{dtype}: {start} + {amount}"


def test_an_add_wraps_and_rounds_as_its_dtype_does(ranks):
    ranks(2).run(unsigned_and_negative_sums)


# -- old values


@triton.jit
def take_tickets(counter, tickets, turns, ctx):
    pid = tl.program_id(0)
    for turn in range(0, turns):
        old = dl.atomic_add(counter, 1, 0, ctx)
        tl.store(tickets + pid * turns + turn, old)


@triton.jit
def take_ticket_blocks(counter, tickets, turns, ctx, LANES: tl.constexpr):
    pid, lanes = tl.program_id(0), tl.arange(0, LANES)
    for turn in range(0, turns):
        old = dl.atomic_add(counter + lanes * 0, 1, 0, ctx)
        tl.store(tickets + (pid * turns + turn) * LANES + lanes, old)


def tickets():
    world, ctx, turns, lanes = shmem.pe_count(), shmem.context(), 25, 16
    for dtype in for_each("atomic_add"):
        counter, taken = symmetric([0], dtype), symmetric([123456] * (PROGRAMS * turns), dtype)
        shmem.barrier_all()
        if ON_ASCEND:
            refusal(lambda: take_tickets[(PROGRAMS,)](counter, taken, turns, ctx))  # noqa: B023
            continue
        take_tickets[(PROGRAMS,)](counter, taken, turns, ctx)
        assert sorted(everybodys(taken)) == list(range(world * PROGRAMS * turns)), dtype
        counter, taken = symmetric([0], dtype), symmetric([123456] * (PROGRAMS * 3 * lanes), dtype)
        shmem.barrier_all()
        take_ticket_blocks[(PROGRAMS,)](counter, taken, 3, ctx, LANES=lanes)
        assert sorted(everybodys(taken)) == list(range(world * PROGRAMS * 3 * lanes)), f"blocks of {dtype}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_old_values_of_adds_to_one_counter_are_a_permutation(ranks, world):
    ranks(world).run(tickets)


# -- max, min


@triton.jit
def extremes(cells, values, block_values, turns, ctx, LANES: tl.constexpr):
    pid, lanes = tl.program_id(0), tl.arange(0, LANES)
    for turn in range(0, turns):
        value = tl.load(values + pid * turns + turn)
        block = tl.load(block_values + (pid * turns + turn) * LANES + lanes)
        for peer in range(0, dl.num_ranks(ctx)):
            dl.atomic_max(cells, value, peer, ctx)
            dl.atomic_min(cells + 1, value, peer, ctx)
            dl.atomic_max(cells + 2 + lanes, block, peer, ctx)
            dl.atomic_min(cells + 2 + LANES + lanes, block, peer, ctx, (lanes & 1) == 0)


def extreme_values():
    me, world, ctx, device, turns, lanes = shmem.my_pe(), shmem.pe_count(), shmem.context(), shmem.device(), 8, 16
    for dtype in for_each("atomic_max"):

        def values(rank, dtype=dtype):
            random = np.random.default_rng([rank, dtype.itemsize])
            shape = (PROGRAMS * turns, 1 + lanes)
            if dtype.is_floating_point:
                return random.standard_normal(shape).astype(str(dtype).removeprefix("torch.")) * 1000
            limits = np.iinfo(str(dtype).removeprefix("torch."))
            return random.integers(limits.min, limits.max, shape, dtype=limits.dtype, endpoint=True)

        for near in (False, True):  # started from far outside of the values, or from within
            if near:
                low = high = values(99)[0, 0].item()
            elif dtype.is_floating_point:
                low, high = -1e30, 1e30
            else:
                limits = np.iinfo(str(dtype).removeprefix("torch."))
                low, high = limits.min, limits.max
            cells = symmetric([low, high] + [low] * lanes + [high] * lanes, dtype)
            mine = torch.from_numpy(values(me))
            scalars, blocks = mine[:, 0].contiguous().to(device), mine[:, 1:].contiguous().to(device)
            shmem.barrier_all()
            extremes[(PROGRAMS,)](cells, scalars, blocks, turns, ctx, LANES=lanes)
            shmem.barrier_all()
            everything = np.concatenate([values(rank) for rank in range(world)])
            start = numbers([low, high], dtype).numpy()
            largest = np.maximum(everything.max(0), start[0])
            smallest = np.minimum(everything.min(0), start[1])
            untouched = [high if lane & 1 else x for lane, x in enumerate(smallest[1:].tolist())]
            want = [largest[0], smallest[0], *largest[1:], *untouched]
            assert listed(cells) == listed(numbers(want, dtype)), f"{dtype}, near={near}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_max_and_min_of_all_ranks_order_negative_and_unsigned_values_rightly(ranks, world):
    ranks(world).run(extreme_values)


@triton.jit
def old_extremes(cells, olds, values, peer, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(olds, dl.atomic_max(cells, tl.load(values), peer, ctx))
    tl.store(olds + 1, dl.atomic_min(cells + 1, tl.load(values + 1), peer, ctx))
    tl.store(olds + 2 + lanes, dl.atomic_max(cells + 2 + lanes, tl.load(values + 2 + lanes), peer, ctx))
    second = 2 + LANES + lanes
    tl.store(olds + second, dl.atomic_min(cells + second, tl.load(values + second), peer, ctx))


def values_before_extremes():
    me, world, ctx, device = shmem.my_pe(), shmem.pe_count(), shmem.context(), shmem.device()
    for dtype in for_each("atomic_max"):
        signed = dtype not in (torch.uint32, torch.uint64)
        low, high = (-7, 9) if signed else (3, 2**31 + 9)
        before = [low, high, *[low, high] * 4]
        given = [6, 6, 6, 6, low, 6, 6, 6, high, 6]
        cells, olds = symmetric(before, dtype), local((10,), dtype)
        values = numbers(given, dtype).to(device)
        shmem.barrier_all()
        if ON_ASCEND:
            refusal(lambda: old_extremes[(1,)](cells, olds, values, 0, ctx, LANES=4))  # noqa: B023
            continue
        old_extremes[(1,)](cells, olds, values, (me + 1) % world, ctx, LANES=4)
        shmem.barrier_all()
        pairs = list(zip(before, given))
        after = [max(pairs[0]), min(pairs[1]), *map(max, pairs[2:6]), *map(min, pairs[6:])]
        assert listed(olds) == before, f"{dtype}: the old values"
        assert listed(cells) == after, dtype


def test_max_and_min_return_the_values_before_in_scalars_and_blocks(ranks):
    ranks(2).run(values_before_extremes)


# -- exchange


@triton.jit
def exchange(cell, block, olds, block_olds, turns, ctx, LANES: tl.constexpr):
    pid, lanes = tl.program_id(0), tl.arange(0, LANES)
    first = (dl.rank(ctx) * tl.num_programs(0) + pid) * turns + 1
    for turn in range(0, turns):
        old = dl.atomic_xchg(cell, first + turn, 0, ctx)
        tl.store(olds + pid * turns + turn, old)
        old_lanes = dl.atomic_xchg(block + lanes, first + turn, 0, ctx, lanes != 3)
        tl.store(block_olds + (pid * turns + turn) * LANES + lanes, old_lanes, mask=lanes != 3)


def exchanges():
    world, ctx, turns, lanes = shmem.pe_count(), shmem.context(), 10, 8
    for dtype in for_each("atomic_xchg"):
        cell, block = symmetric([0], dtype), symmetric([0] * lanes, dtype)
        olds = symmetric([123456] * (PROGRAMS * turns), dtype)
        block_olds = symmetric([[123456] * lanes] * (PROGRAMS * turns), dtype)
        shmem.barrier_all()
        exchange[(PROGRAMS,)](cell, block, olds, block_olds, turns, ctx, LANES=lanes)
        given = list(range(world * PROGRAMS * turns + 1))  # 0 was there first
        seen = everybodys(olds) + [shmem.peer_tensor(cell, 0).item()]
        assert sorted(seen) == given, dtype
        by_lane = np.array(everybodys(block_olds)).reshape(-1, lanes)
        last = listed(shmem.peer_tensor(block, 0))
        for lane in range(lanes):
            if lane == 3:
                assert last[lane] == 0 and (by_lane[:, lane] == 123456).all(), "a masked lane took part"
            else:
                assert sorted([*by_lane[:, lane].tolist(), last[lane]]) == given, f"{dtype}, lane {lane}"
        shmem.barrier_all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_value_given_to_xchg_is_seen_once(ranks, world):
    ranks(world).run(exchanges)


# -- compare and swap


@triton.jit
def under_lock(lock, counter, turns, ctx):
    for _turn in range(0, turns):
        while dl.atomic_cas(lock, 0, 1, 0, ctx) != 0:
            pass
        count = dl.remote_load(counter, 0, ctx)
        check = dl.remote_load(counter + 1, 0, ctx)
        dl.remote_store(counter, count + 1, 0, ctx)
        dl.remote_store(counter + 1, check + 2, 0, ctx)
        dl.atomic_xchg(lock, 0, 0, ctx)


def lock_rounds(turns):
    world, ctx = shmem.pe_count(), shmem.context()
    for dtype in for_each("atomic_cas"):
        lock, counter = symmetric([0], dtype), symmetric([0, 0], torch.int32)
        shmem.barrier_all()
        under_lock[(2,)](lock, counter, turns, ctx)
        shmem.barrier_all()
        if shmem.my_pe() == 0:
            assert listed(counter) == [2 * world * turns, 4 * world * turns], f"{dtype}: two held the lock at once"
            assert listed(lock) == [0]


@pytest.mark.parametrize("world, turns", [(1, 20), (2, 20), (3, 8)])
def test_a_lock_of_cas_and_xchg_lets_one_program_in_at_a_time(ranks, world, turns):
    ranks(world).run(lock_rounds, turns)


@triton.jit
def swap_some(cells, olds, compare, value, peer, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    old = dl.atomic_cas(cells + lanes, tl.load(compare + lanes), tl.load(value + lanes), peer, ctx)
    tl.store(olds + lanes, old)
    tl.store(olds + LANES, dl.atomic_cas(cells, 77, 78, peer, ctx))  # 77 is not there
    tl.store(olds + LANES + 1, dl.atomic_cas(cells + LANES, 5, 6, peer, ctx))


def swaps():
    me, world, ctx, device, n = shmem.my_pe(), shmem.pe_count(), shmem.context(), shmem.device(), 16
    for dtype in for_each("atomic_cas"):
        top = np.iinfo(str(dtype).removeprefix("torch.")).max
        before = [*range(n - 2), top - 1, top, 5]
        compare = [x if x % 2 == 0 else 1000 for x in before[:n]]
        value = [500 + i for i in range(n)]
        cells, olds = symmetric(before, dtype), local((n + 2,), dtype)
        shmem.barrier_all()
        arguments = (numbers(compare, dtype).to(device), numbers(value, dtype).to(device))
        swap_some[(1,)](cells, olds, *arguments, (me + 1) % world, ctx, LANES=n)
        shmem.barrier_all()
        after = [v if b == c else b for b, c, v in zip(before, compare, value)]
        assert listed(cells) == [*after, 6], dtype
        assert listed(olds) == [*before[:n], after[0], 5], dtype


@pytest.mark.parametrize("world", [1, 2])
def test_cas_swaps_where_the_value_compares_equal_and_returns_the_old_one(ranks, world):
    ranks(world).run(swaps)


# -- order


@triton.jit
def publish_by_atomic(data, flag, ack, wrong, rounds, ctx, LANES: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right, left = dl.owner_first(1, me, world), dl.owner_first(world - 1, me, world)
    lanes = tl.arange(0, LANES)
    bad = 0
    for epoch in range(1, rounds + 1):
        dl.remote_store(data + lanes, lanes + epoch, right, ctx)
        dl.atomic_max(flag, epoch, right, ctx)  # release
        _ = dl.wait(flag, epoch, ctx)
        bad += tl.sum((tl.load(data + lanes) != lanes + epoch).to(tl.int32), 0)
        tl.store(data + lanes, -99)
        dl.atomic_add(ack, 1, left, ctx)
        _ = dl.wait(ack, epoch, ctx)
    tl.store(wrong, bad)


def atomic_as_signal(rounds):
    data, wrong = symmetric([POISON] * 256, torch.int32), symmetric([POISON], torch.int32)
    flag, ack = shmem.create_signals(1), shmem.create_signals(1)
    shmem.barrier_all()
    publish_by_atomic[(1,)](data, flag, ack, wrong, rounds, shmem.context(), LANES=256)
    assert wrong.item() == 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_was_stored_before_an_atomic_is_seen_by_who_waited_for_its_value(ranks, world):
    ranks(world).run(atomic_as_signal, 200)


# -- refusals


@triton.jit
def any_word(cell, ctx, WORD: tl.constexpr):
    if WORD == "atomic_add":
        dl.atomic_add(cell, 1, 0, ctx)
    elif WORD == "atomic_max":
        dl.atomic_max(cell, 1, 0, ctx)
    elif WORD == "atomic_min":
        dl.atomic_min(cell, 1, 0, ctx)
    elif WORD == "atomic_xchg":
        dl.atomic_xchg(cell, 1, 0, ctx)
    else:
        dl.atomic_cas(cell, 0, 1, 0, ctx)


def refused_by_name():
    ctx = shmem.context()
    for dtype, name in NAMES.items():
        for word in WORDS:
            cell = shmem.aclshmem_create_tensor((16,), dtype)
            cell.view(torch.uint8).fill_(0)
            if supported(word, dtype):
                any_word[(1,)](cell, ctx, WORD=word)
            else:
                text = refusal(lambda: any_word[(1,)](cell, ctx, WORD=word))  # noqa: B023
                assert word in text and (name in text or (ON_ASCEND and "target ascend" in text)), text
                assert (cell.cpu().view(torch.uint8) == 0).all(), f"{word} on {name} is refused, yet wrote"


def test_a_dtype_that_the_target_has_no_atomic_for_is_refused_by_name(ranks):
    ranks(1).run(refused_by_name)
