"""Kernels that the Ascend compiler gets right, kernels that it gets wrong, and kernels that are wrong themselves: what the
meaning checks must accept and reject. Read with triton-ascend, in the toolchain's environment; `CASES` is built by the
tests from the signatures here.
"""

import triton
import triton.language as tl

import triton_dist.language as dl

# -- right


@triton.jit
def put_then_set(dst, src, sig, n, peer, other, ctx):
    dl.put(dst, src, n, peer, ctx)
    dl.notify(sig, peer, ctx, n)


@triton.jit
def put_then_add(dst, src, sig, n, peer, ctx):
    dl.put(dst, src, n, peer, ctx)
    dl.notify(sig, peer, ctx, 1, "add")


@triton.jit
def wait_then_read(x, sig, v, out, ctx):
    i = tl.arange(0, 256)
    token = dl.wait(sig, v, ctx)
    tl.store(out + i, tl.load(dl.consume_token(x, token) + i))


@triton.jit
def wait_for_many(x, sig, v, n, out, ctx):
    i = tl.arange(0, 256)
    token = dl.wait(sig, v, ctx, "ge", n)
    again = dl.wait(dl.signal_at(sig, 9), v, ctx, "eq")
    tl.store(out + i, tl.load(x + i) + token + again)


@triton.jit
def read_peer(x, out, peer, ctx):
    i = tl.arange(0, 256)
    tl.store(out + i, dl.remote_load(x + i, peer, ctx))


@triton.jit
def read_own(x, out, peer, ctx):
    i = tl.arange(0, 256)
    tl.store(out + i, tl.load(x + i) + (dl.rank(ctx) - peer).to(tl.float16))


@triton.jit
def _product(a, b, N, K, pm, pn, BLOCK: tl.constexpr):
    m, n, k = pm * BLOCK + tl.arange(0, BLOCK), pn * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(a + m[:, None] * K + (start + k)[None, :])
        y = tl.load(b + (start + k)[:, None] * N + n[None, :])
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def _tile(a, b, c, N, K, t, BLOCK: tl.constexpr):
    across = tl.cdiv(N, BLOCK)
    pm, pn = t // across, t - t // across * across
    acc = _product(a, b, N, K, pm, pn, BLOCK)
    m, n = pm * BLOCK + tl.arange(0, BLOCK), pn * BLOCK + tl.arange(0, BLOCK)
    tl.store(c + m[:, None] * N + n[None, :], acc.to(tl.float16))


