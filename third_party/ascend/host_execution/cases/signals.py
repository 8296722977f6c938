"""The words of language/signal.py. Data comes from a peer that a rank waits for inside the kernel."""

import torch
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

from .data import BLOCK, poisoned, values, who

CASES = {}


def case(fn):
    """Registers the case of the word of this name."""
    CASES["dl." + fn.__name__] = fn
    return fn


@triton.jit
def ring_kernel(x, inbox, out, sig, value, n, peer, ctx, OP: tl.constexpr, CMP: tl.constexpr, BLOCK: tl.constexpr):
    dl.put(inbox, x, n, peer, ctx, 0, 1, BLOCK)
    dl.notify(dl.signal_at(sig, 2), peer, ctx, value, OP)
    token = dl.wait(dl.signal_at(sig, 2), value, ctx, CMP)
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(dl.consume_token(inbox, token) + i, mask=i < n, other=0) + token, mask=i < n)


def ring(seed, op, compare, value, dtype=torch.int32):
    me, world, ctx, right, left = who()
    inbox, out = poisoned(BLOCK, torch.int32, symmetric=True), poisoned(50, torch.int32)
    sig = shmem.create_signals(3, dtype)
    shmem.barrier_all()
    ring_kernel[(1,)](values(seed, me, 50, torch.int32), inbox, out, sig, value, 50, right, ctx, op, compare, BLOCK=BLOCK)
    return [(f'{op} of {dtype}, wait "{compare}"', out, values(seed, left, 50, torch.int32) + value, 0)]


@case
def notify(seed):
    return ring(seed, "set", "ge", 5) + ring(seed, "add", "ge", 7) + ring(seed, "set", "eq", 6, torch.int64)


@triton.jit
def wait_kernel(sig, seen, value, ctx, CMP: tl.constexpr, WANTED: tl.constexpr):
    """Program 0 waits for what program 1 of the left neighbour says; the signal's first value, 0, does not satisfy it."""
    if tl.program_id(0) == 0:
        token = dl.wait(sig, WANTED, ctx, CMP)
        tl.store(seen + tl.arange(0, 1), token)
    else:
        dl.notify(sig, dl.owner_first(1, dl.rank(ctx), dl.num_ranks(ctx)), ctx, value)


@case
def wait(seed):
    me, world, ctx, _, _ = who()
    found = []
    for compare, wanted in (("ge", 4), ("gt", 3), ("eq", 4), ("ne", 0), ("le", -4), ("lt", -3)):
        sig, seen = shmem.create_signals(1), poisoned(1, torch.int32)
        value = 4 if wanted >= 0 else -4
        shmem.barrier_all()
        wait_kernel[(2,)](sig, seen, value, ctx, CMP=compare, WANTED=wanted)
        found.append((compare, seen, torch.tensor([value], dtype=torch.int32), 0))
    sig, seen = shmem.create_signals(world), poisoned(1, torch.int32)
    shmem.barrier_all()
    wait_many_kernel[(1,)](sig, seen, 9, ctx)
    return [*found, ("n signals", seen, torch.tensor([9 + world - 1], dtype=torch.int32), 0)]


@triton.jit
def wait_many_kernel(sig, seen, value, ctx):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    dl.notify_all(dl.signal_at(sig, me), ctx, value + me)
    tl.store(seen + tl.arange(0, 1), dl.wait(sig, value, ctx, "ge", world))


@triton.jit
def test_kernel(sig, seen, value, ctx):
    tl.store(seen + tl.arange(0, 1), dl.test(sig, value, ctx, "gt").to(tl.int32))


@case
def test(seed):
    me, world, ctx, _, _ = who()
    sig, found = shmem.create_signals(1), []
    for level, expected in ((3, 0), (4, 1)):
        seen = poisoned(1, torch.int32)
        sig[0] = level
        test_kernel[(1,)](sig, seen, 3, ctx)
        found.append((f"{level} > 3", seen, torch.tensor([expected], dtype=torch.int32), 0))
    return found


