"""Who and where, copies and single tiles: the words of language/rma.py, and the tile orders of language/swizzle.py."""

import torch
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

from .data import BLOCK, poisoned, symmetric, values, who

CASES = {}


def case(fn):
    """Registers the case of the word of this name."""
    CASES["dl." + fn.__name__] = fn
    return fn


@triton.jit
def rank_kernel(out, ctx):
    tl.store(out + tl.arange(0, 1), dl.rank(ctx))
    tl.store(out + 1 + tl.arange(0, 1), dl.num_ranks(ctx))


@case
def rank(seed):
    me, world, ctx, _, _ = who()
    out = poisoned(2, torch.int32)
    rank_kernel[(1,)](out, ctx)
    return [("rank, num_ranks", out, torch.tensor([me, world], dtype=torch.int32), 0)]


@triton.jit
def symm_at_kernel(x, out, n, ctx, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peer = tl.num_programs(0) - 1 - tl.program_id(0)  # each program another peer
    tl.store(out + i, tl.load(dl.symm_at(x, peer, ctx) + i, mask=i < n, other=0), mask=i < n)


@case
def symm_at(seed):
    me, world, ctx, _, _ = who()
    n, found = world * BLOCK - 5, []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64):
        x, out = symmetric(values(seed, me, n, dtype)), poisoned(n, dtype)
        shmem.barrier_all()
        symm_at_kernel[(world,)](x, out, n, ctx, BLOCK=BLOCK)
        blocks = [values(seed, world - 1 - p, n, dtype)[p * BLOCK : (p + 1) * BLOCK] for p in range(world)]
        found.append((str(dtype), out, torch.cat(blocks), 0))
    return found






@triton.jit
def symm_at_block_kernel(x, out, world, ctx, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    peer = i - i // world * world
    tl.store(out + i, tl.load(dl.symm_at(x + i, peer, ctx)))


def symm_at_block(seed):
    me, world, ctx, _, _ = who()
    found = []
    for dtype in (torch.float32, torch.int32):
        x, out = symmetric(values(seed, me, BLOCK, dtype)), poisoned(BLOCK, dtype)
        shmem.barrier_all()
        symm_at_block_kernel[(1,)](x, out, world, ctx, BLOCK=BLOCK)
        everything = torch.stack([values(seed, r, BLOCK, dtype) for r in range(world)])
        lanes = torch.arange(BLOCK)
        found.append((str(dtype), out, everything[lanes % world, lanes], 0))
    return found


CASES["dl.symm_at, a peer a lane"] = symm_at_block


@triton.jit
def put_kernel(dst, src, n, peer, ctx, BLOCK: tl.constexpr):
    dl.put(dst, src, n, peer, ctx, tl.program_id(0), tl.num_programs(0), BLOCK)


@triton.jit
def get_kernel(dst, src, n, peer, ctx, BLOCK: tl.constexpr):
    dl.get(dst, src, n, peer, ctx, tl.program_id(0), tl.num_programs(0), BLOCK)


COPIED = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int16, torch.int32, torch.int64)


@case
def put(seed):
    me, world, ctx, right, left = who()
    found = []
    for dtype in COPIED:
        n = 3 * BLOCK + 17
        dst = poisoned(n + 8, dtype, symmetric=True)
        past = dst[n:].clone()
        shmem.barrier_all()
        put_kernel[(3,)](dst, values(seed, me, n, dtype), n, right, ctx, BLOCK=BLOCK)
        shmem.barrier_all()
        found.append((str(dtype), dst, torch.cat([values(seed, left, n, dtype), past]), 0))
    return found


@case
def get(seed):
    me, world, ctx, right, left = who()
    found = []
    for dtype in COPIED:
        n = 2 * BLOCK + 1
        src, dst = symmetric(values(seed, me, n, dtype)), poisoned(n + 8, dtype)
        past = dst[n:].clone()
        shmem.barrier_all()
        get_kernel[(2,)](dst, src, n, left, ctx, BLOCK=BLOCK)
        found.append((str(dtype), dst, torch.cat([values(seed, left, n, dtype), past]), 0))
    return found


