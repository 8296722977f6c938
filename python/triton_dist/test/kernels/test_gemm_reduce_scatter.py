"""gemm_reduce_scatter against a product of all K by torch."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.gemm_reduce_scatter import create_gemm_reduce_scatter_context, gemm_reduce_scatter, reference

import torch
import torch.distributed as dist

pytestmark = pytest.mark.dist

SMALL = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=2)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random_matrix(name, rows, cols, dtype, seed):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed * 100 + name)).to(dtype)


def operands(M, N, ks, dtype, seed):
    """[a of each rank], [b of each rank]; rank r has K = ks[r]."""
    a = [random_matrix(2 * r, M, k, dtype, seed) for r, k in enumerate(ks)]
    b = [random_matrix(2 * r + 1, k, N, dtype, seed) for r, k in enumerate(ks)]
    return a, b


def my_rows(M, rank, world):
    shard = -(-M // world)
    return slice(min(rank * shard, M), min((rank + 1) * shard, M))


def check(c, a, b, dtype, rows):
    """One rounding to dtype of a sum of all ranks' products in fp32, in any order."""
    a, b = torch.cat(a, 1).double(), torch.cat(b).double()
    expected, terms = (a @ b)[rows], (a.abs() @ b.abs())[rows]
    bound = torch.finfo(dtype).eps * expected.abs() + (a.shape[1] + 1) * 2.0**-23 * terms
    c = c.cpu().double()
    assert c.shape == expected.shape
    assert ((c - expected).abs() <= bound).all(), f"largest error {(c - expected).abs().max().item()}"


def run_case(M, N, ks, dtype, seed, programs=3, calls=2, **config):
    """`calls` calls on one context, on fresh inputs and poisoned outputs."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_gemm_reduce_scatter_context(M, N, dtype, config={**SMALL, **config}, programs=programs)
    for call in range(calls):
        a, b = operands(M, N, ks[:world], dtype, seed + call)
        rows = my_rows(M, rank, world)
        out = torch.full((rows.stop - rows.start, N), float("nan"), dtype=dtype, device=device)
        result = gemm_reduce_scatter(a[rank].to(device), b[rank].to(device), context, out)
        assert result is out
        check(out, a, b, dtype, rows)
    context.free()


def all_dtypes_and_shapes():
    for dtype in DTYPES:
        for M, N, ks in ((101, 77, [51, 20, 33, 7]), (5, 40, [65, 0, 3, 64])):
            run_case(M, N, ks, dtype, seed=M)
    for M, N, k in ((128, 64, 32), (1, 1, 1), (0, 5, 7), (5, 0, 7), (5, 7, 0)):
        run_case(M, N, [k] * 4, torch.float32, seed=1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_ragged_shapes_and_empty_ones(world, ranks):
    ranks(world).run(all_dtypes_and_shapes, timeout=240)


def eight_ranks():
    run_case(201, 40, [20, 21, 0, 5, 40, 33, 1, 64], torch.float16, seed=8, programs=2, calls=1)


def test_eight_ranks(ranks):
    ranks(8).run(eight_ranks, timeout=240)


def cases(shapes):
    for M, N, ks, programs, group in shapes:
        run_case(M, N, ks, torch.float32, seed=M + N, programs=programs, calls=3, GROUP_M=group)


size = st.integers(0, 150)
split = st.lists(st.integers(0, 80), min_size=3, max_size=3)


@settings(max_examples=3, deadline=None, database=None)
@given(st.lists(st.tuples(size, size, split, st.integers(1, 7), st.integers(1, 4)), min_size=1, max_size=4))
def test_any_shape_split_of_K_and_programs(ranks, shapes):
    ranks(3).run(cases, shapes, timeout=240)


def delayed_calls(calls, M=96, N=48):
    """Ranks drift apart at random; each call's inputs differ, so that a stale or overwritten tile shows."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_gemm_reduce_scatter_context(M, N, torch.float32, config=SMALL, programs=2)
    a, b = operands(M, N, [32] * world, torch.float32, 7)
    rng = random.Random(rank)
    base = (torch.cat(a, 1) @ torch.cat(b))[my_rows(M, rank, world)]
    mine, b = a[rank].to(device), b[rank].to(device)
    for call in range(calls):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        c = gemm_reduce_scatter(mine * (call + 1), b, context)
        assert torch.allclose(c.cpu(), base * (call + 1), rtol=1e-5, atol=1e-4 * (call + 1)), call
    return True


