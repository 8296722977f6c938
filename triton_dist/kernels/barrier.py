"""Barrier: all ranks of a team meet on their devices, in stream order.

    ctx = create_barrier_context()      # once: signals
    barrier(ctx)                        # any number of calls
    ctx.free()

How it works. A kernel of one program runs `dl.barrier_all`: it sets its signal at every rank to the number of the call and
waits until every rank's signal here has reached it. The numbers only grow, so a rank that is ahead (by one call at most: the
next one needs everybody) is not mistaken for one that is late, and nothing is reset.
"""

import torch.distributed as dist
import triton

from triton_dist import language as dl

from .operator_context import OperatorContext, agreement, begin


@triton.jit
def barrier_kernel(signals, ctx):
    dl.barrier_all(signals, ctx)


def reference(group=None):
    """The same by torch.distributed over `group`, for the host."""
    dist.barrier(group)


class BarrierContext(OperatorContext):
    """What `barrier` needs. Made by `create_barrier_context`."""

    def __init__(self, team):
        super().__init__("barrier", team)
        self.signal = self.signals(self.num_ranks + 1)


def create_barrier_context(team=0):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        team: team id of shmem; its ranks take part (see operator_context about teams).

    Symmetric memory: num_ranks + 1 signals.
    Errors: CollectiveMismatchError on all ranks alike when they differ.
    """
    with agreement("create_barrier_context", team):
        pass
    return BarrierContext(team)


def barrier(context):
    """Work queued on this rank's stream before the call is complete, and its stores are visible on all ranks of the
    context's team, before work queued after the call on any of their streams begins.

    Args:
        context: of `create_barrier_context`.

    All ranks of the team must make the same calls in the same order, one at a time. The host does not wait for a device,
    and nothing is allocated: the call can be captured in a CUDA graph. On `cpu`, where a launch runs to its end, the host
    waits too. A context serves 2**31 - 1 calls.
    Errors: ValueError when the context was freed.
    """
    begin("barrier", BarrierContext, context)
    context.agree("barrier", "")
    barrier_kernel[(1,)](context.signal, context.table)
