"""all_to_all and all_to_all_v against slices of the inputs of all ranks."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.all_to_all import all_to_all, all_to_all_v, create_all_to_all_context, reference

import torch

from .operands import assert_refused, assert_same_bits, poisoned, random_bits, team_of_two, torch_distributed

pytestmark = pytest.mark.dist

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2]


def run_equal(context, R, seed, members=None):
    world, device = context.num_ranks, shmem.device()
    me = shmem.team_my_pe(context.team)
    inputs = [random_bits(r, (R * world, *context.row_shape), context.dtype, seed) for r in members or range(world)]
    out = poisoned((R * world, *context.row_shape), context.dtype)
    assert all_to_all(inputs[me].to(device), context, out) is out
    expected = torch.cat([x[me * R : (me + 1) * R] for x in inputs])
    assert_same_bits(out, expected, f"R={R}")
    context.verify()


def run_v(context, table, seed, counts_dtype=torch.int32, spare=0, members=None):
    """table[s][d]: rows from s to d."""
    world, device = context.num_ranks, shmem.device()
    me = shmem.team_my_pe(context.team)
    members = members or range(world)
    shapes = [(sum(row) + spare, *context.row_shape) for row in table]
    inputs = [random_bits(r, shape, context.dtype, seed) for r, shape in zip(members, shapes)]
    out = poisoned((context.max_rows + 1, *context.row_shape), context.dtype)
    counts = torch.tensor(table[me], dtype=counts_dtype, device=device)
    result, received = all_to_all_v(inputs[me].to(device), counts, context, out)
    assert result is out and received.tolist() == [table[s][me] for s in range(world)]
    expected = torch.cat([torch.split(x[: sum(row)], row)[me] for x, row in zip(inputs, table)])
    total = expected.shape[0]
    assert_same_bits(out[:total], expected, table)
    untouched = poisoned((context.max_rows + 1, *context.row_shape), context.dtype)[total:]
    assert_same_bits(out[total:], untouched, "rows after the received ones were written")
    context.verify()


def all_dtypes_and_sizes():
    world = shmem.pe_count()
    rng = random.Random(5)
    for dtype in DTYPES:
        for row_shape in ((7,), (3, 5), (), (0,)):
            context = create_all_to_all_context(40 * world, row_shape, dtype, config={"BLOCK": 64}, programs=3)
            for R in (40, 1, 0):
                run_equal(context, R, R + 1)
            table = [[rng.choice([0, 1, 13, 40]) for _ in range(world)] for _ in range(world)]
            run_v(context, table, 3, counts_dtype=rng.choice([torch.int32, torch.int64]), spare=2)
            context.free()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_and_size_keeps_every_bit(world, ranks):
    ranks(world).run(all_dtypes_and_sizes, timeout=240)


def tables(table_list, row, programs, block):
    context = create_all_to_all_context(70, row, torch.float32, config={"BLOCK": block}, programs=programs)
    for seed, table in enumerate(table_list):
        run_v(context, table, seed)
        run_equal(context, seed, seed)
    context.free()


def matrices(world):
    count = st.one_of(st.just(0), st.integers(0, 70 // world))
    return st.lists(st.lists(count, min_size=world, max_size=world), min_size=world, max_size=world)


@settings(max_examples=4, deadline=None, database=None)
@given(
    table_list=st.lists(matrices(3), min_size=1, max_size=5),
    row=st.integers(0, 9),
    programs=st.integers(1, 4),
    block=st.sampled_from([16, 128]),
)
def test_any_counts_mixed_with_equal_pieces(table_list, row, programs, block, ranks):
    ranks(3).run(tables, table_list, row, programs, block, timeout=240)


def overflows():
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    context = create_all_to_all_context(10, 4, torch.float32, programs=2)
    fitting = [[2] * world for _ in range(world)]
    run_v(context, fitting, 0)
    x = torch.ones(40, 4, device=device)
    crowded = [[1, 12 if s == 0 else 0, 0][:world] for s in range(world)]
    bad = {
        "rank 1 would receive 12 rows, the context's max_rows is 10": crowded,
        "rank 1 gave send_counts": [[1, -1 if s == 1 else 0, 0][:world] for s in range(world)],
        "rank 0 gave send_counts": [[20 + 20 * (s == 0), 20 + 20 * (s == 0), 0][:world] for s in range(world)],
    }
    for call, (text, table) in enumerate(bad.items()):
        for dtype in (torch.int32, torch.int64):
            out = poisoned((10, 4), torch.float32)
            counts = torch.tensor(table[me], dtype=dtype, device=device)
            _, received = all_to_all_v(x, counts, context, out)
            assert received.tolist() == [0] * world
            assert_same_bits(out, poisoned((10, 4), torch.float32))
        with pytest.raises(ValueError, match=f"rank {me}: all_to_all: call {2 + 3 * call} of this context: .*{text}"):
            context.verify()
        run_v(context, fitting, call)  # the next call works, and `verify` has forgotten
    huge = torch.tensor([2**40 if me == 0 else 0] * world, device=device)
    all_to_all_v(x, huge, context)
    with pytest.raises(ValueError, match="rank 0 gave send_counts"):
        context.verify()
    all_to_all(x[: 2 * world] if me else x[:world], context)
    with pytest.raises(ValueError, match="wants equal pieces"):
        context.verify()
    run_equal(context, 3, 1)
    context.free()


@pytest.mark.parametrize("world", [2, 3])
def test_an_overflow_moves_nothing_and_is_told_on_all_ranks_alike(world, ranks):
    ranks(world).run(overflows)


def delayed_calls(calls):
    """Ranks drift apart at random; each call's rows and counts differ, so that stale or overwritten ones show."""
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    context = create_all_to_all_context(4 * world, 3, torch.int32, programs=2)
    alike, own = random.Random(1), random.Random(me)
    for call in range(calls):
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        table = [[alike.randint(0, 4) for _ in range(world)] for _ in range(world)]
        if call % 3 == 0:
            table = [[2] * world for _ in range(world)]
        pieces = [[torch.full((table[s][d], 3), call * 100 + s * 10 + d) for d in range(world)] for s in range(world)]
        x = torch.cat(pieces[me]).to(torch.int32).to(device)
        expected = torch.cat([pieces[s][me] for s in range(world)]).to(torch.int32)
        if call % 3 == 0:
            out = all_to_all(x, context)
        else:
            counts = torch.tensor(table[me], device=device)
            out, received = all_to_all_v(x, counts, context)
            assert received.tolist() == [table[s][me] for s in range(world)], call
        assert torch.equal(out[: expected.shape[0]].cpu(), expected), call
    context.verify()
    return True


