"""transpose_all_to_all and reverse_all_to_all against slices of the inputs of all ranks, bit for bit."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.sequence_all_to_all import (
    create_sequence_all_to_all_context,
    reverse_all_to_all,
    reverse_reference,
    transpose_all_to_all,
    transpose_reference,
)

import torch

from .operands import assert_refused, assert_same_bits, poisoned, random_bits, team_of_two, torch_distributed

pytestmark = pytest.mark.dist

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn]
SMALL = dict(BLOCK_M=16, BLOCK_N=32)


def run_case(S, H, D, dtype, seed, programs=2, config=SMALL, calls=2, team=0, members=None):
    world, me, device = shmem.team_n_pes(team), shmem.team_my_pe(team), shmem.device()
    members = members or range(world)
    context = create_sequence_all_to_all_context(S, H, D, dtype, team=team, config=config, programs=programs)
    lengths = [S] * world if isinstance(S, int) else S
    first = sum(lengths[:me])
    for call in range(calls):
        by_tokens = [random_bits(r, (n, H * world, D), dtype, seed + call) for r, n in zip(members, lengths)]
        by_heads = torch.cat([x[:, me * H : (me + 1) * H] for x in by_tokens])
        assert context.by_tokens == tuple(by_tokens[me].shape) and context.by_heads == tuple(by_heads.shape)
        out = poisoned(by_heads.shape, dtype)
        assert transpose_all_to_all(by_tokens[me].to(device), context, out) is out
        assert_same_bits(out, by_heads, f"transpose of S={S} H={H} D={D} {dtype}")
        assert_same_bits(reverse_all_to_all(out, context), by_tokens[me], f"round trip of S={S} H={H} D={D} {dtype}")
        full = [random_bits(r, (sum(lengths), H, D), dtype, 50 + seed + call) for r in members]
        back = reverse_all_to_all(full[me].to(device), context)
        expected = torch.cat([x[first : first + lengths[me]] for x in full], dim=1)
        assert_same_bits(back, expected, f"reverse of S={S} H={H} D={D} {dtype}")
    context.free()


def all_dtypes_and_shapes():
    world = shmem.pe_count()
    for dtype in DTYPES:
        run_case(33, 3, 16, dtype, seed=1, calls=1)
    for S, H, D in ((20, 3, 7), (1, 1, 1), (0, 2, 4), (5, 0, 4), (5, 2, 0)):
        run_case(S, H, D, torch.float32, seed=1)
    run_case([(7 * r + 3) % 11 for r in range(world)], 2, 5, torch.bfloat16, seed=1)
    run_case([0] * (world - 1) + [9], 2, 5, torch.bfloat16, seed=1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_ragged_shapes_and_empty_ones(world, ranks):
    ranks(world).run(all_dtypes_and_shapes, timeout=240)


def cases(shapes):
    for lengths, H, D, block_m, block_n, programs in shapes:
        run_case(lengths, H, D, torch.int32, H + D, programs, dict(BLOCK_M=block_m, BLOCK_N=block_n))


block = st.sampled_from([4, 16, 64])
shape = st.tuples(
    st.lists(st.integers(0, 60), min_size=3, max_size=3), st.integers(0, 5), st.integers(0, 20), block, block, st.integers(1, 4)
)


@settings(max_examples=3, deadline=None, database=None)
@given(shapes=st.lists(shape, min_size=1, max_size=4))
def test_any_lengths_heads_and_blocks(shapes, ranks):
    ranks(3).run(cases, shapes, timeout=240)


def delayed_calls(calls):
    """Ranks drift apart at random, directions alternate at random; each call's data differ, so that stale ones show."""
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    S, H, D = 3, 2, 4
    context = create_sequence_all_to_all_context(S, H, D, torch.int32, programs=2)
    alike, own = random.Random(1), random.Random(me)
    base = [torch.arange(S * H * world * D, dtype=torch.int32).view(S, H * world, D) + 10000 * r for r in range(world)]
    heads = torch.cat([x[:, me * H : (me + 1) * H] for x in base]).to(device)
    tokens = base[me].to(device)
    for call in range(calls):
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        if alike.random() < 0.5:
            assert torch.equal(transpose_all_to_all(tokens + call, context), heads + call), call
        else:
            assert torch.equal(reverse_all_to_all(heads + call, context), tokens + call), call
    return True


@pytest.mark.parametrize("world, calls", [(2, 200), (3, 150)])
def test_many_calls_with_ranks_delayed_at_random(world, calls, ranks, many):
    assert all(ranks(world).run(delayed_calls, many(calls), timeout=600))


