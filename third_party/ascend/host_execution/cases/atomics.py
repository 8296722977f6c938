"""The words of language/atomic.py."""

import torch
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

from .data import BLOCK, symmetric, values, who

CASES = {}


def case(fn):
    """Registers the case of the word of this name."""
    CASES["dl." + fn.__name__] = fn
    return fn


@triton.jit
def atomic_kernel(p, x, n, ctx, OP: tl.constexpr, BLOCK: tl.constexpr):
    """Every program of every rank works on the same words of every rank."""
    i = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * BLOCK + i)
    for peer in range(0, dl.num_ranks(ctx)):
        if OP == "add":
            dl.atomic_add(p + i, value, peer, ctx, mask=i < n)
        elif OP == "max":
            dl.atomic_max(p + i, value, peer, ctx, mask=i < n)
        else:
            dl.atomic_min(p + i, value, peer, ctx, mask=i < n)


def atomic(seed, op, dtype):
    me, world, ctx, _, _ = who()
    p = symmetric(values(seed + 1, 0, BLOCK, dtype))
    begin, programs = p.clone(), 3
    x = [values(seed, r, (programs, BLOCK), dtype) for r in range(world)]
    shmem.barrier_all()
    atomic_kernel[(programs,)](p, x[me], 50, ctx, OP=op, BLOCK=BLOCK)
    shmem.barrier_all()
    everything = torch.cat([begin[None], *x]).to(torch.float64 if dtype.is_floating_point else torch.int64)
    expected = {"add": everything.sum(0), "max": everything.amax(0), "min": everything.amin(0)}[op]
    expected[50:] = begin[50:]
    bound = 0.0
    if op == "add" and dtype.is_floating_point:
        bound = everything.abs().sum(0) * (len(everything) * 2.0**-24)  # in any order
    return [(f"{op} {dtype}", p.to(expected.dtype), expected, bound)]


@case
def atomic_add(seed):
    return atomic(seed, "add", torch.int32) + atomic(seed, "add", torch.float32)


@case
def atomic_max(seed):
    return atomic(seed, "max", torch.int32) + atomic(seed, "max", torch.float32)


@case
def atomic_min(seed):
    return atomic(seed, "min", torch.int32) + atomic(seed, "min", torch.float32)


@triton.jit
def atomic_xchg_kernel(p, ctx):
    dl.atomic_xchg(p, 3, 0, ctx)


@case
def atomic_xchg(seed):
    p = symmetric(torch.zeros(1, dtype=torch.int32))
    atomic_xchg_kernel[(1,)](p, shmem.context())
    return [("rank 0", p, torch.tensor([3 if shmem.my_pe() == 0 else 0], dtype=torch.int32), 0)]


@triton.jit
def atomic_cas_kernel(p, ctx):
    dl.atomic_cas(p, 0, 3, 0, ctx)


@case
def atomic_cas(seed):
    p = symmetric(torch.zeros(1, dtype=torch.int32))
    atomic_cas_kernel[(1,)](p, shmem.context())
    return [("rank 0", p, torch.tensor([3 if shmem.my_pe() == 0 else 0], dtype=torch.int32), 0)]
