"""allgather_gemm against an all-gather and a product by torch."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels import allgather_gemm, create_allgather_gemm_context

import torch

pytestmark = pytest.mark.dist

SMALL = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, CHUNK_M=64)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def shard(rank, M, K, dtype, seed):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed * 100 + rank)).to(dtype)


def check(c, a, b, dtype):
    """One rounding to dtype of a sum of K products in fp32, in any order: |error| <= eps |c| + K 2^-23 (|a| @ |b|)."""
    a, b = a.double(), b.double()
    expected = a @ b
    bound = torch.finfo(dtype).eps * expected.abs() + a.shape[1] * 2.0**-23 * (a.abs() @ b.abs())
    c = c.cpu().double()
    assert c.shape == expected.shape
    assert ((c - expected).abs() <= bound).all(), f"largest error {(c - expected).abs().max().item()}"


def run_case(M, N, K, dtype, seed, programs=3, calls=2, **config):
    """`calls` calls on one context, on fresh inputs and poisoned outputs; the heap is as before afterwards."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_allgather_gemm_context(M, K, dtype, config={**SMALL, **config}, programs=programs)
    for call in range(calls):
        shards = [shard(r, M, K, dtype, seed + call) for r in range(world)]
        b = shard(99, K, N, dtype, seed + call)
        out = torch.full((M * world, N), float("nan"), dtype=dtype, device=device)
        result = allgather_gemm(shards[rank].to(device), b.to(device), context, out)
        assert result is out
        check(out, torch.cat(shards), b, dtype)
    context.free()


def all_dtypes_and_shapes():
    for dtype in DTYPES:
        for M, N, K in ((64, 32, 32), (100, 77, 51), (1, 1, 1), (257, 40, 65)):
            run_case(M, N, K, dtype, seed=M)
    for M, N, K in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
        run_case(M, N, K, torch.float32, seed=1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_ragged_shapes_and_empty_ones(world, ranks):
    ranks(world).run(all_dtypes_and_shapes, timeout=240)


def cases(shapes):
    for M, N, K, buffers, programs in shapes:
        run_case(M, N, K, torch.float32, seed=M + N, programs=programs, NUM_BUFFERS=buffers, calls=3)


size = st.integers(0, 150)


@settings(max_examples=3, deadline=None, database=None)
@given(shapes=st.lists(st.tuples(size, size, size, st.integers(2, 4), st.integers(1, 5)), min_size=1, max_size=4))
def test_any_shape_buffers_and_programs(shapes, ranks):
    ranks(2).run(cases, shapes, timeout=240)


def delayed_calls(calls):
    """Ranks drift apart at random; each call's inputs differ, so that a stale or overwritten chunk shows."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    M, N, K = 96, 16, 32
    context = create_allgather_gemm_context(M, K, torch.float32, config={**SMALL, "CHUNK_M": 32}, programs=2)
    b = shard(99, K, N, torch.float32, 0)
    rng = random.Random(rank)
    base = torch.cat([shard(r, M, K, torch.float32, 7) for r in range(world)]) @ b
    mine = shard(rank, M, K, torch.float32, 7).to(device)
    for call in range(calls):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        c = allgather_gemm(mine * (call + 1), b.to(device), context)
        assert torch.allclose(c.cpu(), base * (call + 1), rtol=1e-5, atol=1e-4 * (call + 1)), call
    return True


def test_many_calls_with_ranks_delayed_at_random(ranks, many):
    assert all(ranks(2).run(delayed_calls, many(150), timeout=600))


def same_bits_twice():
    M, N, K = 130, 70, 90
    device = shmem.device()
    context = create_allgather_gemm_context(M, K, torch.float16, config=SMALL, programs=4)
    a, b = shard(shmem.my_pe(), M, K, torch.float16, 3).to(device), shard(99, K, N, torch.float16, 3).to(device)
    return torch.equal(allgather_gemm(a, b, context), allgather_gemm(a, b, context))


def test_results_are_the_same_bits_twice(ranks):
    assert all(ranks(2).run(same_bits_twice))


def strided_operands():
    M, N, K = 40, 24, 36
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_allgather_gemm_context(M, K, torch.float32, config=SMALL, programs=2)
    shards = [shard(r, M, K, torch.float32, 5) for r in range(world)]
    b = shard(99, N, K, torch.float32, 5).T
    wide = torch.full((M * world, N + 9), -7.0, device=device)
    allgather_gemm(shards[rank].to(device), b.to(device), context, wide[:, 3 : 3 + N])
    check(wide[:, 3 : 3 + N], torch.cat(shards), b, torch.float32)
    assert (wide[:, :3] == -7).all() and (wide[:, 3 + N :] == -7).all()


def test_a_transposed_b_and_a_strided_out_work(ranks):
    ranks(2).run(strided_operands)


def in_a_team():
    """Two disjoint teams of two work side by side."""
    M, N, K = 70, 30, 40
    me, device = shmem.my_pe(), shmem.device()
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    members, team = ([0, 2], teams[0]) if me % 2 == 0 else ([1, 3], teams[1])
    context = create_allgather_gemm_context(M, K, torch.float32, team=team, config=SMALL, programs=2)
    shards = [shard(r, M, K, torch.float32, 11) for r in members]
    b = shard(99, K, N, torch.float32, me % 2)
    c = allgather_gemm(shard(me, M, K, torch.float32, 11).to(device), b.to(device), context)
    check(c, torch.cat(shards), b, torch.float32)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def wrong_operands():
    device = shmem.device()
    context = create_allgather_gemm_context(8, 16, torch.float32, config=SMALL, programs=1)
    a, b = torch.zeros(8, 16, device=device), torch.zeros(16, 4, device=device)
    wrong = {
        "a is": (torch.zeros(9, 16, device=device), b, None),
        "b is": (a, torch.zeros(15, 4, device=device), None),
        "a is torch.float16": (a.half(), b, torch.zeros(8 * shmem.pe_count(), 4, device=device)),
        "a has strides": (torch.zeros(16, 8, device=device).T, b, None),
        "out is": (a, b, torch.zeros(3, 4, device=device)),
        "out has strides": (a, b, torch.zeros(4, 8 * shmem.pe_count(), device=device).T),
    }
    for text, (x, y, out) in wrong.items():
        with pytest.raises(ValueError, match=f"rank {shmem.my_pe()}: allgather_gemm: {text}"):
            allgather_gemm(x, y, context, out)
    allgather_gemm(a, b, context)  # still usable
    context.free()
    with pytest.raises(ValueError, match="was freed"):
        allgather_gemm(a, b, context)
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        create_allgather_gemm_context(8, 16, torch.int8)
    with pytest.raises(ValueError, match="BLOCK_Q"):
        create_allgather_gemm_context(8, 16, torch.float32, config={"BLOCK_Q": 1})
    for name, value in (("NUM_BUFFERS", 1), ("GROUP_M", 0), ("CHUNK_M", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            create_allgather_gemm_context(8, 16, torch.float32, config={name: value})
    with pytest.raises(CollectiveMismatchError, match="M=8.*\n.*M=9|M=9.*\n.*M=8"):
        create_allgather_gemm_context(8 + shmem.my_pe(), 16, torch.float32)


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