@triton.jit
def gemm_then_set(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    while t < tiles:
        _tile(a, b, c, N, K, t, BLOCK)
        dl.fence_dot(ctx)
        dl.notify(dl.signal_at(sig, t), peer, ctx, t)
        t += tl.num_programs(0)


@triton.jit
def wait_then_gemm(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    while t < tiles:
        token = dl.wait(dl.signal_at(sig, t), 1, ctx)
        _tile(dl.consume_token(a, token), b, c, N, K, t, BLOCK)
        t += tl.num_programs(0)


@triton.jit
def counts_then_set(count, sig, n, peer, ctx):
    lanes, lane = tl.arange(0, 16), tl.arange(0, 1)
    tl.store(dl.symm_at(count, peer, ctx) + lane, n + tl.zeros((1,), tl.int32))
    tl.store(dl.symm_at(count, peer, ctx) + 1 + lane, 2 * n + tl.zeros((1,), tl.int32))
    tl.store(dl.symm_at(count, peer, ctx) + 16 + lanes, n + lanes)
    dl.notify(sig, peer, ctx)


@triton.jit
def update_a_range_of_lanes(x, out, peer, ctx):
    i = tl.arange(0, 256)
    inside = (i >= peer) & (i < 100)
    old, new = tl.load(out + i, mask=inside, other=0.0), tl.load(x + i, mask=inside, other=0.0)
    tl.store(out + i, tl.where(new > old, new, old), mask=inside)


@triton.jit
def address_as_integer_then_offset(dst, src, bases, peer):
    i = tl.arange(0, 64)
    there = (dst.to(tl.int64) + tl.load(bases + 8 + peer)).to(tl.pointer_type(tl.float16))
    tl.store(there + peer * 64 + i, tl.load(src + i))


# -- wrong: what the author forgot


@triton.jit
def put_then_atomic_without_barrier(dst, src, sig, n, peer, ctx):
    dl.put(dst, src, n, peer, ctx)
    tl.atomic_add(dl.symm_at(sig, peer, ctx), 1, sem="release", scope="sys")


@triton.jit
def put_then_store_without_barrier(dst, src, sig, n, peer, ctx):
    dl.put(dst, src, n, peer, ctx)
    tl.store(dl.symm_at(sig, peer, ctx) + tl.arange(0, 1), tl.full((1,), 1, tl.int32))


@triton.jit
def put_then_add_relaxed_without_barrier(dst, src, sig, n, peer, ctx):
    i = tl.arange(0, 64)
    tl.store(dl.symm_at(dst, peer, ctx) + i, tl.load(src + i))
    tl.atomic_add(dl.symm_at(sig, peer, ctx), 1, sem="relaxed", scope="sys")


@triton.jit
def put_then_set_eight_without_barrier(dst, src, sig, n, peer, ctx):
    dl.put(dst, src, n, peer, ctx)
    tl.store(dl.symm_at(sig, peer, ctx) + tl.arange(0, 8) * 16, tl.full((8,), 1, tl.int32))


@triton.jit
def count_then_set_without_barrier(count, sig, n, peer, ctx):
    lane = tl.arange(0, 1)
    tl.store(dl.symm_at(count, peer, ctx) + lane, n + tl.zeros((1,), tl.int32))
    tl.store(dl.symm_at(sig, peer, ctx) + lane, tl.full((1,), 1, tl.int32))


@triton.jit
def barrier_on_one_path(dst, src, sig, n, peer, ctx):
    dl.put(dst, src, n, peer, ctx)
    if n > 100:
        tl.debug_barrier()
    tl.atomic_add(dl.symm_at(sig, peer, ctx), 1, sem="release", scope="sys")


@triton.jit
def barrier_before_the_last_turn(dst, src, sig, n, peer, ctx):
    i = tl.arange(0, 64)
    for turn in range(0, n):
        tl.debug_barrier()
        tl.store(dl.symm_at(dst, peer, ctx) + turn * 64 + i, tl.load(src + turn * 64 + i))
    tl.atomic_add(dl.symm_at(sig, peer, ctx), 1, sem="release", scope="sys")


@triton.jit
def gemm_then_set_unfenced(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    while t < tiles:
        _tile(a, b, c, N, K, t, BLOCK)
        dl.notify(dl.signal_at(sig, t), peer, ctx, t)
        t += tl.num_programs(0)


@triton.jit
def gemm_then_set_sixteen(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    _tile(a, b, c, N, K, tl.program_id(0), BLOCK)
    tl.store(dl.symm_at(sig, peer, ctx) + tl.arange(0, 16) * 16, tl.full((16,), 1, tl.int32))


@triton.jit
def gemm_then_add(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    while t < tiles:
        _tile(a, b, c, N, K, t, BLOCK)
        dl.fence_dot(ctx)
        dl.notify(sig, peer, ctx, 1, "add")
        t += tl.num_programs(0)


# -- what the compiler gets wrong


@triton.jit
def spin_on_a_scalar(sig, v, out):
    while tl.load(sig, volatile=True) < v:
        pass
    tl.store(out, v)


@triton.jit
def spin_on_a_scalar_with_barrier(sig, v, out):
    while tl.load(sig, volatile=True) < v:
        tl.debug_barrier()
    tl.store(out, v)


@triton.jit
def spin_on_an_atomic(sig, v, out):
    while tl.atomic_add(sig, 0, sem="acquire", scope="sys") < v:
        pass
    tl.store(out, v)


@triton.jit
def bare_wait_in_an_if(x, sig, v, out, ctx):
    i = tl.arange(0, 256)
    if v > 0:
        dl.wait(sig, v, ctx)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def wait_then_gemm_in_a_for(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    for i in range(1, dl.num_ranks(ctx)):
        token = dl.wait(dl.signal_at(sig, i * tiles), 1, ctx, "ge", tl.num_programs(0))
        t = tl.program_id(0)
        while t < tiles:
            _tile(dl.consume_token(a, token) + i * N * K, b, c + i * N * N, N, K, t, BLOCK)
            t += tl.num_programs(0)


@triton.jit
def gemm_then_set_in_a_for(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _tile(a, b, c, N, K, t, BLOCK)
        dl.fence_dot(ctx)
        dl.notify(dl.signal_at(sig, t), peer, ctx, t)


@triton.jit
def gemm_with_a_flag_of_the_compiler(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    while t < tiles:
        token = dl.wait(dl.signal_at(sig, t), 1, ctx)
        _tile(dl.consume_token(a, token), b, c, N, K, t, BLOCK)
        tl.sync_block_set("cube", "vector", 1)
        tl.sync_block_wait("cube", "vector", 1)
        dl.notify(dl.signal_at(sig, t), peer, ctx, t)
        t += tl.num_programs(0)


@triton.jit
def add_a_product(a, b, c, sig, tiles, N, K, peer, ctx, BLOCK: tl.constexpr):
    acc = _product(a, b, N, K, 0, tl.program_id(0), BLOCK)
    m, n = tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def store_every_third_lane(x, out, peer, ctx):
    i = tl.arange(0, 256)
    dl.remote_store(out + i, tl.load(x + i), peer, ctx, mask=i - i // 3 * 3 == 0)


@triton.jit
def store_every_third_lane_here(x, out, peer, ctx):
    i = tl.arange(0, 256)
    tl.store(out + i, tl.load(x + i), mask=i - i // 3 * 3 == 0)


@triton.jit
def update_every_third_lane(x, out, peer, ctx):
    i = tl.arange(0, 256)
    tl.store(out + i, tl.load(out + i) + 1, mask=i - i // 3 * 3 == 0)


@triton.jit
def update_lanes_that_another_tensor_names(x, out, peer, ctx):
    i = tl.arange(0, 256)
    named = tl.load(x + i) > 0
    tl.store(out + i, tl.load(out + i, mask=named, other=0.0) + 1, mask=named)


@triton.jit
def store_a_range_of_lanes(x, out, peer, ctx):
    i = tl.arange(0, 256)
    inside = (i >= peer) & (i < 100)
    tl.store(out + i, tl.load(x + i, mask=inside), mask=inside)


@triton.jit
def exchange_a_scalar(p, v):
    tl.atomic_xchg(p, v, sem="release", scope="sys")


@triton.jit
def compare_and_swap(p, v, out):
    tl.store(out, tl.atomic_cas(p, 0, v, sem="acq_rel", scope="sys"))


@triton.jit
def add_and_use_the_old_value(p, v, out):
    tl.store(out, tl.atomic_add(p, v, sem="acq_rel", scope="sys"))


@triton.jit
def add(p, v):
    tl.atomic_add(p, v, sem="release", scope="sys")


@triton.jit
def bitwise_or(p, v):
    tl.atomic_or(p, v, sem="release", scope="sys")


@triton.jit
def block_of_integers_as_pointers(dst, src, bases, peer):
    i = tl.arange(0, 64)
    moved = (dst + i).to(tl.int64) + tl.load(bases + peer)
    tl.store(moved.to(tl.pointer_type(tl.float16)), tl.load(src + i))


@triton.jit
def offset_then_address_as_integer(dst, src, bases, peer):
    i = tl.arange(0, 64)
    there = ((dst + peer * 64).to(tl.int64) + tl.load(bases + 8 + peer)).to(tl.pointer_type(tl.float16))
    tl.store(there + i, tl.load(src + i))


@triton.jit
def bare_atomic_in_an_if(p, v, peer, ctx):
    if v > 0:
        dl.atomic_add(p, v, peer, ctx)


@triton.jit
def block_pointer_on_an_integer(dst, src, bases, peer):
    base = (dst.to(tl.int64) + tl.load(bases + peer)).to(tl.pointer_type(tl.float16))
    here = tl.make_block_ptr(src, (64, 64), (64, 1), (0, 0), (32, 32), (1, 0))
    there = tl.make_block_ptr(base, (64, 64), (64, 1), (0, 0), (32, 32), (1, 0))
    tl.store(there, tl.load(here, boundary_check=(0, 1)), boundary_check=(0, 1))


@triton.jit
def pointer_chosen_in_an_if(x, y, out, n):
    i = tl.arange(0, 64)
    here = x
    if n > 0:
        here = y
    tl.store(out + i, tl.load(here + i))