@pytest.mark.parametrize("world, calls", [(2, 150), (3, 100)])
def test_many_calls_with_ranks_delayed_at_random(world, calls, ranks, many):
    assert all(ranks(world).run(delayed_calls, many(calls), timeout=600))


def in_a_team():
    team, members = team_of_two()
    context = create_all_to_all_context(20, 6, torch.float32, team=team, programs=2)
    run_equal(context, 7, 1, members)
    run_v(context, [[3, 9], [0, 5]], 2, members=members)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def against_torch():
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    context = create_all_to_all_context(9 * world, 5, torch.bfloat16)
    x = random_bits(me, (9 * world, 5), torch.bfloat16, 1).to(device)
    counts = torch.tensor([me + peer for peer in range(world)], device=device)
    out, received = all_to_all_v(x, counts, context)
    with torch_distributed():
        assert_same_bits(all_to_all(x, context), reference(x)[0])
        rows, wanted = reference(x, counts)
    assert received.tolist() == wanted
    assert_same_bits(out[: len(rows)], rows)


def test_the_reference_of_torch_agrees(ranks):
    ranks(2).run(against_torch)


def wrong_operands():
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    context = create_all_to_all_context(8, 4, torch.float32)
    x = torch.zeros(8, 4, device=device)
    counts = torch.zeros(world, dtype=torch.int32, device=device)
    many = torch.zeros(10, 4, device=device)
    wrong = {
        "all_to_all: x is torch.float16": lambda: all_to_all(x.half(), context),
        r"all_to_all: x is \[8, 3\]": lambda: all_to_all(x[:, :3].contiguous(), context),
        "all_to_all: x has strides": lambda: all_to_all(torch.zeros(4, 8, device=device).T, context),
        "all_to_all: x has 7 rows, no multiple": lambda: all_to_all(x[:7], context),
        "all_to_all: x has 10 rows, the context's max_rows is 8": lambda: all_to_all(many, context),
        "all_to_all: out has 6 rows": lambda: all_to_all(x, context, torch.zeros(6, 4, device=device)),
        "all_to_all_v: out has 7 rows, it must have 8": lambda: all_to_all_v(x, counts, context, x[:7].clone()),
        "all_to_all_v: send_counts is torch.int16": lambda: all_to_all_v(x, counts.short(), context),
        rf"all_to_all_v: send_counts is torch.int32 \[{world + 1}\]": lambda: all_to_all_v(
            x, torch.zeros(world + 1, dtype=torch.int32, device=device), context
        ),
        "all_to_all_v: received is torch.int64": lambda: all_to_all_v(x, counts, context, received=counts.long()),
    }
    create = create_all_to_all_context
    wrong |= {
        "create_all_to_all_context: dtype is torch.complex128": lambda: create(8, 4, torch.complex128),
        "create_all_to_all_context: max_rows is -1": lambda: create(-1, 4, torch.int8),
        "create_all_to_all_context: config has .'BLOCK_Q'": lambda: create(8, 4, torch.int8, config={"BLOCK_Q": 1}),
    }
    assert_refused(wrong)
    all_to_all(x, context)  # still usable
    with pytest.raises(CollectiveMismatchError, match="max_rows=8.*\n.*max_rows=9|max_rows=9.*\n.*max_rows=8"):
        create_all_to_all_context(8 + me, 4, torch.float32)


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