@pytest.mark.parametrize("world, rows", [(2, 96), (3, 4)], ids=["2 ranks", "3 ranks, one without rows"])
def test_many_calls_with_ranks_delayed_at_random(world, rows, ranks, many):
    # 4 rows on 3 ranks: rank 2 has none and waits for no tiles; `done` alone holds it back.
    assert all(ranks(world).run(delayed_calls, many(100), rows, timeout=600))


def same_bits_twice():
    world, device = shmem.pe_count(), shmem.device()
    context = create_gemm_reduce_scatter_context(130, 70, torch.float16, config=SMALL, programs=4)
    a, b = operands(130, 70, [90] * world, torch.float16, 3)
    a, b = a[shmem.my_pe()].to(device), b[shmem.my_pe()].to(device)
    return torch.equal(gemm_reduce_scatter(a, b, context), gemm_reduce_scatter(a, b, context))


def test_results_are_the_same_bits_twice(ranks):
    assert all(ranks(3).run(same_bits_twice))


def strided_operands():
    M, N, k = 41, 24, 36
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_gemm_reduce_scatter_context(M, N, torch.float32, config=SMALL, programs=2)
    a, b = operands(M, N, [k] * world, torch.float32, 5)
    rows = my_rows(M, rank, world)
    wide = torch.full((rows.stop - rows.start, N + 9), -7.0, device=device)
    transposed = [x[rank].T.contiguous().to(device).T for x in (a, b)]
    gemm_reduce_scatter(*transposed, context, wide[:, 3 : 3 + N])
    check(wide[:, 3 : 3 + N], a, b, torch.float32, rows)
    assert (wide[:, :3] == -7).all() and (wide[:, 3 + N :] == -7).all()


def test_transposed_operands_and_a_strided_out_work(ranks):
    ranks(2).run(strided_operands)


def in_a_team():
    """Two disjoint teams of two work side by side."""
    M, N = 70, 30
    me, device = shmem.my_pe(), shmem.device()
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    team, index = teams[me % 2], me // 2
    context = create_gemm_reduce_scatter_context(M, N, torch.float32, team=team, config=SMALL, programs=2)
    a, b = operands(M, N, [40, 25], torch.float32, 11 + me % 2)
    c = gemm_reduce_scatter(a[index].to(device), b[index].to(device), context)
    check(c, a, b, torch.float32, my_rows(M, index, 2))


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def the_reference():
    dist.init_process_group(shmem.process_group_backend())
    a, b = operands(5, 9, [4, 6, 2], torch.float16, 2)
    rank = shmem.my_pe()
    check(reference(a[rank].to(shmem.device()), b[rank].to(shmem.device())), a, b, torch.float16, my_rows(5, rank, 3))


def test_the_reference_is_right_too(ranks):
    ranks(3).run(the_reference)


def wrong_operands():
    device, world = shmem.device(), shmem.pe_count()
    context = create_gemm_reduce_scatter_context(8, 4, torch.float32, config=SMALL, programs=1)
    a, b, rows = torch.zeros(8, 16, device=device), torch.zeros(16, 4, device=device), 8 // world
    wrong = {
        "a is": (torch.zeros(9, 16, device=device), b, None),
        "b is": (a, torch.zeros(15, 4, device=device), None),
        "a is torch.float16": (a.half(), b, torch.zeros(rows, 4, device=device)),
        "out is": (a, b, torch.zeros(8, 4, device=device)),
        "out has strides": (a, b, torch.zeros(4, rows, device=device).T),
    }
    for text, (x, y, out) in wrong.items():
        with pytest.raises(ValueError, match=f"rank {shmem.my_pe()}: gemm_reduce_scatter: {text}"):
            gemm_reduce_scatter(x, y, context, out)
    gemm_reduce_scatter(a, b, context)  # still usable
    context.free()
    with pytest.raises(ValueError, match="was freed"):
        gemm_reduce_scatter(a, b, context)
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        create_gemm_reduce_scatter_context(8, 4, torch.int8)
    with pytest.raises(ValueError, match="M is -1"):
        create_gemm_reduce_scatter_context(-1, 4, torch.float16)
    with pytest.raises(ValueError, match="programs is 0"):
        create_gemm_reduce_scatter_context(8, 4, torch.float16, programs=0)
    with pytest.raises(ValueError, match="BLOCK_Q"):
        create_gemm_reduce_scatter_context(8, 4, torch.float32, config={"BLOCK_Q": 1})
    with pytest.raises(CollectiveMismatchError, match="N=4.*\n.*N=5|N=5.*\n.*N=4"):
        create_gemm_reduce_scatter_context(8, 4 + shmem.my_pe(), torch.float32)


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
