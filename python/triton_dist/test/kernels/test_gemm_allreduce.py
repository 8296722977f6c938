"""gemm_allreduce, by both methods, against a product of all K by torch."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.gemm_allreduce import create_gemm_allreduce_context, gemm_allreduce, reference

import torch
import torch.distributed as dist

pytestmark = pytest.mark.dist

METHODS = ("one_shot", "two_shot")
SMALL = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=2)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random_matrix(name, rows, cols, dtype, seed):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed * 100 + name)).to(dtype)


def operands(M, N, ks, dtype, seed):
    """[a of each rank], [b of each rank]; rank r has K = ks[r]."""
    a = [random_matrix(2 * r, M, k, dtype, seed) for r, k in enumerate(ks)]
    b = [random_matrix(2 * r + 1, k, N, dtype, seed) for r, k in enumerate(ks)]
    return a, b


def check(c, a, b, dtype):
    """One rounding to dtype of a sum of all ranks' products in fp32, in any order."""
    a, b = torch.cat(a, 1).double(), torch.cat(b).double()
    expected = a @ b
    bound = torch.finfo(dtype).eps * expected.abs() + (a.shape[1] + 1) * 2.0**-23 * (a.abs() @ b.abs())
    c = c.cpu().double()
    assert c.shape == expected.shape
    assert ((c - expected).abs() <= bound).all(), f"largest error {(c - expected).abs().max().item()}"


def run_case(method, M, N, ks, dtype, seed, programs=3, calls=2, **config):
    """`calls` calls on one context, on fresh inputs and poisoned outputs; returns the last result."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_gemm_allreduce_context(M, N, dtype, method, config={**SMALL, **config}, programs=programs)
    for call in range(calls):
        a, b = operands(M, N, ks[:world], dtype, seed + call)
        out = torch.full((M, N), float("nan"), dtype=dtype, device=device)
        result = gemm_allreduce(a[rank].to(device), b[rank].to(device), context, out)
        assert result is out
        check(out, a, b, dtype)
    context.free()
    return out.cpu()


def all_dtypes_and_shapes():
    split = [51, 20, 33, 7]
    for method in METHODS:
        for dtype in DTYPES:
            run_case(method, 101, 45, split, dtype, seed=1, programs=2)
        run_case(method, 64, 96, [32] * 4, torch.float16, seed=2, programs=4)
        run_case(method, 1, 1, [1] * 4, torch.bfloat16, seed=3)
        for M, N, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
            run_case(method, M, N, [k] * 4, torch.float32, seed=4)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_ragged_shapes_and_empty_ones(world, ranks):
    ranks(world).run(all_dtypes_and_shapes, timeout=240)


def eight_ranks():
    for method in METHODS:
        run_case(method, 70, 40, [20, 21, 0, 5, 40, 33, 1, 64], torch.float16, seed=8, programs=2, calls=1)


def test_eight_ranks(ranks):
    ranks(8).run(eight_ranks, timeout=240)


def cases(shapes):
    """Both methods; returns what they gave, to compare the ranks."""
    given_by = {}
    for M, N, ks, programs, group in shapes:
        for method in METHODS:
            last = run_case(method, M, N, ks, torch.float32, M + N, programs, calls=3, GROUP_M=group)
            given_by[method] = [*given_by.get(method, []), last]
    return given_by


size = st.integers(0, 130)
split = st.lists(st.integers(0, 80), min_size=3, max_size=3)


@settings(max_examples=2, deadline=None, database=None)
@given(st.lists(st.tuples(size, size, split, st.integers(1, 7), st.integers(1, 4)), min_size=1, max_size=3))
def test_any_shape_split_of_K_and_programs_gives_all_ranks_and_methods_the_same_bits(ranks, shapes):
    results = ranks(3).run(cases, shapes, timeout=240)
    first = results[0]["one_shot"]
    for result in results:
        for method in METHODS:
            assert all(torch.equal(x, y) for x, y in zip(first, result[method]))


def delayed_calls(method, calls):
    """Ranks drift apart at random; each call's inputs differ, so that a stale or overwritten tile shows."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_gemm_allreduce_context(64, 80, torch.float32, method, config=SMALL, programs=2)
    a, b = operands(64, 80, [32] * world, torch.float32, 7)
    rng = random.Random(rank)
    base = torch.cat(a, 1) @ torch.cat(b)
    mine, b = a[rank].to(device), b[rank].to(device)
    for call in range(calls):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        c = gemm_allreduce(mine * (call + 1), b, context)
        assert torch.allclose(c.cpu(), base * (call + 1), rtol=1e-5, atol=1e-4 * (call + 1)), call
    return True


