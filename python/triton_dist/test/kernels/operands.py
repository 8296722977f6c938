"""What the operators' tests share: random operands, comparison bit for bit, two teams side by side, torch's own group."""

import contextlib

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem

import torch
import torch.distributed as dist


def random_bits(rank, shape, dtype, seed):
    """Random bits, so also infinities and NaNs of many payloads: what only moves data keeps them."""
    shape = torch.Size(shape)
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    flat = torch.randint(0, 256, (shape.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def random_numbers(rank, shape, dtype, seed):
    """Finite numbers: integers of the whole range, floats about 0."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, torch.Size(shape), generator=generator, dtype=dtype)


def poisoned(shape, dtype):
    """A tensor on the device whose bytes no test expects (True for bool)."""
    shape = torch.Size(shape)
    fill = torch.full((shape.numel() * dtype.itemsize,), 1 if dtype == torch.bool else 0x5A, dtype=torch.uint8)
    return fill.view(dtype).view(shape).to(shmem.device())


def assert_same_bits(found, expected, what=""):
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if found.numel():
        found, expected = (x.cpu().contiguous().reshape(-1).view(torch.uint8) for x in (found, expected))
        assert torch.equal(found, expected), what


def team_of_two():
    """(team id, its members): ranks 0 and 2, or 1 and 3, of four. Collective over all ranks."""
    me = shmem.my_pe()
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    return teams[me % 2], [me % 2, me % 2 + 2]


@contextlib.contextmanager
def torch_distributed():
    """torch's process group of all ranks, for a reference that uses it. Collective, at the end too."""
    dist.init_process_group(shmem.process_group_backend(), rank=shmem.my_pe(), world_size=shmem.pe_count())
    try:
        yield dist
    finally:
        dist.destroy_process_group()
    shmem.barrier_all()  # a next group would find the addresses of this one on a rank that has not left it yet


def assert_refused(calls):
    """Each of `calls`, a dict from the start of the error's text after "rank R: " to a function, raises ValueError so."""
    for text, call in calls.items():
        with pytest.raises(ValueError, match=f"rank {shmem.my_pe()}: {text}"):
            call()
