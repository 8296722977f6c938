"""Products by the vendor's library that torch has no call for."""

import torch

import triton_dist


def add_product(c, a, b, out):
    """out [M, N] = c [M, N] + a [M, K] @ b [K, N], without a copy of c where the platform's library can."""
    if triton_dist.backend == "nvidia":
        from ..backends import nvidia_blas

        if nvidia_blas.add_product(c, a, b, out):
            return
    torch.addmm(c, a, b, out=out)
