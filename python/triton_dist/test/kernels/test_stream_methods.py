"""The methods `streams`, `columns`, `sequence` and `tma` of the fused GEMMs against plain torch: the same protocol on cpu as on
GPUs."""

import random
import time

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist import kernels, shmem
from triton_dist.errors import ShmemError
from triton_dist.kernels import (
    allgather_gemm,
    create_allgather_gemm_context,
    create_gemm_allreduce_context,
    create_gemm_reduce_scatter_context,
    gemm_allreduce,
    gemm_reduce_scatter,
)
from triton_dist.kernels import allgather_gemm_streams, stream_costs

import torch

pytestmark = pytest.mark.dist

METHODS = ["streams", "columns", "sequence"]  # streams is of allgather_gemm, columns of the sums
SHAPES = [(64, 32, 32), (100, 77, 51), (1, 1, 1), (301, 200, 40), (0, 5, 7), (5, 0, 7), (5, 7, 0)]


def operand(rows, cols, dtype, *seed):
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(rows, cols, generator=generator).to(dtype)


def poisoned(rows, cols, dtype, wide=False):
    """[rows, cols] of NaN; wide: a view whose rows lie apart."""
    out = torch.full((rows, cols + 8 * wide), float("nan"), dtype=dtype, device=shmem.device())
    return out[:, 3 : 3 + cols] if wide else out


def check(found, products, K, dtype):
    """Each rank's product is rounded (eps / 2), sums of them at most twice more, after fp32 sums of K products in any order."""
    found, exact = found.cpu().double(), sum(products)
    size = sum(product.abs() for product in products)
    eps = torch.finfo(dtype).eps
    bound = 2 * eps * size + eps * exact.abs() + len(products) * K * 2.0**-20
    assert found.shape == exact.shape
    assert ((found - exact).abs() <= bound).all(), f"largest error {(found - exact).abs().max().item()}"


def gather_case(M, N, K, dtype, method, calls=2, wide=False, late=None):
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_allgather_gemm_context(M, K, dtype, method=method)
    for call in range(calls):
        shards = [operand(M, K, dtype, call, 1, r) for r in range(world)]
        b = operand(K, N, dtype, call, 2, rank)
        out = poisoned(M * world, N, dtype, wide)
        if late and late.random() < 0.2:
            time.sleep(late.random() * 0.01)
        assert allgather_gemm(shards[rank].to(device), b.to(device), context, out) is out
        check(out, [torch.cat(shards).double() @ b.double()], K, dtype)
    context.free()


