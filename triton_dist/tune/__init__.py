"""Tuning of the operators of `triton_dist.kernels`, as a function and as a command. See docs/tuning.md.

    torchrun --nproc-per-node=2 -m triton_dist.tune gemm_reduce_scatter --shapes 8192,4096,2048
"""

from .operators import OPERATORS
from .tuner import tune

__all__ = ["OPERATORS", "tune"]
