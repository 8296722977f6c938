"""Products by the vendor's library that torch has no call for."""

import functools

import torch

import triton_dist

from .stream_costs import SPARE


def product(a, b, out, c=None, spare=False):
    """out [M, N] = a [M, K] @ b [K, N], plus c [M, N] if given, without a copy of c, where the platform's library can.
    spare: leaves SPARE multiprocessors to others, where the library can."""
    if triton_dist.backend == "nvidia" and (spare or c is not None):
        from ..backends import nvidia_blas

        if nvidia_blas.product(a, b, out, c, _multiprocessors(out.device) - SPARE if spare else 0):
            return
    torch.mm(a, b, out=out) if c is None else torch.addmm(c, a, b, out=out)


@functools.cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count
