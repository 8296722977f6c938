"""symm_at: the peer's copy of any address of this rank: scalars, blocks, block pointers, descriptors, views, far offsets."""

import zlib

import pytest
import torch
import triton_dist
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

pytestmark = pytest.mark.dist

POISON = 0xA5  # every byte of an output before the kernel
ON_ASCEND = triton_dist.backend == "ascend"
DTYPES = (torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)


def bits(shape, dtype, *seed):
    """Random bits as a host tensor; the same on every rank for the same seed."""
    count = dtype.itemsize * torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def as_bytes(tensor):
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def same(a, b):
    return torch.equal(as_bytes(a), as_bytes(b))


def symmetric(shape, dtype, fill=None):
    tensor = shmem.aclshmem_create_tensor(shape, dtype)
    if fill is None:
        tensor.view(-1).view(torch.uint8).fill_(POISON)
    else:
        tensor.copy_(fill)
    return tensor


def local(shape, dtype):
    tensor = torch.empty(shape, dtype=dtype, device=shmem.device())
    tensor.view(-1).view(torch.uint8).fill_(POISON)
    return tensor


def error_of(launch):
    """The exceptions that a launch raised, outermost first; [] when it raised none."""
    try:
        launch()
    except Exception as error:
        chain = []
        while error:
            chain.append(error)
            error = error.__cause__ or error.__context__
        return chain
    return []


# -- scalars and blocks


