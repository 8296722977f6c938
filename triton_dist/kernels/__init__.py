"""Fused operators and collectives. Each lies in a file of its own name: kernel, launcher and plain-torch reference."""

from .all_gather import AllGatherContext, all_gather, create_all_gather_context
from .all_reduce import AllReduceContext, all_reduce, create_all_reduce_context
from .all_to_all import AllToAllContext, all_to_all, all_to_all_v, create_all_to_all_context
from .allgather_gemm import AllGatherGemmContext, allgather_gemm, create_allgather_gemm_context
from .barrier import BarrierContext, barrier, create_barrier_context
from .broadcast import BroadcastContext, broadcast, create_broadcast_context
from .gemm_allreduce import GemmAllReduceContext, create_gemm_allreduce_context, gemm_allreduce
from .gemm_reduce_scatter import GemmReduceScatterContext, create_gemm_reduce_scatter_context, gemm_reduce_scatter
from .moe_combine import MoeCombineContext, create_moe_combine_context, moe_combine
from .moe_dispatch import create_moe_dispatch_context, moe_dispatch
from .moe_dispatch_context import MoeDispatchContext, MoeDispatchHandle
from .qkv_all_to_all import (
    QkvAllToAllContext,
    attention_output_all_to_all,
    create_qkv_all_to_all_context,
    qkv_all_to_all,
)
from .reduce_scatter import ReduceScatterContext, create_reduce_scatter_context, reduce_scatter
from .sequence_all_to_all import (
    SequenceAllToAllContext,
    create_sequence_all_to_all_context,
    reverse_all_to_all,
    transpose_all_to_all,
)

__all__ = [
    "AllGatherContext",
    "AllGatherGemmContext",
    "AllReduceContext",
    "AllToAllContext",
    "BarrierContext",
    "BroadcastContext",
    "GemmAllReduceContext",
    "GemmReduceScatterContext",
    "MoeCombineContext",
    "MoeDispatchContext",
    "MoeDispatchHandle",
    "QkvAllToAllContext",
    "ReduceScatterContext",
    "SequenceAllToAllContext",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "allgather_gemm",
    "attention_output_all_to_all",
    "barrier",
    "broadcast",
    "create_all_gather_context",
    "create_all_reduce_context",
    "create_all_to_all_context",
    "create_allgather_gemm_context",
    "create_barrier_context",
    "create_broadcast_context",
    "create_gemm_allreduce_context",
    "create_gemm_reduce_scatter_context",
    "create_moe_combine_context",
    "create_moe_dispatch_context",
    "create_qkv_all_to_all_context",
    "create_reduce_scatter_context",
    "create_sequence_all_to_all_context",
    "gemm_allreduce",
    "gemm_reduce_scatter",
    "moe_combine",
    "moe_dispatch",
    "qkv_all_to_all",
    "reduce_scatter",
    "reverse_all_to_all",
    "transpose_all_to_all",
]
