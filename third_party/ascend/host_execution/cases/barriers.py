"""The words of language/barrier.py: what every rank stored before is seen by every rank after, several times over."""

import torch
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

from .data import poisoned, who

CASES = {}


def case(fn):
    """Registers the case of the word of this name."""
    CASES["dl." + fn.__name__] = fn
    return fn


@triton.jit
def barrier_kernel(cells, seen, sig, turns, ctx, KIND: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    lane = tl.arange(0, 1)
    turn = 0
    while turn < turns:
        for peer in range(0, world):
            dl.remote_store(cells + (turn * world + me) + lane, tl.zeros((1,), tl.int32) + (turn * 10 + me), peer, ctx)
        if KIND == "all":
            dl.barrier_all(sig, ctx)
        else:
            dl.barrier_clear(sig, ctx)
        for rank in range(0, world):
            at = turn * world + rank
            tl.store(seen + at + lane, tl.load(cells + at + lane))
        turn += 1


def barrier(kind, signals):
    me, world, ctx, _, _ = who()
    cells, seen = poisoned(3 * world, torch.int32, symmetric=True), poisoned(3 * world, torch.int32)
    sig = shmem.create_signals(signals)
    shmem.barrier_all()
    barrier_kernel[(1,)](cells, seen, sig, 3, ctx, KIND=kind)
    return [("3 turns", seen, torch.tensor([10 * t + r for t in range(3) for r in range(world)], dtype=torch.int32), 0)]


@case
def barrier_all(seed):
    return barrier("all", shmem.pe_count() + 1)


@case
def barrier_clear(seed):
    return barrier("clear", 1)


@triton.jit
def barrier_grid_kernel(cells, seen, sig, ctx):
    """Every program of every rank tells every rank, then reads what all of them told its own."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, 1)
    for peer in range(0, world):
        dl.remote_store(cells + me * programs + pid + lane, tl.zeros((1,), tl.int32) + (me * 10 + pid), peer, ctx)
    dl.barrier_grid(sig, ctx)
    total = tl.zeros((1,), tl.int32)
    for i in range(0, world * programs):
        total += tl.load(cells + i + lane)
    tl.store(seen + pid + lane, total)


@case
def barrier_grid(seed):
    me, world, ctx, _, _ = who()
    programs, found = 3, []
    sig = shmem.create_signals(world + 3)
    total = sum(10 * r + p for r in range(world) for p in range(programs))
    for launch in range(2):
        cells, seen = poisoned(world * programs, torch.int32, symmetric=True), poisoned(programs, torch.int32)
        shmem.barrier_all()
        barrier_grid_kernel[(programs,)](cells, seen, sig, ctx)
        found.append((f"launch {launch}", seen, torch.full((programs,), total, dtype=torch.int32), 0))
    return found
