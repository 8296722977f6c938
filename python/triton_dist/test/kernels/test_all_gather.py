"""all_gather: bit for bit what the ranks gave."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.kernels.all_gather import all_gather, create_all_gather_context, reference
import torch

from .operands import assert_refused, assert_same_bits, random_bits, team_of_two, torch_distributed

pytestmark = pytest.mark.dist

SMALL = dict(programs=3, block=16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def check(context, shape, dtype, seed, members=None, in_place=False):
    members = members or range(shmem.pe_count())
    rank, device = shmem.team_my_pe(context.team), shmem.device()
    shards = [random_bits(r, shape, dtype, seed) for r in members]
    x = shards[rank].to(device, copy=True)
    out = torch.zeros(len(members) * shape[0], *shape[1:], dtype=dtype, device=device)
    if in_place:
        own = out[rank * shape[0] : (rank + 1) * shape[0]]
        x = own.copy_(x)
    assert all_gather(x, context, out) is out
    assert_same_bits(out, torch.cat(shards), (shape, dtype, in_place))


def every_dtype_and_size(dtypes, shapes):
    for dtype in dtypes:
        context = create_all_gather_context(200, dtype, **SMALL)
        for seed, shape in enumerate(shapes):
            check(context, shape, dtype, seed, in_place=seed % 2 == 1)
        context.free()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_ragged_sizes_and_empty_ones(world, ranks):
    shapes = [(200,), (1,), (7, 9), (0, 5), (5, 0), (16,), (17,), (2, 5, 13), (1, 1, 3)]
    ranks(world).run(every_dtype_and_size, DTYPES, shapes, timeout=240)


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(world, ranks):
    ranks(world).run(every_dtype_and_size, [torch.bfloat16], [(200,), (1,), (65,), (100,)], timeout=240)


def calls_on_one_context(cases):
    for programs, block, calls in cases:
        context = create_all_gather_context(150, torch.float16, programs=programs, block=block)
        for seed, (n, in_place) in enumerate(calls):
            check(context, (n,), torch.float16, seed, in_place=in_place)
        context.free()


calls = st.lists(st.tuples(st.integers(0, 150), st.booleans()), min_size=1, max_size=8)
case = st.tuples(st.integers(1, 5), st.sampled_from([16, 32, 128]), calls)


@settings(max_examples=4, deadline=None, database=None)
@given(cases=st.lists(case, min_size=1, max_size=4))
def test_any_sequence_of_sizes_on_one_context(cases, ranks):
    ranks(3).run(calls_on_one_context, cases, timeout=240)


def delayed_calls(calls):
    """Ranks drift apart at random; each call has a size and values of its own, so that a stale or overwritten shard shows."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_all_gather_context(64, torch.int32, programs=2, block=16)
    rng, sizes = random.Random(rank), random.Random(5)
    i = torch.arange(64, dtype=torch.int32, device=device)
    for call in range(calls):
        n = sizes.choice([1, 20, 50, 64])
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.01)
        y = all_gather(i[:n] + call * world + rank * 10**6, context)
        expected = torch.cat([i[:n] + call * world + r * 10**6 for r in range(world)])
        assert torch.equal(y, expected), call


def test_many_calls_with_ranks_delayed_at_random(ranks, many):
    ranks(3).run(delayed_calls, many(200), timeout=600)


def against_torch_distributed():
    with torch_distributed():
        x = random_bits(shmem.my_pe(), (3, 5, 7), torch.bfloat16, 1).to(shmem.device())
        context = create_all_gather_context(105, torch.bfloat16, **SMALL)
        assert_same_bits(all_gather(x, context), reference(x))
        assert all_gather(x[0, 0, 0], context).shape == (shmem.pe_count(),)


def test_torch_distributed_agrees(ranks):
    ranks(2).run(against_torch_distributed)


def in_a_team():
    team, members = team_of_two()
    context = create_all_gather_context(100, torch.float32, team=team, **SMALL)
    for n in (100, 7):
        check(context, (n,), torch.float32, 3, members)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def wrong_operands():
    world, device = shmem.pe_count(), shmem.device()
    context = create_all_gather_context(64, torch.float32, **SMALL)
    x = torch.zeros(8, 8, device=device)
    long = torch.zeros(100 * world, device=device)
    wrong = {
        "x is .65., 65 elements": (long[:65], None),
        "x is torch.float16": (x.half(), None),
        "x has strides": (x.T[:, :4], None),
        "out is .64.": (x, torch.zeros(64, device=device)),
        "out is torch.int32": (x, torch.zeros(8 * world, 8, dtype=torch.int32, device=device)),
        "out has strides": (x, torch.zeros(8, 8 * world, device=device).T),
        "x and out overlap": (long[1:11], long[: 10 * world]),
    }
    create = create_all_gather_context
    assert_refused(
        {f"all_gather: {text}": lambda x=x, out=out: all_gather(x, context, out) for text, (x, out) in wrong.items()}
        | {"create_all_gather_context: dtype is torch.complex128": lambda: create(8, torch.complex128)}
    )
    all_gather(x, context)  # still usable


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
