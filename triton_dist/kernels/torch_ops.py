"""The operators as torch.library ops, so that `torch.compile` takes a module that calls one without breaking its graph.

Nothing needs to be called by hand: while torch compiles, `all_reduce(x, context)` and its kin, called without `out`, put an
op `torch.ops.triton_dist.*` into the graph; the op names its context by number. Every rank must compile the same calls in the
same order. There are no gradients.
"""

import itertools
import weakref

import torch

_contexts = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(context):
    """Numbers a context, for use while compiling; returns it. It stays the caller's: a number keeps nothing alive."""
    context.number = next(_numbers)
    _contexts[context.number] = context
    return context


def _op(name, schema_owner, fake):
    """Defines triton_dist::name from an annotated function that runs it, and one that gives the result's shape and dtype."""
    op = torch.library.custom_op(f"triton_dist::{name}", schema_owner, mutates_args=())
    op.register_fake(fake)
    return op


def _all_reduce(x: torch.Tensor, context: int, op: str) -> torch.Tensor:
    from .all_reduce import all_reduce

    return all_reduce(x, _contexts[context], op)


def _all_gather(x: torch.Tensor, context: int) -> torch.Tensor:
    from .all_gather import all_gather

    return all_gather(x, _contexts[context])


def _reduce_scatter(x: torch.Tensor, context: int, op: str) -> torch.Tensor:
    from .reduce_scatter import reduce_scatter

    return reduce_scatter(x, _contexts[context], op)


def _allgather_gemm(a: torch.Tensor, b: torch.Tensor, context: int) -> torch.Tensor:
    from .allgather_gemm import allgather_gemm

    return allgather_gemm(a, b, _contexts[context])


def _gemm_reduce_scatter(a: torch.Tensor, b: torch.Tensor, context: int) -> torch.Tensor:
    from .gemm_reduce_scatter import gemm_reduce_scatter

    return gemm_reduce_scatter(a, b, _contexts[context])


def _gemm_allreduce(a: torch.Tensor, b: torch.Tensor, context: int) -> torch.Tensor:
    from .gemm_allreduce import gemm_allreduce

    return gemm_allreduce(a, b, _contexts[context])


all_reduce = _op("all_reduce", _all_reduce, lambda x, context, op: torch.empty_like(x))
all_gather = _op(
    "all_gather", _all_gather, lambda x, context: x.new_empty(x.shape[0] * _contexts[context].num_ranks, *x.shape[1:])
)
reduce_scatter = _op(
    "reduce_scatter",
    _reduce_scatter,
    lambda x, context, op: x.new_empty(x.shape[0] // _contexts[context].num_ranks, *x.shape[1:]),
)
allgather_gemm = _op(
    "allgather_gemm",
    _allgather_gemm,
    lambda a, b, context: a.new_empty(a.shape[0] * _contexts[context].num_ranks, b.shape[1]),
)
gemm_reduce_scatter = _op(
    "gemm_reduce_scatter", _gemm_reduce_scatter, lambda a, b, context: a.new_empty(_contexts[context].rows, b.shape[1])
)
gemm_allreduce = _op("gemm_allreduce", _gemm_allreduce, lambda a, b, context: a.new_empty(a.shape[0], b.shape[1]))
