"""qkv_all_to_all and attention_output_all_to_all against slices of the inputs of all ranks, bit for bit."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.qkv_all_to_all import (
    attention_output_all_to_all,
    create_qkv_all_to_all_context,
    qkv_all_to_all,
    reference,
)

import torch

from .operands import assert_refused, assert_same_bits, random_bits, team_of_two, torch_distributed

pytestmark = pytest.mark.dist

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.uint8]
SMALL = dict(BLOCK_M=16, BLOCK_N=32)


def own_heads(heads, me, world):
    """The slice of the key (or query) heads that rank `me` gets, by the rule that attention needs, head by head."""
    return slice(me * heads // world, me * heads // world + max(heads // world, 1))


def run_case(S, Hq, Hkv, D, dtype, seed, programs=2, config=SMALL, calls=2, team=0, members=None):
    world, me, device = shmem.team_n_pes(team), shmem.team_my_pe(team), shmem.device()
    members = members or range(world)
    what = f"S={S} Hq={Hq} Hkv={Hkv} D={D} {dtype}"
    context = create_qkv_all_to_all_context(S, Hq, Hkv, D, dtype, team=team, config=config, programs=programs)
    lengths = [S] * world if isinstance(S, int) else S
    first = sum(lengths[:me])
    for call in range(calls):
        packed = [random_bits(r, (n, Hq + 2 * Hkv, D), dtype, seed + call) for r, n in zip(members, lengths)]
        split = [torch.split(x.to(device), [Hq, Hkv, Hkv], dim=1) for x in packed]  # views: tokens lie apart
        results = qkv_all_to_all(*split[me], context)
        for i, (result, heads) in enumerate(zip(results, (Hq, Hkv, Hkv))):
            expected = torch.cat([x[i][:, own_heads(heads, me, world)] for x in split])
            assert_same_bits(result, expected, f"{'qkv'[i]} of {what}")
        full = [random_bits(r, (sum(lengths), Hq // world, D), dtype, 50 + seed + call) for r in members]
        back = attention_output_all_to_all(full[me].to(device), context)
        expected = torch.cat([x[first : first + lengths[me]] for x in full], dim=1)
        assert_same_bits(back, expected, f"output of {what}")
    context.free()


def all_dtypes_and_shapes():
    world = shmem.pe_count()
    for dtype in DTYPES:
        run_case(33, 2 * world, world, 16, dtype, seed=1, calls=1)
    run_case(5, 4 * world, 2 * world, 3, torch.bfloat16, seed=2)
    run_case(20, 2 * world, 1, 7, torch.bfloat16, seed=3)
    run_case(0, world, world, 4, torch.float32, seed=1)
    run_case(3, world, world, 0, torch.float32, seed=1)
    run_case([(7 * r + 3) % 11 for r in range(world)], world, 1, 5, torch.bfloat16, seed=1)
    run_case([0] * (world - 1) + [9], world, world, 5, torch.bfloat16, seed=1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_head_counts_ragged_shapes_and_empty_ones(world, ranks):
    ranks(world).run(all_dtypes_and_shapes, timeout=240)


def cases(shapes):
    for lengths, Hkv, groups, D, block_m, block_n, programs in shapes:
        run_case(lengths, 4 * Hkv * groups, Hkv, D, torch.int32, D, programs, dict(BLOCK_M=block_m, BLOCK_N=block_n), calls=1)


block = st.sampled_from([4, 16, 64])
length = st.integers(0, 40)
shape = st.tuples(
    st.lists(length, min_size=4, max_size=4), st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.integers(0, 9),
    block, block, st.integers(1, 3),
)  # fmt: skip


@settings(max_examples=3, deadline=None, database=None)
@given(shapes=st.lists(shape, min_size=1, max_size=3))
def test_any_lengths_heads_and_blocks(shapes, ranks):
    ranks(4).run(cases, shapes, timeout=240)


def attend(q, k, v):
    """[T, heads, D] each; grouped queries."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    return (torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v).transpose(0, 1).float()


def whole_attention(Hq, key_heads):
    """Attention on whole sequences, some heads a rank, gives what one rank with everything gets."""
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    lengths, D = [6 + r for r in range(world)], 4
    mine = slice(sum(lengths[:me]), sum(lengths[: me + 1]))
    for Hkv in key_heads:
        context = create_qkv_all_to_all_context(lengths, Hq, Hkv, D, torch.float32)
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(sum(lengths), heads, D, generator=generator) for heads in (Hq, Hkv, Hkv))
        heads = qkv_all_to_all(*(x[mine].to(device) for x in (q, k, v)), context)
        out = attention_output_all_to_all(attend(*heads).contiguous(), context)
        assert torch.allclose(out.cpu(), attend(q, k, v)[mine], rtol=1e-6, atol=1e-6), Hkv


