"""reduce_scatter against the same reduction by torch, bit for bit."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.kernels.reduce_scatter import (
    DTYPES,
    OPS,
    create_reduce_scatter_context,
    fold,
    reduce_scatter,
    reference,
)

import torch

from .operands import assert_refused, assert_same_bits, random_numbers, team_of_two, torch_distributed

pytestmark = pytest.mark.dist

SMALL = dict(programs=3, block=16)


def check(context, op, shape, dtype, seed, members=None, in_place=False):
    """`shape` of the result."""
    members = members or range(shmem.pe_count())
    rank, device, rows = shmem.team_my_pe(context.team), shmem.device(), shape[0]
    messages = [random_numbers(r, (len(members) * rows, *shape[1:]), dtype, seed) for r in members]
    x = messages[rank].to(device, copy=True)
    out = x[rank * rows : (rank + 1) * rows] if in_place else torch.full(shape, 77, dtype=dtype, device=device)
    assert reduce_scatter(x, context, op, out) is out
    expected = fold([one[rank * rows : (rank + 1) * rows] for one in messages], op)
    assert_same_bits(out, expected, f"{op} {dtype} {shape} in place: {in_place}")


def every_dtype_op_and_size(dtypes, shapes):
    for dtype in dtypes:
        context = create_reduce_scatter_context(200, dtype, **SMALL)
        for i, shape in enumerate(shapes):
            check(context, OPS[i % 4], shape, dtype, seed=i)
            check(context, OPS[(i + 1) % 4], shape, dtype, seed=i + 1, in_place=True)
        context.free()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_op_ragged_sizes_and_empty_ones(world, ranks):
    shapes = [(200,), (1,), (7, 9), (0, 5), (5, 0), (16,), (17,), (2, 5, 13), (3,)]
    ranks(world).run(every_dtype_op_and_size, DTYPES, shapes, timeout=240)


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(world, ranks):
    shapes = [(200,), (1,), (65,), (100,)]
    ranks(world).run(every_dtype_op_and_size, [torch.bfloat16, torch.int32], shapes, timeout=240)


def calls_on_one_context(cases):
    for programs, block, calls in cases:
        context = create_reduce_scatter_context(150, torch.float16, programs=programs, block=block)
        for seed, (n, op, in_place) in enumerate(calls):
            check(context, op, (n,), torch.float16, seed, in_place=in_place)
        context.free()


call = st.tuples(st.integers(0, 150), st.sampled_from(OPS), st.booleans())
case = st.tuples(st.integers(1, 5), st.sampled_from([16, 32, 128]), st.lists(call, min_size=1, max_size=8))


@settings(max_examples=4, deadline=None, database=None)
@given(cases=st.lists(case, min_size=1, max_size=4))
def test_any_sequence_of_sizes_on_one_context(cases, ranks):
    ranks(3).run(calls_on_one_context, cases, timeout=240)


def delayed_calls(calls):
    """Ranks drift apart at random; each call has a size and values of its own, so that a stale or overwritten part shows."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_reduce_scatter_context(64, torch.int32, programs=2, block=16)
    rng, sizes = random.Random(rank), random.Random(5)
    i = torch.arange(64 * world, dtype=torch.int32, device=device)
    for call in range(calls):
        n = sizes.choice([1, 20, 50, 64])
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.01)
        y = reduce_scatter((i[: n * world] + call) * (rank + 1), context)
        expected = (i[rank * n : (rank + 1) * n] + call) * (world * (world + 1) // 2)
        assert torch.equal(y, expected), call


def test_many_calls_with_ranks_delayed_at_random(ranks, many):
    ranks(3).run(delayed_calls, many(200), timeout=600)


def against_torch_distributed():
    with torch_distributed() as dist:
        x = random_numbers(shmem.my_pe(), (2 * shmem.pe_count(), 5, 7), torch.bfloat16, 1).to(shmem.device())
        context = create_reduce_scatter_context(70, torch.bfloat16, **SMALL)
        for op in OPS:
            assert_same_bits(reduce_scatter(x, context, op), reference(x, op))
        theirs = x.float()
        dist.all_reduce(theirs)
        theirs = theirs[2 * shmem.my_pe() :][:2]
        assert torch.allclose(reduce_scatter(x, context).float(), theirs, rtol=2**-7, atol=1e-6)
        assert reference(x[:0]).shape == (0, 5, 7)


def test_torch_distributed_agrees(ranks):
    ranks(2).run(against_torch_distributed)


def in_a_team():
    team, members = team_of_two()
    context = create_reduce_scatter_context(100, torch.float32, team=team, **SMALL)
    for n in (100, 7):
        check(context, "sum", (n,), torch.float32, 3, members)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def wrong_operands():
    device = shmem.device()
    context = create_reduce_scatter_context(64, torch.float32, **SMALL)
    x = torch.zeros(8, 8, device=device)
    long = torch.zeros(200, device=device)
    wrong = {
        "x is .130., 65 elements a rank": (long[:130], "sum", None),
        "x is .7, 8.: its first extent must be a multiple of the 2 ranks": (x[:7], "sum", None),
        "x is torch.float16": (x.half(), "sum", None),
        "x has strides": (x.T[:, :4], "sum", None),
        "out is .32.": (x, "sum", torch.zeros(32, device=device)),
        "out has strides": (x, "sum", torch.zeros(4, 16, device=device)[:, ::2]),
        "x and out overlap": (long[:60], "sum", long[1:31]),
        "op is 'mean'": (x, "mean", None),
    }
    assert_refused(
        {
            f"reduce_scatter: {text}": lambda a=a, op=op, out=out: reduce_scatter(a, context, op, out)
            for text, (a, op, out) in wrong.items()
        }
    )
    reduce_scatter(x, context)  # still usable
    assert_refused({"create_reduce_scatter_context: dtype is torch.int8": lambda: create_reduce_scatter_context(8, torch.int8)})


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
