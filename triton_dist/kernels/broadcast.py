"""Broadcast: every rank gets the tensor of one rank, the root; each call may name another root.

    ctx = create_broadcast_context(1 << 20, torch.float16)       # once: symmetric memory, signals, epochs
    y = broadcast(x, 0, ctx)                                     # any number of calls, of up to 2**20 elements
    ctx.free()

How it works. The root puts its tensor into every rank's staging buffer (its own too) and sets `ready[root]` there; everybody
waits for that, copies the buffer to the result and sets its `done` at all ranks: not at the root alone, because the next
root has to know as well. Each program does that for its own blocks (channels.py).

Why nothing is overwritten before it is read, for any number of ranks and any sequence of roots. A root needs nothing from
anybody to send, so without acknowledgements it could run any number of calls ahead. Call e uses buffer e % 2, and the root
of call e begins to put only when `done` of *every* rank is at least e - 2, that is, everybody has copied what call e - 2,
the last to use this buffer, brought. So no rank is more than two calls ahead of any other, and two buffers keep a root
from waiting for the slowest rank's last copy.

Why each root has a `ready` of its own. Rank c can have the data of call e, whose root is a, and go on to be the root of call
e + 1 while a's signal of call e is still on its way to rank d. In one cell a's lower number would then overwrite c's, and d
would wait for c forever. In a cell of its own a root's numbers only grow. If d, waiting for ready[a] >= e, finds a later
call's number there, a has finished putting call e long since, and the later call is e + 1, in the other buffer: for e + 2 a
would have needed d's `done` of call e.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist import language as dl

from .arguments import WORDS, need, need_int, need_words
from .channels import ChannelContext, end_epoch, next_epoch
from .operator_context import begin


@triton.jit
def broadcast_kernel(
    x, out, staging, ready, done, epochs, n, slot, root, ctx,
    CHANNELS: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    me, channel = dl.rank(ctx), tl.program_id(0)
    epoch = next_epoch(epochs)
    buffer = staging + tl.cast(epoch % 2, tl.int64) * slot
    if me == root:
        token = dl.wait(dl.signal_at(done, channel * WORLD), epoch - 2, ctx, "ge", WORLD)
        free = dl.consume_token(buffer, token)
        for i in range(0, WORLD):
            dl.put(free, x, n, dl.owner_first(i + 1, me, WORLD), ctx, channel, CHANNELS, BLOCK)
        dl.notify_all(dl.signal_at(ready, channel * WORLD + me), ctx, epoch)
    here = dl.wait(dl.signal_at(ready, channel * WORLD + root), epoch, ctx)
    dl.get(out, dl.consume_token(buffer, here), n, me, ctx, channel, CHANNELS, BLOCK)
    dl.notify_all(dl.signal_at(done, channel * WORLD + me), ctx, epoch)
    end_epoch(epochs, epoch)


def reference(x, root, group=None):
    """The same by torch.distributed over `group`; `root` is a rank of the group. Shape and dtype of x."""
    y = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(y, dist.get_global_rank(group or dist.group.WORLD, root), group=group)
    return y


class BroadcastContext(ChannelContext):
    """What `broadcast` needs besides its operands. Made by `create_broadcast_context`."""

    def __init__(self, max_elements, dtype, team, programs, block):
        super().__init__("broadcast", max_elements, dtype, need_words, team, programs, block)
        self.word = WORDS[dtype.itemsize]
        self.staging = self.tensor((2, self.slot), self.word)
        self.ready = self.signals(self.programs * self.num_ranks)
        self.done = self.signals(self.programs * self.num_ranks)


def create_broadcast_context(max_elements, dtype, team=0, programs=None, block=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        max_elements: most elements of a call, 0 or more.
        dtype, team, programs, block: see `create_all_gather_context`.

    Symmetric memory: 2 * max_elements elements and 2 * programs * num_ranks signals.
    Errors: as `create_all_gather_context`.
    """
    return BroadcastContext(max_elements, dtype, team, programs, block)


def broadcast(x, root, context, out=None):
    """out = x of rank `root`, on all ranks of the context's team.

    Args:
        x: contiguous, of at most max_elements elements; the same shape on all ranks. Its values matter at the root alone.
        root: rank in the team, the same on all ranks.
        context: of `create_broadcast_context`.
        out: as x, contiguous, written; may be x. None: a new tensor.

    Returns: out, bit for bit what the root gave.
    Order, capture and calls of 0 elements: as `all_gather`. It is no barrier: the root may return before others begin.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    begin("broadcast", BroadcastContext, context, x=x, out=out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    root = need_int("broadcast", "root", root)
    need("broadcast", root < context.num_ranks, f"root is {root}: give a rank of the team, 0 to {context.num_ranks - 1}")
    n = x.numel()
    context.check(x, out, x.shape, n, root=root)
    if n:
        broadcast_kernel[context.grid(n)](
            x.view(context.word), out.view(context.word), context.staging, context.ready, context.done, context.epochs,
            n, context.slot, root, context.table, **context.constants,
        )  # fmt: skip
    return out
