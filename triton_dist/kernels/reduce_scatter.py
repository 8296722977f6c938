"""Reduce-scatter: rank r gets the r-th part of the sum (maximum, minimum, product) of the tensors of all ranks.

    ctx = create_reduce_scatter_context(1 << 20, torch.float16)  # once: symmetric memory, signals, epochs
    y = reduce_scatter(x, ctx, "sum")                            # any number of calls, results of up to 2**20 elements
    ctx.free()

How it works. A rank puts part d of its tensor into its slot of rank d's staging buffer (its own part too), says so to all,
waits until all have said so, and reduces the slots: in the order of ranks, whatever the order of arrival, so results are the
same bits every time. 16-bit types are summed and multiplied in fp32 and rounded once; integers wrap around, as in torch.
Each program does that for its own blocks (channels.py).

Why nothing is overwritten before it is read, with two buffers that take turns, for any number of ranks. Call e uses buffer
e % 2. A rank writes it in call e + 2 at the earliest, after it finished e + 1, so after *every* rank had put its parts of
call e + 1, which a rank does after it has reduced what call e brought it. So no rank is more than one call ahead of any
other, and there is no acknowledgement and no barrier.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist import language as dl

from . import torch_ops
from .arguments import need, need_dtype
from .channels import ChannelContext, end_epoch, next_epoch
from .operator_context import begin, operands_of, passed_before

OPS = ("sum", "max", "min", "prod")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)


def accumulator(dtype):
    """The dtype in which `dtype` is reduced."""
    return torch.float32 if dtype.itemsize == 2 else dtype


@triton.jit
def widen(x):
    """To the dtype in which it is reduced."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    if BITS == 16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def combine(x, y, OP: tl.constexpr):
    """x OP y. A NaN in either is a NaN in the result, as in torch."""
    if OP == "sum":
        return x + y
    elif OP == "prod":
        return x * y
    elif OP == "max":
        return tl.where((y > x) | (y != y), y, x)
    else:
        tl.static_assert(OP == "min", "op is sum, max, min or prod")
        return tl.where((y < x) | (y != y), y, x)


@triton.jit
def reduce_slots(slots, slot, inside, WORLD: tl.constexpr, OP: tl.constexpr):
    """Slots 0 .. WORLD - 1, reduced in this order; `slots` points into slot 0, `slot` elements are between two of them."""
    acc = widen(tl.load(slots, mask=inside))
    for src in tl.static_range(1, WORLD):
        acc = combine(acc, widen(tl.load(slots + tl.cast(slot, tl.int64) * src, mask=inside)), OP)
    return acc


@triton.jit
def _reduce_block(out, slots, slot, start, count, WORLD: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count  # a constant for whole blocks, which leaves their accesses wide
    acc = reduce_slots(slots + start + lanes, slot, inside, WORLD, OP)
    tl.store(out + start + lanes, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def reduce_message(out, slots, slot, n, OP: tl.constexpr, CHANNELS: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """This channel's blocks of n elements: the slots, reduced in order, rounded once, to `out`."""
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), CHANNELS):
        start = tl.cast(block, tl.int64) * BLOCK
        if start + BLOCK <= n:
            _reduce_block(out, slots, slot, start, BLOCK, WORLD, OP, BLOCK)
        else:
            _reduce_block(out, slots, slot, start, n - start, WORLD, OP, BLOCK)


@triton.jit
def reduce_scatter_kernel(
    x, out, staging, ready, epochs, n, slot, ctx,
    OP: tl.constexpr, CHANNELS: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    me, channel = dl.rank(ctx), tl.program_id(0)
    epoch = next_epoch(epochs)
    buffer = staging + tl.cast(epoch % 2 * WORLD, tl.int64) * slot
    mine = buffer + tl.cast(me, tl.int64) * slot
    for i in range(0, WORLD):
        peer = dl.owner_first(i + 1, me, WORLD)
        dl.put(mine, x + tl.cast(peer, tl.int64) * n, n, peer, ctx, channel, CHANNELS, BLOCK)
    dl.notify_all(dl.signal_at(ready, channel * WORLD + me), ctx, epoch)
    token = dl.wait(dl.signal_at(ready, channel * WORLD), epoch, ctx, "ge", WORLD)
    reduce_message(out, dl.consume_token(buffer, token), slot, n, OP, CHANNELS, WORLD, BLOCK)
    end_epoch(epochs, epoch)


def need_number(call, dtype):
    need_dtype(call, dtype, DTYPES)


def fold(parts, op="sum"):
    """The parts reduced in the order in which they are given, as the kernels do it, by torch."""
    step = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[op]
    acc = parts[0].to(accumulator(parts[0].dtype))
    for part in parts[1:]:
        acc = step(acc, part.to(acc.dtype))
    return acc.to(parts[0].dtype)


def reference(x, op="sum", group=None):
    """The same by torch: an all-gather over `group`, reduced in the order of ranks. [M / num_ranks, ...]."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return fold([part.chunk(world)[rank] if x.numel() else part[: x.shape[0] // world] for part in parts], op)


class ReduceScatterContext(ChannelContext):
    """What `reduce_scatter` needs besides its operands. Made by `create_reduce_scatter_context`."""

    def __init__(self, max_elements, dtype, team, programs, block):
        super().__init__("reduce_scatter", max_elements, dtype, need_number, team, programs, block)
        self.staging = self.tensor((2, self.num_ranks, self.slot), dtype)
        self.ready = self.signals(self.programs * self.num_ranks)


def create_reduce_scatter_context(max_elements, dtype, team=0, programs=None, block=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        max_elements: most elements of a rank's result, 0 or more.
        dtype: torch.float16, bfloat16, float32, int32 or int64.
        team, programs, block: see `create_all_gather_context`.

    Symmetric memory: 2 * num_ranks * max_elements elements and programs * num_ranks signals.
    Errors: as `create_all_gather_context`.
    """
    return torch_ops.register(ReduceScatterContext(max_elements, dtype, team, programs, block))


def reduce_scatter(x, context, op="sum", out=None):
    """out = rows rank * M .. (rank + 1) * M of the x of all ranks of the context's team, reduced by `op`.

    Args:
        x: [num_ranks * M, ...], contiguous, the same shape on all ranks; M rows have at most max_elements elements. Any
            memory.
        context: of `create_reduce_scatter_context`.
        op: "sum", "max", "min" or "prod", the same on all ranks. A NaN makes the result NaN.
        out: [M, ...], contiguous, written; None: a new tensor. It may be the rows of x that it is the result of.

    Returns: out, the same bits every time: reduced in the order of ranks, 16-bit types in fp32 with one rounding.
    Order, capture and calls of 0 elements: as `all_gather`.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    if out is None and torch.compiler.is_compiling():
        return torch_ops.reduce_scatter(x, context.number, op)
    if op not in OPS or not passed_before(context, operands_of(x, out)):
        begin("reduce_scatter", ReduceScatterContext, context, x=x, out=out)
        need("reduce_scatter", op in OPS, f"op is {op!r}: give one of {', '.join(OPS)}")
        world = context.num_ranks
        fits = x.dim() >= 1 and x.shape[0] % world == 0
        need("reduce_scatter", fits, f"x is {list(x.shape)}: its first extent must be a multiple of the {world} ranks")
        shape = (x.shape[0] // world, *x.shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        n = x.numel() // world
        context.check(x, out, shape, n, own=-context.rank * n, op=op)
    n = out.numel()
    if n:
        arguments = (x, out, context.staging, context.ready, context.epochs, n, context.slot, context.table)
        context.launch(reduce_scatter_kernel, n, arguments, OP=op)
    return out
