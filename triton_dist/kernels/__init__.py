"""Fused operators. Each lies in a file of its own name: kernel, launcher and plain-torch reference side by side."""

from .allgather_gemm import AllGatherGemmContext, allgather_gemm, create_allgather_gemm_context

__all__ = ["AllGatherGemmContext", "allgather_gemm", "create_allgather_gemm_context"]