def test_attention_with_grouped_queries_finds_its_key_heads(ranks):
    ranks(4).run(whole_attention, 8, [8, 4, 2, 1], timeout=120)


def delayed_calls(calls):
    """Ranks drift apart at random, directions alternate at random; each call's data differ, so that stale ones show."""
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    S, Hq, Hkv, D = 3, 2 * world, world, 4
    context = create_qkv_all_to_all_context(S, Hq, Hkv, D, torch.int32, programs=2)
    alike, own = random.Random(1), random.Random(me)
    base = [
        [torch.arange(S * heads * D, dtype=torch.int32).view(S, heads, D) + 10000 * r + 1000 * i for r in range(world)]
        for i, heads in enumerate((Hq, Hkv, Hkv))
    ]
    heads = [torch.cat([x[:, own_heads(x.shape[1], me, world)] for x in part]).to(device) for part in base]
    tokens = [part[me].to(device) for part in base]
    for call in range(calls):
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        if alike.random() < 0.5:
            results = qkv_all_to_all(*(x + call for x in tokens), context)
            assert all(torch.equal(result, x + call) for result, x in zip(results, heads)), call
        else:
            assert torch.equal(attention_output_all_to_all(heads[0] + call, context), tokens[0] + call), call
    return True


@pytest.mark.parametrize("world, calls", [(2, 150), (3, 100)])
def test_many_calls_with_ranks_delayed_at_random(world, calls, ranks, many):
    assert all(ranks(world).run(delayed_calls, many(calls), timeout=600))


def in_a_team():
    team, members = team_of_two()
    run_case([5, 8], 4, 1, 4, torch.float16, seed=1, team=team, members=members)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def against_torch():
    world, me, device = shmem.pe_count(), shmem.my_pe(), shmem.device()
    lengths = [4 + 3 * r for r in range(world)]
    with torch_distributed():
        for Hkv in (1, world):
            context = create_qkv_all_to_all_context(lengths, 2 * world, Hkv, 8, torch.bfloat16)
            sizes = [(lengths[me], heads, 8) for heads in (2 * world, Hkv, Hkv)]
            qkv = [random_bits(me, size, torch.bfloat16, 3).to(device) for size in sizes]
            for ours, theirs in zip(qkv_all_to_all(*qkv, context), reference(*qkv, lengths)):
                assert_same_bits(ours, theirs, f"Hkv={Hkv}")


def test_the_reference_of_torch_agrees(ranks):
    ranks(2).run(against_torch)


def wrong_operands():
    me, device = shmem.my_pe(), shmem.device()
    create = create_qkv_all_to_all_context
    context = create(4, 4, 2, 8, torch.float32)
    q, k = torch.zeros(4, 4, 8, device=device), torch.zeros(4, 2, 8, device=device)
    wrong = {
        r"qkv_all_to_all: q is \[4, 2, 8\]": lambda: qkv_all_to_all(k, k, k, context),
        r"qkv_all_to_all: v is \[4, 4, 8\]": lambda: qkv_all_to_all(q, k, q, context),
        "qkv_all_to_all: k is torch.float16": lambda: qkv_all_to_all(q, k.half(), k, context),
        "qkv_all_to_all: k has strides": lambda: qkv_all_to_all(q, k.transpose(1, 2).contiguous().transpose(1, 2), k, context),
        r"qkv_all_to_all: the q of out is \[4, 4, 8\]": lambda: qkv_all_to_all(q, k, k, context, (q, k, k)),
        r"attention_output_all_to_all: o is \[4, 4, 8\]": lambda: attention_output_all_to_all(q, context),
    }
    assert_refused(wrong)
    qkv_all_to_all(q, k, k, context)  # still usable
    wrong = {
        "Hq is 3: give a multiple of the 2 ranks and of Hkv = 1": (4, 3, 1, 8, torch.float32),
        "Hq is 4: give a multiple of the 2 ranks and of Hkv = 3": (4, 4, 3, 8, torch.float32),
        "Hkv is 3: give a multiple or a divisor of the 2 ranks": (4, 6, 3, 8, torch.float32),
        "Hkv is 0: give an integer of 1 or more": (4, 4, 0, 8, torch.float32),
        "S is -1": (-1, 4, 4, 8, torch.float32),
        "dtype is torch.complex128": (4, 4, 2, 8, torch.complex128),
    }
    assert_refused({f"create_qkv_all_to_all_context: {text}": lambda args=args: create(*args) for text, args in wrong.items()})
    with pytest.raises(CollectiveMismatchError, match="S=4.*\n.*S=5|S=5.*\n.*S=4"):
        create(4 + me, 4, 2, 8, torch.float32)


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
