"""broadcast: bit for bit what the root gave, whatever the sequence of roots."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.broadcast import broadcast, create_broadcast_context, reference
from triton_dist.testing import Ranks

import torch
import torch.distributed as dist

pytestmark = pytest.mark.dist

SMALL = dict(programs=3, block=16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def message(rank, shape, dtype, seed):
    """Random bits, NaNs and all."""
    shape = torch.Size(shape)
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    flat = torch.randint(0, 256, (shape.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def same_bits(x, y):
    assert x.shape == y.shape and x.dtype == y.dtype
    return x.numel() == 0 or torch.equal(x.cpu().reshape(-1).view(torch.uint8), y.cpu().reshape(-1).view(torch.uint8))


def check(context, shape, root, dtype, seed, in_place=False):
    """On every rank, members of the context's team or of another one of the same shape."""
    rank, device = shmem.team_my_pe(context.team), shmem.device()
    x = message(rank, shape, dtype, seed).to(device)
    out = x if in_place else torch.zeros_like(x)
    assert broadcast(x, root, context, out) is out
    assert same_bits(out, message(root, shape, dtype, seed)), (shape, root, dtype, in_place)


def every_dtype_size_and_root(dtypes, shapes):
    for dtype in dtypes:
        context = create_broadcast_context(200, dtype, **SMALL)
        for seed, shape in enumerate(shapes):
            check(context, shape, seed % context.num_ranks, dtype, seed, in_place=seed % 2 == 1)
        context.free()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_root_ragged_sizes_and_empty_ones(world, ranks):
    shapes = [(200,), (1,), (7, 9), (0, 5), (5, 0), (16,), (17,), (2, 5, 13), ()]
    ranks(world).run(every_dtype_size_and_root, DTYPES, shapes, timeout=240)


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(world, ranks):
    shapes = [(200,), (1,), (65,), (100,), (9,), (200,), (31,), (64,)]
    ranks(world).run(every_dtype_size_and_root, [torch.bfloat16], shapes, timeout=240)


def calls_on_one_context(cases):
    for programs, block, calls in cases:
        context = create_broadcast_context(150, torch.float16, programs=programs, block=block)
        for seed, (n, root, in_place) in enumerate(calls):
            check(context, (n,), root, torch.float16, seed, in_place=in_place)
        context.free()


calls = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 2), st.booleans()), min_size=1, max_size=10)
case = st.tuples(st.integers(1, 5), st.sampled_from([16, 32, 128]), calls)


@settings(max_examples=4, deadline=None, database=None)
@given(cases=st.lists(case, min_size=1, max_size=4))
def test_any_sequence_of_sizes_and_roots_on_one_context(cases, ranks):
    ranks(3).run(calls_on_one_context, cases, timeout=240)


def delayed_calls(calls, change):
    """Ranks drift apart at random; each call has a size and values of its own, so that stale or overwritten data shows."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_broadcast_context(64, torch.int32, programs=2, block=16)
    rng, shared = random.Random(rank), random.Random(5)
    i = torch.arange(64, dtype=torch.int32, device=device)
    root = 0
    for call in range(calls):
        n = shared.choice([1, 20, 50, 64])
        if shared.random() < change:
            root = shared.randrange(world)
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.01)
        y = broadcast(i[:n] + call + rank * 10**6, root, context)
        assert torch.equal(y, i[:n] + call + root * 10**6), call


@pytest.mark.parametrize("change", [0.0, 0.3, 1.0])
def test_many_calls_with_ranks_delayed_at_random(change, ranks, many):
    ranks(3).run(delayed_calls, many(200), change, timeout=600)


def root_ahead():
    """Rank 1 makes its first call only after the root has made two."""
    rank, device = shmem.my_pe(), shmem.device()
    context = create_broadcast_context(40, torch.int32, **SMALL)
    x = torch.arange(40, dtype=torch.int32, device=device)
    if rank == 1:
        shmem.barrier_all()
    for call in range(2):
        assert torch.equal(broadcast(x * (call + 1) * (1 - rank), 0, context), x * (call + 1))
    if rank == 0:
        if device.type != "cpu":
            torch.accelerator.synchronize()
        shmem.barrier_all()


def test_a_root_can_be_two_calls_ahead_and_its_data_waits(ranks):
    ranks(2).run(root_ahead)


def against_torch_distributed():
    dist.init_process_group(shmem.process_group_backend(), rank=shmem.my_pe(), world_size=shmem.pe_count())
    try:
        x = message(shmem.my_pe(), (3, 5, 7), torch.bfloat16, 1).to(shmem.device())
        context = create_broadcast_context(105, torch.bfloat16, **SMALL)
        for root in range(shmem.pe_count()):
            assert same_bits(broadcast(x, root, context), reference(x, root))
    finally:
        dist.destroy_process_group()


def test_torch_distributed_agrees(ranks):
    ranks(2).run(against_torch_distributed)


def in_a_team():
    """Two disjoint teams of two work side by side; the root is a rank of the team."""
    me = shmem.my_pe()
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    context = create_broadcast_context(100, torch.float32, team=teams[me % 2], **SMALL)
    device = shmem.device()
    for root in (0, 1):
        y = broadcast(torch.full((100,), float(me), device=device), root, context)
        assert (y == me % 2 + 2 * root).all()


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def wrong_operands():
    device = shmem.device()
    context = create_broadcast_context(64, torch.float32, **SMALL)
    x = torch.zeros(8, 8, device=device)
    long = torch.zeros(100, device=device)
    wrong = {
        "x is .65., 65 elements": (long[:65], 0, None),
        "x is torch.float16": (x.half(), 0, None),
        "x has strides": (x.T[:, :4], 0, None),
        "out is .64.": (x, 0, torch.zeros(64, device=device)),
        "x and out overlap": (long[:60], 0, long[1:61]),
        "root is 2: give a rank of the team, 0 to 1": (x, 2, None),
        "root is -1": (x, -1, None),
    }
    for text, (a, root, out) in wrong.items():
        with pytest.raises(ValueError, match=f"rank {shmem.my_pe()}: broadcast: {text}"):
            broadcast(a, root, context, out)
    broadcast(x, 1, context)  # still usable
    context.free()
    with pytest.raises(ValueError, match="was freed"):
        broadcast(x, 0, context)
    with pytest.raises(CollectiveMismatchError, match="(?s)=8,.*=9,|=9,.*=8,"):
        create_broadcast_context(8 + shmem.my_pe(), torch.float32)


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)


def heap_use():
    for _ in range(10):  # 10 x 1 MiB would not fit in 4 MiB
        create_broadcast_context(2**18, torch.float16, programs=2).free()


def test_freeing_returns_the_heap_to_what_it_was(ranks):
    with Ranks(ranks(2).world_size) as fresh:
        fresh.run(heap_use, heap_bytes=4 << 20)