def strided_operands():
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    S, H, D = 9, 2, 4
    context = create_sequence_all_to_all_context(S, H, D, torch.float32, config=SMALL, programs=2)
    wide = [random_bits(r, (S, H * world + 3, D), torch.float32, 2) for r in range(world)]
    views = [x[:, 1 : 1 + H * world] for x in wide]
    out = torch.full((S * world, H + 5, D), -7.0, device=device)
    transpose_all_to_all(wide[me].to(device)[:, 1 : 1 + H * world], context, out[:, 2 : 2 + H])
    assert_same_bits(out[:, 2 : 2 + H], torch.cat([x[:, me * H : (me + 1) * H] for x in views]), "transpose")
    assert (out[:, :2] == -7).all() and (out[:, 2 + H :] == -7).all()
    back = torch.full((S, H * world + 1, D), -7.0, device=device)
    reverse_all_to_all(out[:, 2 : 2 + H], context, back[:, 1:])
    assert_same_bits(back[:, 1:], views[me], "reverse")
    assert (back[:, :1] == -7).all()


def test_tokens_that_lie_apart_work(ranks):
    ranks(2).run(strided_operands)


def in_a_team():
    team, members = team_of_two()
    run_case([5, 8], 3, 4, torch.float16, seed=1, team=team, members=members)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def against_torch():
    with torch_distributed() as dist:
        compare_with_torch(dist)


def compare_with_torch(dist):
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    H, D = 3, 16
    for lengths in ([10] * world, [4 + 3 * r for r in range(world)]):
        context = create_sequence_all_to_all_context(lengths, H, D, torch.bfloat16)
        x = random_bits(me, (lengths[me], H * world, D), torch.bfloat16, 3).to(device)
        y = transpose_all_to_all(x, context)
        assert_same_bits(y, transpose_reference(x, lengths), "transpose")
        assert_same_bits(reverse_all_to_all(y, context), reverse_reference(y, lengths), "reverse")
    # The definition by torch's own all-to-all: permute so that each rank's piece is contiguous, exchange, permute back.
    S = 10
    x = torch.randn(S, H * world, D).to(device)
    context = create_sequence_all_to_all_context(S, H, D, torch.float32)
    pieces = x.view(S, world, H, D).transpose(0, 1).contiguous()
    theirs = torch.empty_like(pieces)
    dist.all_to_all_single(theirs, pieces)
    assert_same_bits(transpose_all_to_all(x, context), theirs.view(S * world, H, D), "transpose by all_to_all_single")
    y = torch.randn(S * world, H, D).to(device)
    theirs = torch.empty_like(y)
    dist.all_to_all_single(theirs, y)
    expected = theirs.view(world, S, H, D).transpose(0, 1).reshape(S, world * H, D)
    assert_same_bits(reverse_all_to_all(y, context), expected, "reverse by all_to_all_single")


@pytest.mark.parametrize("world", [2, 3])
def test_torchs_all_to_all_single_with_permutes_agrees(world, ranks):
    ranks(world).run(against_torch)


def wrong_operands():
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    context = create_sequence_all_to_all_context(4, 2, 8, torch.float32)
    x, y = (torch.zeros(shape, device=device) for shape in (context.by_tokens, context.by_heads))
    wrong = {
        rf"transpose_all_to_all: x is \[{4 * world}, 2, 8\]": lambda: transpose_all_to_all(y, context),
        r"reverse_all_to_all: x is \[4, ": lambda: reverse_all_to_all(x, context),
        "transpose_all_to_all: x is torch.float16": lambda: transpose_all_to_all(x.half(), context),
        "transpose_all_to_all: x has strides": lambda: transpose_all_to_all(
            torch.zeros(4, 8, 2 * world, device=device).transpose(1, 2), context
        ),
        r"transpose_all_to_all: out is \[1,": lambda: transpose_all_to_all(x, context, y[:1]),
    }
    create = create_sequence_all_to_all_context
    wrong |= {
        f"create_sequence_all_to_all_context: {text}": lambda args=args, config=config: create(*args, config=config)
        for text, args, config in (
            ("dtype is torch.complex128", (4, 2, 8, torch.complex128), None),
            (r"S is \[1\]: give one length for each of the 2 ranks", ([1], 2, 8, torch.int8), None),
            ("H is -1", (4, -1, 8, torch.int8), None),
            ("config has .'BLOCK_Q'", (4, 2, 8, torch.int8), {"BLOCK_Q": 1}),
        )
    }
    assert_refused(wrong)
    transpose_all_to_all(x, context)  # still usable
    with pytest.raises(CollectiveMismatchError, match="S=4.*\n.*S=5|S=5.*\n.*S=4"):
        create_sequence_all_to_all_context(4 + me, 2, 8, torch.int8)


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
