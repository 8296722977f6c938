"""All-gather: every rank gets the shards of all ranks, in rank order.

    ctx = create_all_gather_context(1 << 20, torch.float16)      # once: symmetric memory, signals, epochs
    y = all_gather(x, ctx)                                       # any number of calls, of up to 2**20 elements a rank
    ctx.free()

How it works. A rank puts its shard into its slot of every rank's staging buffer (its own too), says so to all, waits until
all have said so, and copies the slots to the result. Each program does that for its own blocks (channels.py).

Why nothing is overwritten before it is read, with two buffers that take turns, for any number of ranks. Call e uses buffer
e % 2. A rank writes it in call e + 2 at the earliest. It began that call after it had finished e + 1, so after *every* rank
had put its shard of call e + 1; a rank puts that after it has copied what call e brought it. So when a rank writes a buffer,
every rank has read what was in it: no rank is more than one call ahead of any other, and there is no acknowledgement and
no barrier.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist import language as dl

from . import torch_ops
from .arguments import WORDS, need_words
from .channels import ChannelContext, end_epoch, next_epoch
from .operator_context import begin, operands_of, passed_before


@triton.jit
def all_gather_kernel(
    x, out, staging, ready, epochs, n, slot, ctx,
    CHANNELS: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    me, channel = dl.rank(ctx), tl.program_id(0)
    epoch = next_epoch(epochs)
    buffer = staging + tl.cast(epoch % 2 * WORLD, tl.int64) * slot
    mine = buffer + tl.cast(me, tl.int64) * slot
    for i in range(0, WORLD):
        dl.put(mine, x, n, dl.owner_first(i + 1, me, WORLD), ctx, channel, CHANNELS, BLOCK)
    dl.notify_all(dl.signal_at(ready, channel * WORLD + me), ctx, epoch)
    token = dl.wait(dl.signal_at(ready, channel * WORLD), epoch, ctx, "ge", WORLD)
    here = dl.consume_token(buffer, token)
    for src in range(0, WORLD):
        at = tl.cast(src, tl.int64)
        dl.get(out + at * n, here + at * slot, n, me, ctx, channel, CHANNELS, BLOCK)
    end_epoch(epochs, epoch)


def reference(x, group=None):
    """The same by torch.distributed over `group`. [num_ranks * M, ...]."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, x.contiguous(), group=group)
    return torch.cat(shards)


class AllGatherContext(ChannelContext):
    """What `all_gather` needs besides its operands. Made by `create_all_gather_context`."""

    def __init__(self, max_elements, dtype, team, programs, block):
        super().__init__("all_gather", max_elements, dtype, need_words, team, programs, block)
        self.word = WORDS[dtype.itemsize]
        self.staging = self.tensor((2, self.num_ranks, self.slot), self.word)
        self.ready = self.signals(self.programs * self.num_ranks)


def create_all_gather_context(max_elements, dtype, team=0, programs=None, block=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        max_elements: most elements of a rank's shard, 0 or more.
        dtype: any torch dtype of 1, 2, 4 or 8 bytes; of the operands.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        programs: programs in the largest grid; not more than the device runs at a time.
        block: elements that a program moves at a time, a power of two, at least 16. programs and block None: on nvidia what
            was measured for a message of max_elements (docs/tuning.md; also for reduce_scatter), else what suits the device.
        All of them are equal on all ranks of the team.

    Symmetric memory: 2 * num_ranks * max_elements elements and programs * num_ranks signals.
    Errors: ValueError for what is not supported, CollectiveMismatchError when ranks differ; on all ranks alike, before
    anybody communicates.
    """
    return torch_ops.register(AllGatherContext(max_elements, dtype, team, programs, block))


def all_gather(x, context, out=None):
    """out = concat(x of all ranks of the context's team, in rank order), along the first dimension.

    Args:
        x: [M, ...], this rank's shard, contiguous, of at most max_elements elements; the same shape on all ranks. Any memory.
        context: of `create_all_gather_context`.
        out: [num_ranks * M, ...], contiguous, written; None: a new tensor. `x` may be its rows of this rank.

    Returns: out, bit for bit what the ranks gave.
    All ranks of the team must make the same calls in the same order, one at a time. With `out` given nothing is allocated,
    and there is no host synchronisation: the call can be captured in a CUDA graph. Calls of 0 elements do nothing.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    if out is None and torch.compiler.is_compiling():
        return torch_ops.all_gather(x, context.number)
    if not passed_before(context, operands_of(x, out)):
        begin("all_gather", AllGatherContext, context, x=x, out=out)
        world = context.num_ranks
        shape = (world * x.shape[0], *x.shape[1:]) if x.dim() else (world,)
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        context.check(x, out, shape, x.numel(), own=context.rank * x.numel())
    n = x.numel()
    if n:
        words = x.view(context.word), out.view(context.word)
        arguments = (*words, context.staging, context.ready, context.epochs, n, context.slot, context.table)
        context.launch(all_gather_kernel, n, arguments)
    return out