@triton.jit
def put_2d_kernel(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    dl.put_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx,
              tl.program_id(0), tl.num_programs(0), BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit
def get_2d_kernel(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    dl.get_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx,
              tl.program_id(0), tl.num_programs(0), BLOCK_M, BLOCK_N)  # fmt: skip


TILE = dict(BLOCK_M=4, BLOCK_N=32)


@case
def put_2d(seed):
    me, world, ctx, right, left = who()
    dst = poisoned((11, 90), torch.float16, symmetric=True)
    expected = dst.clone()
    expected[:, :77] = values(seed, left, (11, 80), torch.float16)[:, :77]
    shmem.barrier_all()
    put_2d_kernel[(3,)](dst, values(seed, me, (11, 80), torch.float16), 11, 77, 90, 80, right, ctx, **TILE)
    shmem.barrier_all()
    return [("11 x 77 of strides 80, 90", dst, expected, 0)]


@case
def get_2d(seed):
    me, world, ctx, right, left = who()
    src, dst = symmetric(values(seed, me, (9, 80), torch.float32)), poisoned((9, 64), torch.float32)
    shmem.barrier_all()
    get_2d_kernel[(2,)](dst, src, 9, 64, 64, 80, right, ctx, **TILE)
    return [("9 x 64 of stride 80", dst, values(seed, right, (9, 80), torch.float32)[:, :64], 0)]


@triton.jit
def remote_load_kernel(x, out, n, peer, ctx, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, dl.remote_load(x + i, peer, ctx, mask=i < n, other=-7.0))


@case
def remote_load(seed):
    me, world, ctx, right, left = who()
    x, out = symmetric(values(seed, me, BLOCK, torch.float16)), poisoned(BLOCK, torch.float16)
    shmem.barrier_all()
    remote_load_kernel[(1,)](x, out, 50, right, ctx, BLOCK=BLOCK)
    expected = values(seed, right, BLOCK, torch.float16)
    expected[50:] = -7
    return [("50 of 64 lanes, the rest -7", out, expected, 0)]


@triton.jit
def remote_store_kernel(x, out, n, peer, ctx, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    dl.remote_store(out + i, tl.load(x + i), peer, ctx, mask=i < n)


@case
def remote_store(seed):
    me, world, ctx, right, left = who()
    out = poisoned(BLOCK, torch.bfloat16, symmetric=True)
    expected = out.clone()
    expected[:50] = values(seed, left, BLOCK, torch.float32)[:50].bfloat16()
    shmem.barrier_all()
    remote_store_kernel[(1,)](values(seed, me, BLOCK, torch.float32), out, 50, right, ctx, BLOCK=BLOCK)
    shmem.barrier_all()
    return [("50 of 64 lanes of fp32 as bf16", out, expected, 0)]






@triton.jit
def tile_order_kernel(out, m, n, ctx):
    pid, lane = tl.program_id(0), tl.arange(0, 1)
    owner, i, j = dl.rank_first_tile(pid, m, n, dl.rank(ctx), dl.num_ranks(ctx), 2)
    tl.store(out + pid * 3 + lane, owner)
    tl.store(out + pid * 3 + 1 + lane, i)
    tl.store(out + pid * 3 + 2 + lane, j)


@case
def rank_first_tile(seed):
    me, world, ctx, _, _ = who()
    m, n = 3, 2
    out = poisoned((world * m * n, 3), torch.int32)
    tile_order_kernel[(world * m * n,)](out, m, n, ctx)
    within = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]  # two rows of tiles, column by column, then the third row
    expected = [((me + step) % world, i, j) for step in range(world) for i, j in within]
    return [("3 x 2 tiles a rank", out, torch.tensor(expected, dtype=torch.int32), 0)]
