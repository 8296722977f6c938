"""Random data that every rank can compute for all ranks, and poisoned memory for what a kernel has to write."""

import torch

from triton_dist import shmem

BLOCK = 64  # elements in a program's hands in most cases


def values(seed, rank, shape, dtype):
    """The random data of one rank; every rank can compute those of all."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, (shape,) if isinstance(shape, int) else shape, generator=generator).to(dtype)


def poisoned(shape, dtype, symmetric=False):
    """Memory that a kernel has to write: NaN, or the largest integer."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    made = shmem.aclshmem_create_tensor(shape, dtype) if symmetric else torch.empty(shape, dtype=dtype)
    return made.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)


def symmetric(tensor):
    made = shmem.aclshmem_create_tensor(tuple(tensor.shape), tensor.dtype)
    return made.copy_(tensor)


def who():
    """(rank, ranks, context table, right neighbour, left neighbour)"""
    me, world = shmem.my_pe(), shmem.pe_count()
    return me, world, shmem.context(), (me + 1) % world, (me - 1) % world
