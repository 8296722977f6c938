"""all_reduce by its three methods against the same reduction by torch, bit for bit."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.all_reduce import KERNELS, all_reduce, create_all_reduce_context, in_order_of, reference
from triton_dist.kernels.reduce_scatter import DTYPES, OPS

import torch

from .operands import assert_refused, assert_same_bits, random_numbers, team_of_two, torch_distributed

pytestmark = pytest.mark.dist

SMALL = dict(programs=3, block=16)


METHODS = (*KERNELS, "pipelined")  # flagged and sentinel take whole words of some dtypes: they have tests of their own


def check(context, method, op, shape, dtype, seed, members=None, in_place=False):
    members = members or range(shmem.pe_count())
    device = shmem.device()
    messages = [random_numbers(r, shape, dtype, seed) for r in members]
    x = messages[shmem.team_my_pe(context.team)].to(device, copy=True)
    out = x if in_place else torch.full_like(x, 77)
    assert all_reduce(x, context, op, out) is out
    if x.numel():
        expected = in_order_of(method, messages, op)
        assert_same_bits(out, expected, f"{method} {op} {dtype} {shape} in place: {in_place}")


def every_dtype_op_and_size(dtypes, sizes):
    for method in METHODS:
        for dtype in dtypes:
            context = create_all_reduce_context(200, dtype, method, **SMALL)
            for i, n in enumerate(sizes):
                check(context, method, OPS[i % 4], (n,), dtype, seed=n)
                check(context, method, OPS[(i + 1) % 4], (n,), dtype, seed=n + 1, in_place=True)
            context.free()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_op_ragged_sizes_and_empty_ones(world, ranks):
    ranks(world).run(every_dtype_op_and_size, DTYPES, (200, 1, 49, 0, 16, 17, 130, 3), timeout=240)


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(world, ranks):
    ranks(world).run(every_dtype_op_and_size, [torch.bfloat16, torch.int32], (200, 1, 65, 100), timeout=240)


def calls_on_one_context(cases):
    for method, programs, block, calls in cases:
        context = create_all_reduce_context(150, torch.float16, method, programs=programs, block=block)
        for seed, (n, op, in_place) in enumerate(calls):
            check(context, method, op, (n,), torch.float16, seed, in_place=in_place)
        context.free()


call = st.tuples(st.integers(0, 150), st.sampled_from(OPS), st.booleans())
case = st.tuples(
    st.sampled_from(METHODS), st.integers(1, 5), st.sampled_from([16, 32, 128]), st.lists(call, min_size=1, max_size=6)
)


@settings(max_examples=4, deadline=None, database=None)
@given(cases=st.lists(case, min_size=1, max_size=4))
def test_any_sequence_of_sizes_on_one_context(cases, ranks):
    ranks(3).run(calls_on_one_context, cases, timeout=240)


def delayed_calls(method, calls):
    """Ranks drift apart at random; each call has a size and values of its own, so that a stale or overwritten part shows."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    dtype = torch.float32 if method == "sentinel" else torch.int32  # whole numbers either way
    context = create_all_reduce_context(96, dtype, method, programs=2, block=16)
    rng, sizes = random.Random(rank), random.Random(5)
    i = torch.arange(96, dtype=dtype, device=device)
    for call in range(calls):
        n = sizes.choice([1, 20, 50, 96])
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.01)
        y = all_reduce((i[:n] + call) * (rank + 1), context)
        assert torch.equal(y, (i[:n] + call) * (world * (world + 1) // 2)), call


@pytest.mark.parametrize("method", (*METHODS, "flagged", "sentinel"))
def test_many_calls_with_ranks_delayed_at_random(method, ranks, many):
    ranks(3).run(delayed_calls, method, many(150), timeout=600)


def whole_words(method, dtypes, wrong):
    for dtype in dtypes:
        context = create_all_reduce_context(1000, dtype, method, programs=3, block=64)
        for i, n in enumerate((2, 1000, 64, 130, 4, 998)):
            for in_place in (False, True):
                check(context, "mesh", OPS[i % 4], (n,), dtype, seed=n, in_place=in_place)
        context.free()
    context = create_all_reduce_context(64, torch.bfloat16, method)
    with pytest.raises(ValueError, match=f"all_reduce: x has 3 elements, which the method {method} does not take"):
        all_reduce(torch.zeros(3, dtype=torch.bfloat16, device=shmem.device()), context)
    odd = torch.arange(9, dtype=torch.bfloat16, device=shmem.device())[1:]  # begins between two words
    assert torch.equal(all_reduce(odd, context).cpu(), torch.arange(1, 9).to(torch.bfloat16) * shmem.pe_count())
    with pytest.raises(ValueError, match=f"the method {method} takes .*, not {wrong}"):
        create_all_reduce_context(64, wrong, method)


@pytest.mark.parametrize("world", [2, 3])
def test_words_that_carry_the_number_of_their_call(world, ranks):
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.int32
    ranks(world).run(whole_words, "flagged", dtypes, torch.int64, timeout=120)


@pytest.mark.parametrize("world", [2, 3])
def test_words_that_show_by_themselves_that_they_have_come(world, ranks):
    ranks(world).run(whole_words, "sentinel", (torch.float16, torch.bfloat16, torch.float32), torch.int32, timeout=120)


def words_like_the_sentinel():
    """Numbers of all ones, in every place of a word, and beside other numbers."""
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    for dtype, whole in ((torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)):
        context = create_all_reduce_context(256, dtype, "sentinel", programs=2, block=16)
        for call in range(6):
            messages = [random_numbers(r, (256,), dtype, call) for r in range(world)]
            ones = [torch.rand(256, generator=torch.Generator().manual_seed(call * 8 + r)) < 0.4 for r in range(world)]
            for x, where in zip(messages, ones):
                x.view(whole)[where] = -1
            y = all_reduce(messages[me].to(device), context, OPS[call % 4]).cpu()
            assert torch.equal(y.isnan(), torch.stack(ones).any(0)), (dtype, call)
            right = in_order_of("mesh", [x.nan_to_num() for x in messages], OPS[call % 4])
            assert torch.equal(y[~y.isnan()], right[~y.isnan()]), (dtype, call)
        context.free()


@pytest.mark.parametrize("world", [2, 3])
def test_numbers_that_look_like_the_sentinel_are_nans_in_the_result(world, ranks):
    ranks(world).run(words_like_the_sentinel, timeout=120)


def not_a_number():
    for method in METHODS:
        context = create_all_reduce_context(64, torch.float32, method, **SMALL)
        for op in ("max", "min", "sum"):
            x = torch.full((64,), float(shmem.my_pe()), device=shmem.device())
            x[shmem.my_pe()] = float("nan")
            y = all_reduce(x, context, op)
            assert y[: shmem.pe_count()].isnan().all() and not y[shmem.pe_count() :].isnan().any(), (method, op)
        context.free()


def test_a_nan_on_any_rank_is_a_nan_on_all(ranks):
    ranks(3).run(not_a_number)


def against_torch_distributed():
    with torch_distributed() as dist:
        x = random_numbers(shmem.my_pe(), (3, 5, 7), torch.bfloat16, 1).to(shmem.device())
        theirs = x.float()
        dist.all_reduce(theirs)
        for method in METHODS:
            context = create_all_reduce_context(105, torch.bfloat16, method, **SMALL)
            assert_same_bits(all_reduce(x, context), reference(x, "sum", method=method))
            assert torch.allclose(all_reduce(x, context).float(), theirs, rtol=2**-7, atol=1e-6)
            context.free()


def test_torch_distributed_agrees(ranks):
    ranks(2).run(against_torch_distributed)


def in_a_team():
    team, members = team_of_two()
    for method in METHODS:
        context = create_all_reduce_context(100, torch.float32, method, team=team, **SMALL)
        for n in (100, 7):
            check(context, method, "sum", (n,), torch.float32, 3, members)
        context.free()


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def wrong_operands():
    device = shmem.device()
    context = create_all_reduce_context(64, torch.float32, "two_shot", **SMALL)
    x = torch.zeros(8, 8, device=device)
    long = torch.zeros(100, device=device)
    wrong = {
        "x is .65., 65 elements": (long[:65], "sum", None),
        "x is torch.float16": (x.half(), "sum", None),
        "x has strides": (x.T[:, :4], "sum", None),
        "out is .64.": (x, "sum", torch.zeros(64, device=device)),
        "out is torch.int32": (x, "sum", x.int()),
        "out has strides": (x, "sum", torch.zeros(8, 16, device=device)[:, ::2]),
        "x and out overlap": (long[:60], "sum", long[1:61]),
        "op is 'mean'": (x, "mean", None),
    }
    assert_refused(
        {
            f"all_reduce: {text}": lambda a=a, op=op, out=out: all_reduce(a, context, op, out)
            for text, (a, op, out) in wrong.items()
        }
    )
    all_reduce(x, context)  # still usable
    create = create_all_reduce_context
    wrong = {
        "dtype is torch.int8": (8, torch.int8),
        "method is 'tree'": (8, torch.float32, "tree"),
        "max_elements is -1": (-1, torch.float32),
        "programs is 0": (8, torch.float32, "mesh", 0, 0),
        "block is 24": (8, torch.float32, "mesh", 0, 2, 24),
    }
    assert_refused({f"create_all_reduce_context: {text}": lambda args=args: create(*args) for text, args in wrong.items()})
    with pytest.raises(CollectiveMismatchError, match="(?s)'mesh'.*'ring'|'ring'.*'mesh'"):
        create_all_reduce_context(8, torch.float32, ("mesh", "ring")[shmem.my_pe()])


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
