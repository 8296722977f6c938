"""Tuning of the operators of `triton_dist.kernels`, as a function and as a command. See docs/tuning.md.

    torchrun --nproc-per-node=2 -m triton_dist.tune gemm_reduce_scatter --shapes 8192,4096,2048
"""

from .tuner import OPERATORS, tune

__all__ = ["OPERATORS", "tune"]