@pytest.mark.parametrize("method", METHODS)
def test_many_calls_with_ranks_delayed_at_random(method, ranks, many):
    assert all(ranks(3).run(delayed_calls, method, many(60), timeout=600))


def strided_operands():
    M, N, k = 41, 24, 36
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    a, b = operands(M, N, [k] * world, torch.float32, 5)
    transposed = [x[rank].T.contiguous().to(device).T for x in (a, b)]
    for method in METHODS:
        context = create_gemm_allreduce_context(M, N, torch.float32, method, config=SMALL, programs=2)
        wide = torch.full((M, N + 9), -7.0, device=device)
        gemm_allreduce(*transposed, context, wide[:, 3 : 3 + N])
        check(wide[:, 3 : 3 + N], a, b, torch.float32)
        assert (wide[:, :3] == -7).all() and (wide[:, 3 + N :] == -7).all()


def test_transposed_operands_and_a_strided_out_work(ranks):
    ranks(2).run(strided_operands)


def in_a_team():
    """Two disjoint teams of two work side by side, each by another method."""
    M, N = 70, 30
    me, device = shmem.my_pe(), shmem.device()
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    team, index = teams[me % 2], me // 2
    for turn in (0, 1):  # the heap serves all ranks alike, so all allocate the same at a time
        method = METHODS[turn]
        context = create_gemm_allreduce_context(M, N, torch.float32, method, team=team, config=SMALL, programs=2)
        a, b = operands(M, N, [40, 25], torch.float32, 11 + me % 2)
        check(gemm_allreduce(a[index].to(device), b[index].to(device), context), a, b, torch.float32)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team, timeout=120)


def the_reference():
    dist.init_process_group(shmem.process_group_backend())
    a, b = operands(5, 9, [4, 6, 2], torch.float16, 2)
    rank = shmem.my_pe()
    check(reference(a[rank].to(shmem.device()), b[rank].to(shmem.device())), a, b, torch.float16)


def test_the_reference_is_right_too(ranks):
    ranks(3).run(the_reference)


def wrong_operands():
    device = shmem.device()
    a, b = torch.zeros(8, 16, device=device), torch.zeros(16, 4, device=device)
    wrong = {
        "a is": (torch.zeros(9, 16, device=device), b, None),
        "b is": (a, torch.zeros(16, 5, device=device), None),
        "a is torch.float16": (a.half(), b, torch.zeros(8, 4, device=device)),
        "out is": (a, b, torch.zeros(4, 4, device=device)),
        "out has strides": (a, b, torch.zeros(4, 8, device=device).T),
    }
    for method in METHODS:
        context = create_gemm_allreduce_context(8, 4, torch.float32, method, config=SMALL, programs=1)
        for text, (x, y, out) in wrong.items():
            with pytest.raises(ValueError, match=f"rank {shmem.my_pe()}: gemm_allreduce: {text}"):
                gemm_allreduce(x, y, context, out)
        gemm_allreduce(a, b, context)  # still usable
        context.free()
        with pytest.raises(ValueError, match="was freed"):
            gemm_allreduce(a, b, context)
    with pytest.raises(ValueError, match="method is 'ring'"):
        create_gemm_allreduce_context(8, 4, torch.float32, "ring")
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        create_gemm_allreduce_context(8, 4, torch.int8)
    with pytest.raises(ValueError, match="BLOCK_Q"):
        create_gemm_allreduce_context(8, 4, torch.float32, config={"BLOCK_Q": 1})
    with pytest.raises(CollectiveMismatchError, match="one_shot.*\n.*two_shot|two_shot.*\n.*one_shot"):
        create_gemm_allreduce_context(8, 4, torch.float32, METHODS[shmem.my_pe()])


def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks):
    ranks(2).run(wrong_operands)