@triton.jit
def ring_push(dst, src, sig, out, ctx, LANES: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right = dl.owner_first(1, me, world)
    lanes = tl.arange(0, LANES)
    tl.store(dl.symm_at(dst + lanes, right, ctx), tl.load(src + lanes))
    dl.notify(sig, right, ctx, 1)
    token = dl.wait(sig, 1, ctx)
    tl.store(out + lanes, tl.load(dl.consume_token(dst, token) + lanes))


def ring():
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    for dtype in DTYPES:
        dst, sig, out = symmetric((512,), dtype), shmem.create_signals(1), local((512,), dtype)
        src = bits((512,), dtype, "ring", me).to(dst.device)
        shmem.barrier_all()
        ring_push[(1,)](dst, src, sig, out, ctx, LANES=512)
        assert same(out, bits((512,), dtype, "ring", (me - 1) % world)), dtype


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_block_stored_at_the_right_neighbour_arrives_for_every_item_size(ranks, world):
    ranks(world).run(ring)


@triton.jit
def scalar_pairs(cells, pushed, pulled, ctx):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    for peer in range(0, world):  # me == peer included
        tl.store(dl.symm_at(pushed + me, peer, ctx), me * 100 + peer)
        tl.store(pulled + peer, tl.load(dl.symm_at(cells + me, peer, ctx)))


def all_pairs():
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    for dtype in (torch.int32, torch.int64, torch.float32, torch.int16):
        table = (torch.arange(world)[:, None] * 10 + torch.arange(world)).to(dtype)  # rank x index
        cells, pushed = symmetric((world,), dtype, table[me]), symmetric((world,), dtype)
        pulled = local((world,), dtype)
        shmem.barrier_all()
        scalar_pairs[(1,)](cells, pushed, pulled, ctx)
        shmem.barrier_all()
        assert pushed.cpu().tolist() == [rank * 100 + me for rank in range(world)]
        assert pulled.cpu().tolist() == table[:, me].tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_scalar_pointer_reaches_every_peer_and_oneself(ranks, world):
    ranks(world).run(all_pairs)


@triton.jit
def copy_region(
    dst, src, rows, cols, dst_stride, src_stride, peer, ctx, PULL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(cols, BN)
    tile = pid
    while tile < tl.cdiv(rows, BM) * tiles_n:
        m = (tile // tiles_n) * BM + tl.arange(0, BM)[:, None]
        n = (tile - tile // tiles_n * tiles_n) * BN + tl.arange(0, BN)[None, :]
        inside = (m < rows) & (n < cols)
        to, of = dst + m * dst_stride + n, src + m * src_stride + n
        if PULL:
            tl.store(to, tl.load(dl.symm_at(of, peer, ctx), mask=inside), mask=inside)
        else:
            tl.store(dl.symm_at(to, peer, ctx), tl.load(of, mask=inside), mask=inside)
        tile += tl.num_programs(0)


REGIONS = [(1, 1), (5, 7), (16, 32), (17, 31), (33, 65), (64, 100)]


def ragged_regions():
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    left, right = (me - 1) % world, (me + 1) % world
    for dtype in (torch.float16, torch.int8, torch.int64):
        for rows, cols in REGIONS:
            for pull in (False, True):
                stride, seed = cols + 5, ("region", dtype.itemsize, rows, cols, pull)
                far = symmetric((rows + 2, stride), dtype, bits((rows + 2, stride), dtype, *seed, me))
                near = local((rows + 2, stride), dtype)
                if not pull:
                    near.copy_(far)
                    far.view(-1).view(torch.uint8).fill_(POISON)
                shmem.barrier_all()
                dst, src = (near, far) if pull else (far, near)
                copy_region[(3,)](dst, src, rows, cols, stride, stride, right, ctx, PULL=pull, BM=16, BN=32)
                shmem.barrier_all()
                want = torch.full((rows + 2, stride), 0, dtype=dtype)
                want.view(-1).view(torch.uint8).fill_(POISON)
                source = bits((rows + 2, stride), dtype, *seed, right if pull else left)
                want[:rows, :cols] = source[:rows, :cols]
                assert same(dst, want), f"{dtype}, {rows} x {cols}, pull={pull}"
                shmem.aclshmem_free_tensor(far)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_masked_blocks_move_ragged_regions_and_nothing_beside_them(ranks, world):
    ranks(world).run(ragged_regions)


@triton.jit
def commute(x, out, peer, ctx, offset, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    rows = tl.arange(0, 4)[:, None]
    tl.store(out + lanes, tl.load(dl.symm_at(x, peer, ctx) + offset + lanes))  # scalar, then all arithmetic
    tl.store(out + LANES + lanes, tl.load(dl.symm_at(x + offset, peer, ctx) + lanes))
    tl.store(out + 2 * LANES + lanes, tl.load(dl.symm_at(x + offset + lanes, peer, ctx)))  # a block
    tl.store(out + 3 * LANES + lanes, tl.load(dl.symm_at(x + lanes, peer, ctx) + offset))
    tl.store(out + 4 * LANES + lanes, tl.load(dl.symm_at(x + 2 * offset + lanes, peer, ctx) - offset))  # back again
    there_and_back = dl.symm_at(dl.symm_at(x + offset + lanes, dl.rank(ctx), ctx), peer, ctx)
    tl.store(out + 5 * LANES + lanes, tl.load(there_and_back))
    tile = dl.symm_at(x + offset + rows * (LANES // 4) + tl.arange(0, LANES // 4)[None, :], peer, ctx)  # 2-D
    tl.store(out + 6 * LANES + rows * (LANES // 4) + tl.arange(0, LANES // 4)[None, :], tl.load(tile))


def arithmetic_commutes():
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    for dtype in DTYPES:
        for offset in (0, 1, 3, 64, 200):
            seed = ("commute", dtype.itemsize, offset)
            x, out = symmetric((1024,), dtype, bits((1024,), dtype, *seed, me)), local((7, 64), dtype)
            shmem.barrier_all()
            for peer in range(world):
                commute[(1,)](x, out, peer, ctx, offset, LANES=64)
                want = bits((1024,), dtype, *seed, peer)[offset : offset + 64]
                for row in range(7):
                    assert same(out[row], want), f"{dtype}, offset {offset}, peer {peer}, form {row}"
            shmem.aclshmem_free_tensor(x)


@pytest.mark.parametrize("world", [1, 2])
def test_pointer_arithmetic_commutes_with_symm_at(ranks, world):
    ranks(world).run(arithmetic_commutes)


@triton.jit
def copy_strided(out, x, rows, cols, stride_m, stride_n, peer, ctx, BLOCK: tl.constexpr):
    m, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (m < rows) & (n < cols)
    value = tl.load(dl.symm_at(x + m * stride_m + n * stride_n, peer, ctx), mask=inside)
    tl.store(out + m * cols + n, value, mask=inside)


VIEWS = {
    "slice": lambda x: x[3:19, 5:21],
    "steps": lambda x: x[1::3, 2::2],
    "transposed": lambda x: x.t()[4:12, :16],
    "row": lambda x: x[7:8],
    "column": lambda x: x[:, 9:10],
    "element": lambda x: x[11:12, 13:14],
    "diagonal": lambda x: x.as_strided((16, 2), (33, 1), x.storage_offset() + 17),
}


def views():
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.int64):
        x = symmetric((32, 32), dtype, bits((32, 32), dtype, "views", dtype.itemsize, me))
        shmem.barrier_all()
        for name, view in VIEWS.items():
            mine = view(x)
            for peer in range(world):
                out = local(mine.shape, dtype)
                copy_strided[(1,)](out, mine, *mine.shape, *mine.stride(), peer, ctx, BLOCK=32)
                want = view(bits((32, 32), dtype, "views", dtype.itemsize, peer))
                assert same(out, want), f"{dtype}, {name}, peer {peer}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_views_with_offsets_and_strides_name_the_same_elements_at_the_peer(ranks, world):
    ranks(world).run(views)


# -- block pointers and descriptors


@triton.jit
def by_block_pointer(out, x, rows, cols, peer, ctx, BM: tl.constexpr, BN: tl.constexpr):
    there = tl.make_block_ptr(dl.symm_at(x, peer, ctx), (rows, cols), (cols, 1), (0, 0), (BM, BN), (1, 0))
    here = tl.make_block_ptr(out, (rows, cols), (cols, 1), (0, 0), (BM, BN), (1, 0))
    for _tile in range(0, tl.cdiv(cols, BN)):
        tl.store(here, tl.load(there, boundary_check=(0, 1)), boundary_check=(0, 1))
        there = tl.advance(there, (0, BN))
        here = tl.advance(here, (0, BN))


def block_pointers():
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    available = True
    for rows, cols in ((16, 32), (13, 32), (9, 75), (1, 5)):
        seed = ("block pointer", rows, cols)
        x, out = symmetric((rows, cols), torch.float32, bits((rows, cols), torch.float32, *seed, me)), None
        shmem.barrier_all()
        for peer in range(world):
            out = local((rows, cols), torch.float32)
            chain = error_of(lambda: by_block_pointer[(1,)](out, x, rows, cols, peer, ctx, BM=16, BN=32))  # noqa: B023
            if chain:
                missing = [str(error) for error in chain if isinstance(error, NotImplementedError)]
                assert any("Block pointers have been removed" in text for text in missing), chain
                available = False
            else:
                assert same(out, bits((rows, cols), torch.float32, *seed, peer)), f"{rows} x {cols}, peer {peer}"
    return available


def test_block_pointers_work_at_a_peer_unless_this_triton_has_none(ranks):
    answers = ranks(2).run(block_pointers)
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert len(set(answers)) == 1
    assert answers[0] or version > (3, 6), "Triton up to 3.6 has block pointers"


@triton.jit
def descriptor_pull(out, x, sig, rows, cols, ctx, BM: tl.constexpr, BN: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    left = dl.owner_first(world - 1, me, world)
    dl.notify(sig, dl.owner_first(1, me, world), ctx, 1)
    _ = dl.wait(sig, 1, ctx)
    there = tl.make_tensor_descriptor(dl.symm_at(x, left, ctx), [rows, cols], [cols, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    tile = there.load([m, n])
    r, c = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    width = tl.num_programs(1) * BN
    tl.store(out + (m + r) * width + n + c, tile)


@triton.jit
def descriptor_push(dst, src, sig, out, rows, cols, ctx, BM: tl.constexpr, BN: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right = dl.owner_first(1, me, world)
    there = tl.make_tensor_descriptor(dl.symm_at(dst, right, ctx), [rows, cols], [cols, 1], [BM, BN])
    here = tl.make_tensor_descriptor(src, [rows, cols], [cols, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    there.store([m, n], here.load([m, n]))
    dl.notify(sig, right, ctx, 1, "add")
    token = dl.wait(sig, tl.num_programs(0) * tl.num_programs(1), ctx)
    r, c = m + tl.arange(0, BM)[:, None], n + tl.arange(0, BN)[None, :]
    inside = (r < rows) & (c < cols)
    at = r * cols + c
    tl.store(out + at, tl.load(dl.consume_token(dst, token) + at, mask=inside), mask=inside)


def descriptors():
    me, world, ctx, device = shmem.my_pe(), shmem.pe_count(), shmem.context(), shmem.device()
    if device.type != "cpu":
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    left, bm, bn = (me - 1) % world, 16, 32
    for dtype in (torch.float16, torch.float32, torch.int32):
        for rows, cols in ((16, 32), (32, 64), (20, 48), (5, 8)):  # rows of a multiple of 16 bytes, tiles ragged
            seed, grid = ("descriptor", dtype.itemsize, rows, cols), (-(-rows // bm), -(-cols // bn))
            want = bits((rows, cols), dtype, *seed, left)
            x = symmetric((rows, cols), dtype, bits((rows, cols), dtype, *seed, me))
            sig, out = shmem.create_signals(1), local((grid[0] * bm, grid[1] * bn), dtype)
            shmem.barrier_all()
            descriptor_pull[grid](out, x, sig, rows, cols, ctx, BM=bm, BN=bn)
            full = torch.zeros(out.shape, dtype=dtype)
            full[:rows, :cols] = want
            assert same(out, full), f"load, {dtype}, {rows} x {cols}: outside of the tensor a descriptor gives zeros"
            dst, sig, out = symmetric((rows + 1, cols), dtype), shmem.create_signals(1), local((rows, cols), dtype)
            shmem.barrier_all()
            descriptor_push[grid](dst, x, sig, out, rows, cols, ctx, BM=bm, BN=bn)
            shmem.barrier_all()
            assert same(out, want) and same(dst[:rows], want), f"store, {dtype}, {rows} x {cols}"
            assert (as_bytes(dst[rows]) == POISON).all(), "nothing was stored outside of the tensor"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensor_descriptors_load_and_store_ragged_tiles_at_a_peer(ranks, world):
    if ON_ASCEND and not hasattr(tl, "make_tensor_descriptor"):
        pytest.skip(f"Triton {triton.__version__} has no tensor descriptors")
    ranks(world).run(descriptors)


# -- far offsets, teams


@triton.jit
def far_elements(x, out, offsets, count, peer, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    for i in range(0, count):
        offset = tl.load(offsets + i)
        tl.store(dl.symm_at(x + offset + lanes, peer, ctx), (dl.rank(ctx) + i + lanes).to(tl.int8))
        tl.store(out + i * LANES + lanes, tl.load(dl.symm_at(x, peer, ctx) + offset + lanes))


@triton.jit
def far_argument(x, out, offset, peer, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(out + lanes, tl.load(dl.symm_at(x + lanes, peer, ctx) + offset))


def far_offsets():
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    size, lanes = (2 << 30) + (64 << 20), 64
    x = shmem.aclshmem_create_tensor((size,), torch.int8)
    near = [0, 4096]
    offsets = near + [2**31 - 32, 2**31 - 1, 2**31, 2**31 + 12345, size - lanes]  # the block spans 2**31 in two
    spots = [offset for offset in offsets if offset != 2**31 - 1 and offset != 2**31]  # the others overlap
    at = torch.tensor(spots, dtype=torch.int64, device=x.device)
    for offset in spots:
        x[offset : offset + lanes] = -1
    shmem.barrier_all()
    right, left = (me + 1) % world, (me - 1) % world
    out = local((len(spots), lanes), torch.int8)
    far_elements[(1,)](x, out, at, len(spots), right, ctx, LANES=lanes)
    shmem.barrier_all()
    for i, offset in enumerate(spots):
        ramp = torch.arange(lanes) + i
        assert torch.equal(out[i].cpu(), (ramp + me).to(torch.int8)), f"read back at {offset}"
        assert torch.equal(x[offset : offset + lanes].cpu(), (ramp + left).to(torch.int8)), f"stored at {offset}"
    shmem.barrier_all()
    for offset in (2**31 - 1, 2**31, 2**31 + 12345):  # as an int32 or int64 argument
        mine = bits((lanes,), torch.int8, "far", offset, me)
        x[offset : offset + lanes] = mine.to(x.device)
        shmem.barrier_all()
        far_argument[(1,)](x, out[0], offset, right, ctx, LANES=lanes)
        assert same(out[0], bits((lanes,), torch.int8, "far", offset, right)), f"argument {offset}"
        shmem.barrier_all()


def test_offsets_beyond_two_to_the_31_elements_reach_the_right_place(ranks):
    ranks(2).run(far_offsets, heap_bytes=3 << 30)


@triton.jit
def gather_team(cells, out, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    for peer in range(0, dl.num_ranks(ctx)):
        tl.store(out + peer * LANES + lanes, tl.load(dl.symm_at(cells + lanes, peer, ctx)))


def team_members():
    """{team: world ranks whose data this rank finds at team ranks 0, 1, ...}"""
    row, column = shmem.team_split_2d(0, 2)
    teams = {"world": 0, "odd": shmem.team_split_strided(0, 1, 2, 2), "tail": shmem.team_split_strided(0, 1, 1, 3)}
    teams |= {"row": row, "column": column}
    cells = symmetric((32,), torch.int32, torch.arange(32, dtype=torch.int32) + 1000 * shmem.my_pe())
    shmem.barrier_all()
    found = {}
    for name, team in teams.items():
        if team != -1:
            out = local((shmem.team_n_pes(team), 32), torch.int32)
            gather_team[(1,)](cells, out, shmem.context(team), LANES=32)
            seen = out.cpu()
            assert torch.equal(seen - seen[:, :1], torch.arange(32, dtype=torch.int32).expand_as(seen))
            found[name] = [value // 1000 for value in seen[:, 0].tolist()]
    shmem.barrier_all()
    return found


def test_peers_are_team_ranks_of_the_context(ranks):
    answers = ranks(4).run(team_members)
    teams = {"world": [[0, 1, 2, 3]], "odd": [[1, 3]], "tail": [[1, 2, 3]], "row": [[0, 1], [2, 3]], "column": [[0, 2], [1, 3]]}
    for rank, answer in enumerate(answers):
        assert answer == {name: group for name, groups in teams.items() for group in groups if rank in group}


# -- what cannot be


@triton.jit
def reach(x, out, peer, ctx):
    tl.store(out, tl.load(dl.symm_at(x, peer, ctx)))


def peers_and_pointers_that_are_wrong():
    ctx, world = shmem.context(), shmem.pe_count()
    x, out = symmetric((16,), torch.int32), local((1,), torch.int32)
    before = out.cpu().clone()
    for peer in (world, -1, 1000):
        text = str(error_of(lambda: reach[(1,)](x, out, peer, ctx)))  # noqa: B023
        assert f"peer {peer} is out of range" in text and f"{world} ranks" in text, text
    text = str(error_of(lambda: reach[(1,)](torch.zeros(16, dtype=torch.int32), out, 0, ctx)))
    assert f"is not in rank {shmem.my_pe()}'s symmetric heap" in text, text
    theirs = shmem.peer_tensor(x, (shmem.my_pe() + 1) % world)
    text = str(error_of(lambda: reach[(1,)](theirs, out, 0, ctx)))
    assert f"is not in rank {shmem.my_pe()}'s symmetric heap" in text, text
    shmem.aclshmem_free_tensor(x)
    text = str(error_of(lambda: reach[(1,)](x, out, 0, ctx)))
    assert "freed" in text and "int32[16]" in text, text
    assert same(out, before)


def test_the_interpreter_names_a_wrong_peer_and_an_address_that_is_not_symmetric(ranks):
    if not triton_dist.interpreted:
        pytest.skip("compiled kernels check neither (debug=True checks the peer)")
    ranks(2).run(peers_and_pointers_that_are_wrong)


@triton.jit
def one_lane_from_every_peer(x, out, world, ctx, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    peer = tl.minimum(lane, world - 1)
    tl.store(out + lane, tl.load(dl.symm_at(x + lane, peer, ctx)))


def lanes_of_all_peers():
    world, me = shmem.pe_count(), shmem.my_pe()
    x = shmem.aclshmem_create_tensor((8,), torch.int32)
    x.copy_(torch.arange(8, dtype=torch.int32) + 100 * me)
    shmem.barrier_all()
    out = torch.full((8,), -1, dtype=torch.int32, device=shmem.device())
    one_lane_from_every_peer[(1,)](x, out, world, shmem.context(), LANES=8)
    shmem.barrier_all()
    return out.cpu().tolist()


@pytest.mark.parametrize("world", [2, 3])
def test_a_block_of_peers_takes_each_lane_from_its_own(ranks, world):
    expected = [100 * min(lane, world - 1) + lane for lane in range(8)]
    assert ranks(world).run(lanes_of_all_peers) == [expected] * world