def scatter_case(M, N, K, dtype, method, calls=2, wide=False, late=None, transposed=False):
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    creates = create_gemm_reduce_scatter_context, create_gemm_allreduce_context
    contexts = [create(M, N, dtype, method=method) for create in creates]
    first = rank * -(-M // world)
    for call in range(calls):
        a = [operand(M, K, dtype, call, 1, r) for r in range(world)]
        b = [operand(K, N, dtype, call, 2, r) for r in range(world)]
        products = [x.double() @ y.double() for x, y in zip(a, b)]
        if late and late.random() < 0.2:
            time.sleep(late.random() * 0.01)
        mine = a[rank].to(device), b[rank].to(device)
        if transposed:
            mine = mine[0], mine[1].T.contiguous().T
        out = poisoned(contexts[0].rows, N, dtype, wide)
        assert gemm_reduce_scatter(*mine, contexts[0], out) is out
        check(out, [product[first : first + contexts[0].rows] for product in products], K, dtype)
        out = poisoned(M, N, dtype, wide)
        assert gemm_allreduce(*mine, contexts[1], out) is out
        check(out, products, K, dtype)
    for context in contexts:
        context.free()


def small_parts():
    """Small buffers are cut into parts, too."""
    stream_costs.PART_BYTES = stream_costs.BLOCK_BYTES = 256
    stream_costs.TILE_M = stream_costs.TILE_N = 8
    stream_costs.MULTIPROCESSORS = 4 + stream_costs.SPARE


def all_shapes(method):
    small_parts()
    for M, N, K in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if method != "columns":
                gather_case(M, N, K, dtype, method, wide=N == 77)
            if method != "streams":
                scatter_case(M, N, K, dtype, method, wide=N == 77, transposed=N == 200)


def tma_shapes():
    for M, N, K in ((64, 32, 32), (300, 136, 72), (101, 77, 51), (257, 130, 0), (5, 1, 1), (640, 384, 256)):
        for dtype in (torch.bfloat16, torch.float16):
            scatter_case(M, N, K, dtype, "tma", calls=3, wide=N == 136, transposed=K == 72)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_kernel_with_descriptors(world, ranks):
    ranks(world).run(tma_shapes, timeout=240)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_every_dtype_and_shape(method, world, ranks):
    ranks(world).run(all_shapes, method, timeout=240)


def every_order():
    """Whichever way a rank consumes the shards, whatever the others do: all at once, one each, one for each part, or some own
    rows first."""
    small_parts()
    M = 128
    cases = [(1.0, 0, M), (1e-3, M, 0), (1e9, M, M)]
    if shmem.pe_count() == 2:
        cases += [(1e9, M, 40), (1.0, 8, 120), (1.0, 127, 1)]
    for link, mine, others in cases:
        stream_costs.LINK_BYTES = link
        allgather_gemm_streams.first_rows = lambda *shape: mine if shmem.my_pe() == 0 else others  # noqa: B023
        gather_case(M, 48, 32, torch.bfloat16, "streams")


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_multiplies_the_shards_in_any_order(world, ranks):
    ranks(world).run(every_order)


def test_some_rows_go_first_where_whole_waves_are_saved():
    costs = stream_costs
    bf16 = torch.bfloat16
    assert costs.first_rows(4096, 4096, 4096, bf16, 2) == 4096  # whole waves already
    first = costs.first_rows(4096, 3584, 8192, bf16, 2)  # 2 x 4 waves, or 7
    assert 0 < first < 4096 and first in [costs.rows_of_waves(waves, 3584) for waves in (1, 2, 3)]
    assert costs.product_us(first, 3584, 8192, bf16) >= costs.push_us(4096 * 8192 * 2)
    assert costs.first_rows(8, 4096, 4096, bf16, 2) == costs.first_rows(8, 4096, 4096, bf16, 4) == 0
    assert costs.first_rows(0, 4096, 4096, bf16, 2) == 0


def test_blocks_of_columns_are_whole_waves_and_what_is_left_is_multiplied_for_all():
    costs = stream_costs
    free = costs.MULTIPROCESSORS - costs.SPARE
    whole, halves = (0, 4096), (0, 2048, 4096)
    assert costs.columns_of_sum(4096, 4096, 2, 2) == [(0, 2048, halves), (2048, 4096, halves)]
    assert costs.columns_of_sum(4096, 3584, 2, 2) == [(0, 2048, whole), (2048, 3072, whole), (3072, 3584, None)]
    assert costs.columns_of_sum(4096, 2560, 2, 2) == [(0, 1024, whole), (1024, 2048, whole), (2048, 2560, None)]
    assert costs.columns_of_sum(17 * 256, 8192, 2, 2)[0][2] == (0, 17 * 256)  # halves would take more waves
    two = [(0, 2048, (0, 2048)), (2048, 4096, (0, 2048))]  # 15 tiles of columns fill a wave, too, and leave a rest
    assert costs.columns_of_sum(2048, 4096, 2, 2) == two
    assert costs.columns_of_sum(256, 1 << 16, 2, 2)[0] == (0, 1 << 14, (0, 256))  # one tile high: no halves
    for rows, N in ((4096, 4096), (4096, 3584), (8192, 8192), (512, 4096), (20000, 1000), (1, 1), (0, 5), (5, 0), (100, 10**6)):
        for world in (2, 3, 8):
            blocks = costs.columns_of_sum(rows, N, 2, world)
            assert blocks[0][0] == 0 and blocks[-1][1] == N and len(blocks) <= costs.MAX_BLOCKS
            assert all(one[1] == two[0] and one[2] for one, two in zip(blocks, blocks[1:]))
            for first, last, cuts in blocks:
                cuts = cuts or (0, rows)
                assert cuts[0] == 0 and cuts[-1] == rows and list(cuts) == sorted({*cuts, rows} if rows else cuts)
                for begin, end in zip(cuts, cuts[1:]):
                    tiles = -(-(end - begin) // costs.TILE_M) * (last - first) // costs.TILE_N
                    assert last == N or tiles >= costs.FULL * -(-tiles // free) * free or rows == 0


def test_a_rest_is_added_beside_products_only_where_they_take_longer():
    costs = stream_costs
    assert costs.added_beside(costs.columns_of_sum(4096, 3584, 2, 2), 2)
    assert not costs.added_beside([(0, 1024, (0, 8192)), (1024, 2000, None)], 2)
    assert not costs.added_beside([(0, 1024, (0, 8192)), (1024, 1536, None)], 8)  # what seven peers have pushed


def copies():
    """Blocks of rows, to the peer and back, rows apart here, there, on both sides or nowhere; one column, nothing."""
    peer, device = 1 - shmem.my_pe(), shmem.device()
    inbox = shmem.aclshmem_create_tensor((40, 300), torch.bfloat16)
    there, stream = shmem.peer_tensor(inbox, peer), shmem.Stream()
    for call, (rows, first, last) in enumerate([(40, 0, 300), (33, 16, 272), (7, 3, 4), (1, 5, 77), (0, 0, 9), (9, 8, 8)]):
        mine, theirs = (operand(rows, 300, torch.bfloat16, call, rank) for rank in (shmem.my_pe(), peer))
        source = mine.to(device)
        for packed in (False, True):
            inbox.fill_(float("nan"))
            shmem.barrier_all()
            to, came = (one.view(-1)[: rows * (last - first)].view(rows, -1) if packed and rows * (last - first)
                        else one[:rows, first:last] for one in (there, inbox))  # fmt: skip
            stream.follow()
            with stream:
                shmem.copy(to, source[:, first:last])
            stream.join()
            if shmem.device().type == "cuda":
                torch.cuda.synchronize()
            shmem.barrier_all()
            back = poisoned(rows, last - first, torch.bfloat16, wide=True)
            shmem.copy(back, came)
            assert torch.equal(back.cpu(), theirs[:, first:last])
            assert inbox.isnan().sum() == inbox.numel() - rows * (last - first)
    wrong = [(inbox, inbox[:3]), (inbox[0], inbox[0]), (inbox.T, inbox.T), (inbox, inbox.float())]
    for to, source in (*wrong, (inbox[:3], inbox[4:5].expand(3, 300))):
        with pytest.raises(ShmemError, match=rf"rank {shmem.my_pe()}: copy: to is .*, source .*: give two \[rows, columns\]"):
            shmem.copy(to, source)
    shmem.aclshmem_free_tensor(inbox)


def test_blocks_of_rows_are_copied_in_the_order_of_streams(ranks):
    ranks(2).run(copies)


def delayed(calls):
    small_parts()
    late = random.Random(shmem.my_pe())
    gather_case(40, 16, 16, torch.bfloat16, "streams", calls, late=late)
    scatter_case(40, 120, 16, torch.bfloat16, "columns", calls, late=late)  # a pair, a block alone, the rest
    scatter_case(40, 16, 16, torch.bfloat16, "tma", calls, late=late)


def test_many_calls_with_ranks_delayed_at_random(ranks):
    ranks(2).run(delayed, 60, timeout=120)


def beside_others():
    small_parts()
    with kernels.concurrent(2):
        for M, N in ((40, 120), (100, 77), (1, 1), (5, 0)):
            scatter_case(M, N, 16, torch.bfloat16, "columns", calls=3)


@pytest.mark.parametrize("world", [2, 3])
def test_columns_that_share_the_device(world, ranks):
    ranks(world).run(beside_others)


def in_a_team():
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    team = teams[shmem.my_pe() % 2]
    shards = [operand(24, 16, torch.bfloat16, r) for r in range(4)]
    b = operand(16, 8, torch.bfloat16, 9)
    context = create_allgather_gemm_context(24, 16, torch.bfloat16, team, method="streams")
    found = allgather_gemm(shards[shmem.my_pe()].to(shmem.device()), b.to(shmem.device()), context)
    check(found, [torch.cat(shards[shmem.my_pe() % 2 :: 2]).double() @ b.double()], 16, torch.bfloat16)


def test_disjoint_teams_work_side_by_side(ranks):
    ranks(4).run(in_a_team)


def wrong_choices():
    for create in (create_gemm_reduce_scatter_context, create_gemm_allreduce_context):
        for M, dtype in ((8, torch.float32), (1, torch.bfloat16)):
            with pytest.raises(ValueError, match=rf"16-bit dtypes and a row or more .* 2 ranks, not {dtype} \[{M}, 8\]: leave"):
                create(M, 8, dtype, method="tma")
    for create in (create_allgather_gemm_context, create_gemm_reduce_scatter_context, create_gemm_allreduce_context):
        with pytest.raises(ValueError, match=rf"rank {shmem.my_pe()}: {create.__name__}: method is 'magic': give one of"):
            create(8, 8, torch.bfloat16, method="magic")
        with pytest.raises(ValueError, match="config and programs are for .*; the method sequence takes neither"):
            create(8, 8, torch.bfloat16, method="sequence", programs=2)


def test_a_wrong_method_is_refused_by_name(ranks):
    ranks(2).run(wrong_choices)
