"""The words of the language: a signal's way, and how fast programs put and get, against a copy engine.

    torchrun --nproc-per-node=2 benchmarks/words.py

Two ranks. The signal's way is half of a ping-pong of notify and wait, release and acquire at system scope; rates are of one
direction, both ranks at the same time.
"""

import argparse
import itertools

import triton_dist
import triton_dist.language as dl
from measure import finish, link_rate, microseconds, say, start
from triton_dist import shmem

import torch
import triton
import triton.language as tl


@triton.jit
def ping_pong(sig, past, turns, ctx):
    me = dl.rank(ctx)
    for i in range(1, turns + 1):
        if me == 1:
            _ = dl.wait(sig, past + i, ctx)
        dl.notify(sig, 1 - me, ctx, past + i)
        if me == 0:
            _ = dl.wait(sig, past + i, ctx)


@triton.jit
def put(there, here, n, ctx, BLOCK: tl.constexpr):
    dl.put(there, here, n, 1 - dl.rank(ctx), ctx, tl.program_id(0), tl.num_programs(0), BLOCK)


@triton.jit
def get(there, here, n, ctx, BLOCK: tl.constexpr):
    dl.get(here, there, n, 1 - dl.rank(ctx), ctx, tl.program_id(0), tl.num_programs(0), BLOCK)


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    on_cpu = triton_dist.backend == "cpu"
    _, world, device = start((64 << 20) if on_cpu else (1 << 30))
    if world != 2:
        raise SystemExit("two ranks: torchrun --nproc-per-node=2")
    ctx, sig = shmem.context(), shmem.create_signals(1)
    turns, n = (20, 1 << 12) if on_cpu else (5000, 1 << 26)
    past = itertools.count(0, turns)
    for warps in (1, 4, 8):
        (us,) = microseconds([lambda: ping_pong[(1,)](sig, next(past), turns, ctx, num_warps=warps)], samples=5)  # noqa: B023
        say(f"notify to wait, one way, {warps} warps: {us / turns / 2:.3f} us")
    engine = link_rate(n * 4)
    say(f"copy engine: {engine / 1e3:.0f} GB/s")
    there = shmem.aclshmem_create_tensor((n,), torch.float32)
    here = torch.ones(n, device=device)
    for kernel in (put, get):
        for programs, block, warps in ((8, 8192, 16), (16, 8192, 16), (32, 8192, 16), (132, 4096, 8)):
            programs = 2 if on_cpu else programs
            call = lambda: kernel[(programs,)](there, here, n, ctx, BLOCK=block, num_warps=warps)  # noqa: B023, E731
            (us,) = microseconds([call], samples=7)
            rate = n * 4 / us
            say(f"{kernel.__name__} by {programs} programs: {rate / 1e3:.0f} GB/s, {rate / engine:.0%} of the copy engine")
    finish()


if __name__ == "__main__":
    main()
