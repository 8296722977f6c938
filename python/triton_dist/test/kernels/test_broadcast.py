"""broadcast: bit for bit what the root gave, whatever the sequence of roots."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.kernels.broadcast import broadcast, create_broadcast_context, reference

import torch

from .operands import assert_refused, assert_same_bits, random_bits, team_of_two, torch_distributed

pytestmark = pytest.mark.dist

SMALL = dict(programs=3, block=16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def check(context, shape, root, dtype, seed, in_place=False):
    """On every rank, members of the context's team or of another one of the same shape."""
    rank, device = shmem.team_my_pe(context.team), shmem.device()
    x = random_bits(rank, shape, dtype, seed).to(device)
    out = x if in_place else torch.zeros_like(x)
    assert broadcast(x, root, context, out) is out
    assert_same_bits(out, random_bits(root, shape, dtype, seed), (shape, root, dtype, in_place))


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
    with torch_distributed():
        x = random_bits(shmem.my_pe(), (3, 5, 7), torch.bfloat16, 1).to(shmem.device())
        context = create_broadcast_context(105, torch.bfloat16, **SMALL)
        for root in range(shmem.pe_count()):
            assert_same_bits(broadcast(x, root, context), reference(x, root))


def test_torch_distributed_agrees(ranks):
    ranks(2).run(against_torch_distributed)


def in_a_team():
    """The root is a rank of the team."""
    team, members = team_of_two()
    context = create_broadcast_context(100, torch.float32, team=team, **SMALL)
    x = torch.full((100,), float(shmem.my_pe()), device=shmem.device())
    for root in (0, 1):
        assert (broadcast(x, root, context) == members[root]).all()


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
    assert_refused(
        {f"broadcast: {text}": lambda args=args: broadcast(*args[:2], context, args[2]) for text, args in wrong.items()}
    )
    broadcast(x, 1, context)  # still usable


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
