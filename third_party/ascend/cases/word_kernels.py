"""A small kernel for each word of the device language: what `words.py` has lowered."""

import triton
import triton.language as tl

import triton_dist.language as dl

# -- memory


@triton.jit
def rank(out, ctx):
    tl.store(out + tl.arange(0, 1), dl.rank(ctx) * dl.num_ranks(ctx))


@triton.jit
def put(dst, src, n, peer, ctx, BLOCK: tl.constexpr):
    dl.put(dst, src, n, peer, ctx, tl.program_id(0), tl.num_programs(0), BLOCK)


@triton.jit
def get(dst, src, n, peer, ctx, BLOCK: tl.constexpr):
    dl.get(dst, src, n, peer, ctx, tl.program_id(0), tl.num_programs(0), BLOCK)


@triton.jit
def put_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx):
    dl.put_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, tl.program_id(0), tl.num_programs(0))


@triton.jit
def get_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx):
    dl.get_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, BLOCK_M=8, BLOCK_N=512)


@triton.jit
def remote_load(x, out, n, peer, ctx, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, dl.remote_load(x + i, peer, ctx, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def remote_store(x, out, n, peer, ctx, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dl.remote_store(out + i, tl.load(x + i, mask=i < n), peer, ctx, i < n)


@triton.jit
def symm_at_block_pointer(x, out, M, N, peer, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M
    here = tl.make_block_ptr(x, (M, N), (N, 1), (row, 0), (BLOCK_M, BLOCK_N), (1, 0))
    there = tl.make_block_ptr(dl.symm_at(out, peer, ctx), (M, N), (N, 1), (row, 0), (BLOCK_M, BLOCK_N), (1, 0))
    tl.store(there, tl.load(here, boundary_check=(0, 1)), boundary_check=(0, 1))


@triton.jit
def symm_at_peers(x, out, ctx, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)  # a peer a lane
    peers = i - i // dl.num_ranks(ctx) * dl.num_ranks(ctx)
    tl.store(dl.symm_at(out + i, peers, ctx), tl.load(x + i))


# -- signals


@triton.jit
def notify(x, sig, v, peer, ctx, OP: tl.constexpr):
    i = tl.arange(0, 1024)
    dl.remote_store(x + i, i, peer, ctx)
    dl.notify(sig, peer, ctx, v, OP)


@triton.jit
def notify_default(x, sig, peer, ctx):
    i = tl.arange(0, 1024)
    dl.remote_store(x + i, i, peer, ctx)
    dl.notify(sig, peer, ctx)


@triton.jit
def notify_all(x, sig, v, ctx, OP: tl.constexpr):
    i = tl.arange(0, 1024)
    tl.store(x + i, i)
    dl.notify_all(sig, ctx, v, OP)


@triton.jit
def put_signal(dst, src, sig, n, peer, ctx, OP: tl.constexpr):
    pid = tl.program_id(0)
    dl.put_signal(dst, src, n, sig, peer, ctx, op=OP, pid=pid, num_pids=tl.num_programs(0))


@triton.jit
def wait(x, out, sig, v, ctx, CMP: tl.constexpr):
    i = tl.arange(0, 1024)
    token = dl.wait(dl.signal_at(sig, 3), v, ctx, CMP)
    tl.store(out + i, tl.load(dl.consume_token(x, token) + i) + token)


@triton.jit
def wait_unused(x, out, sig, v, ctx):
    i = tl.arange(0, 1024)
    _ = dl.wait(sig, v, ctx)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def wait_in_if(x, out, sig, v, ctx):
    i = tl.arange(0, 1024)
    if tl.program_id(0) == 0:
        _ = dl.wait(sig, v, ctx)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def wait_many(x, out, sig, v, n, ctx):
    i = tl.arange(0, 1024)
    token = dl.wait(sig, v, ctx, n=n)
    token += dl.wait(sig, v, ctx, n=3)
    tl.store(out + i, tl.load(x + i) + token)


@triton.jit
def test(x, out, sig, v, ctx):
    i = tl.arange(0, 1024)
    if dl.test(sig, v, ctx):
        tl.store(out + i, tl.load(x + i))


@triton.jit
def fence(x, ctx):
    i = tl.arange(0, 1024)
    tl.store(x + i, i)
    dl.fence(ctx)
    tl.store(x + 1024 + i, i)


@triton.jit
def quiet(x, ctx):
    i = tl.arange(0, 1024)
    tl.store(x + i, i)
    dl.quiet(ctx)
    tl.store(x + 1024 + i, i)


@triton.jit
def fence_dot(a, b, c, sig, peer, ctx, K, BLOCK: tl.constexpr):
    m, k = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        acc = tl.dot(tl.load(a + m * K + start + k), tl.load(b + (start + m) * BLOCK + k), acc)
    dl.remote_store(c + m * BLOCK + k, acc, peer, ctx)
    dl.fence_dot(ctx)
    dl.notify(sig, peer, ctx, 1, "set")


# -- atomics: nothing uses the old value, which Ascend cannot give


@triton.jit
def atomic(p, v, peer, ctx, OP: tl.constexpr):
    i = tl.arange(0, 128)
    if OP == "add":
        dl.atomic_add(p + i, v, peer, ctx, mask=i < 100)
    elif OP == "max":
        dl.atomic_max(p + i, v, peer, ctx, mask=i < 100)
    elif OP == "min":
        dl.atomic_min(p + i, v, peer, ctx, mask=i < 100)
    else:
        dl.atomic_xchg(p + i, v, peer, ctx, mask=i < 100)


@triton.jit
def atomic_scalar(p, v, peer, ctx, OP: tl.constexpr):
    if OP == "add":
        dl.atomic_add(p, v, peer, ctx)
    elif OP == "max":
        dl.atomic_max(p, v, peer, ctx)
    else:
        dl.atomic_min(p, v, peer, ctx)


@triton.jit
def atomic_old(p, out, v, peer, ctx):
    i = tl.arange(0, 128)
    tl.store(out + i, dl.atomic_add(p + i, v, peer, ctx))


@triton.jit
def atomic_cas(p, v, peer, ctx):
    dl.atomic_cas(p, 0, v, peer, ctx)


# -- barriers and tile order


@triton.jit
def barrier_all(sig, ctx):
    for _ in range(3):
        dl.barrier_all(sig, ctx)


@triton.jit
def barrier_clear(sig, ctx):
    dl.barrier_clear(sig, ctx)


@triton.jit
def barrier_grid(sig, ctx):
    dl.barrier_grid(sig, ctx)


@triton.jit
def tile_order(out, m, n, ctx):
    owner, i, j = dl.rank_first_tile(tl.program_id(0), m, n, dl.rank(ctx), dl.num_ranks(ctx), 4)
    lane = tl.arange(0, 1)
    tl.store(out + lane, owner)
    tl.store(out + 1 + lane, i)
    tl.store(out + 2 + lane, j)


# -- what must be refused


@triton.jit
def notify_unknown(sig, ctx):
    dl.notify(sig, 1, ctx, op="sub")


@triton.jit
def wait_unknown(sig, ctx):
    _ = dl.wait(sig, 1, ctx, cmp="above")


@triton.jit
def store_relaxed(x, ctx):
    dl.remote_store(x + tl.arange(0, 64), 0, 1, ctx, sem="relaxed")


@triton.jit
def notify_plain(sig, ctx, OP: tl.constexpr):
    dl.notify(sig, 1, ctx, 1, OP)


@triton.jit
def wait_plain(sig, ctx):
    _ = dl.wait(sig, 1, ctx)
