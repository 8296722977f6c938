"""What ranks run in test_ascend_host_execution.py: kernels that are wrong, each in its way, as lowered code on the host."""

import triton_dist  # isort: skip  # noqa: F401  before triton

import torch
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem


@triton.jit
def put_to_wrong_peer(dst, src, n, ctx, BLOCK: tl.constexpr):
    dl.put(dst, src, n, dl.rank(ctx), ctx, 0, 1, BLOCK)


@triton.jit
def wait_for_nobody(sig, ctx):
    if tl.program_id(0) == 1:
        _ = dl.wait(dl.signal_at(sig, 1), 1, ctx)


@triton.jit
def spin(sig):
    lane = tl.arange(0, 1)
    while tl.max(tl.load(sig + lane, volatile=True), 0) < 1:
        tl.store(sig + 16 + lane, tl.load(sig + 16 + lane) + 1)


@triton.jit
def takes_a_tensor(x, n, scale, flag, none, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < n, other=0) * scale
    if flag:
        y = -y
    if none is None:
        y += 0.5
    tl.store(x + i, y, mask=i < n)


@triton.jit
def converts(out, x, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(DTYPE))


def install(address, limit_s):
    from third_party.ascend.host_execution import engine

    engine.install(address, limit_s)
    return engine


def wrong_peer(address):
    from third_party.ascend.host_execution.run import compare

    install(address, 10)
    me, world = shmem.my_pe(), shmem.pe_count()
    dst = shmem.aclshmem_create_tensor((64,), torch.float32).fill_(float("nan"))
    xs = [torch.randn(64, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    shmem.barrier_all()
    put_to_wrong_peer[(1,)](dst, xs[me], 64, shmem.context(), BLOCK=64)
    shmem.barrier_all()
    return compare(dst, xs[(me - 1) % world], 0)


def waits(address, limit_s):
    install(address, limit_s)
    wait_for_nobody[(3,)](shmem.create_signals(2), shmem.context())


def spins(address, limit_s):
    install(address, limit_s)
    spin[(2,)](shmem.create_signals(2))


def arguments(address):
    """Numbers of every kind as arguments: (got, expected) for each."""
    engine, results = install(address, 10), []
    engine.ran.clear()
    for n, scale, flag in ((60, 2.5, True), (1, -0.25, False), (64, 1.0, True)):
        x = torch.arange(64, dtype=torch.float32)
        expected = x.clone()
        expected[:n] = (-1 if flag else 1) * x[:n] * scale + 0.5
        takes_a_tensor[lambda meta: (1,)](x, n, scale, flag, None, BLOCK=64)
        results.append((x, expected))
    return results, engine.ran


def dtypes(address):
    """A dtype as constexpr: (got, expected)."""
    install(address, 10)
    x, out = torch.randn(64), torch.full((64,), float("nan"), dtype=torch.float16)
    converts[(1,)](out, x, BLOCK=64, DTYPE=tl.float16)
    return out, x.to(torch.float16)