@triton.jit
def put_signal_kernel(x, inbox, out, sig, n, peer, ctx, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    dl.put_signal(inbox, x, n, sig, peer, ctx, 1, "add", pid, programs, BLOCK)
    token = dl.wait(sig, programs, ctx)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    while tl.min(i, 0) < n:
        tl.store(out + i, tl.load(dl.consume_token(inbox, token) + i, mask=i < n), mask=i < n)
        i += programs * BLOCK


@case
def put_signal(seed):
    me, world, ctx, right, left = who()
    n = 5 * BLOCK + 3
    inbox, out = poisoned(n, torch.float16, symmetric=True), poisoned(n, torch.float16)
    sig = shmem.create_signals(1)
    shmem.barrier_all()
    put_signal_kernel[(3,)](values(seed, me, n, torch.float16), inbox, out, sig, n, right, ctx, BLOCK=BLOCK)
    return [("split over 3 programs", out, values(seed, left, n, torch.float16), 0)]


@triton.jit
def notify_all_kernel(sig, counted, ctx):
    dl.notify_all(dl.signal_at(sig, dl.rank(ctx)), ctx, 1, "add")
    dl.notify_all(counted, ctx, dl.rank(ctx) + 1, "add")


@case
def notify_all(seed):
    me, world, ctx, _, _ = who()
    sig, counted = shmem.create_signals(world), shmem.create_signals(1)
    shmem.barrier_all()
    notify_all_kernel[(3,)](sig, counted, ctx)
    shmem.barrier_all()
    total = torch.tensor([3 * world * (world + 1) // 2], dtype=torch.int32)
    each = torch.full((world,), 3, dtype=torch.int32)
    return [("each", sig[:, 0].clone(), each, 0), ("sum", counted[0, :1].clone(), total, 0)]


@triton.jit
def fence_kernel(x, out, ctx, peer, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    dl.remote_store(out + i, tl.load(x + i), peer, ctx)
    dl.fence(ctx)
    dl.remote_store(out + i, tl.load(x + BLOCK + i), peer, ctx)
    dl.quiet(ctx)


@case
def fence(seed):
    me, world, ctx, right, left = who()
    out = poisoned(BLOCK, torch.float32, symmetric=True)
    shmem.barrier_all()
    fence_kernel[(1,)](values(seed, me, 2 * BLOCK, torch.float32), out, ctx, right, BLOCK=BLOCK)
    shmem.barrier_all()
    return [("the second store counts", out, values(seed, left, 2 * BLOCK, torch.float32)[BLOCK:], 0)]


@triton.jit
def fence_dot_kernel(a, b, inbox, out, sig, peer, ctx, N: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(a + square), tl.load(b + square))
    dl.remote_store(inbox + square, product, peer, ctx)
    dl.fence_dot(ctx)
    dl.notify(sig, peer, ctx, 1)
    token = dl.wait(sig, 1, ctx)
    tl.store(out + square, tl.load(dl.consume_token(inbox, token) + square))


@case
def fence_dot(seed):
    me, world, ctx, right, left = who()
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        a, b = values(seed, left, (32, 32), dtype), values(seed + 1, left, (32, 32), dtype)
        inbox, out = poisoned((32, 32), torch.float32, symmetric=True), poisoned((32, 32), torch.float32)
        sig = shmem.create_signals(1)
        shmem.barrier_all()
        mine = values(seed, me, (32, 32), dtype), values(seed + 1, me, (32, 32), dtype)
        fence_dot_kernel[(1,)](*mine, inbox, out, sig, right, ctx, N=32)
        bound = a.double().abs() @ b.double().abs() * (32 * 2.0**-24)  # of a sum of 32 products in fp32
        found.append((str(dtype), out.double(), a.double() @ b.double(), bound))
    return found
