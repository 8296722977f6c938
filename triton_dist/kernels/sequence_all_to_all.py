"""All-to-all between the two ways to shard a sequence: by heads (every token, some heads) and by tokens (some tokens,
every head). Attention wants the first, everything around it the second.

    ctx = create_sequence_all_to_all_context(S, H, D, torch.bfloat16)   # once; S tokens and H heads on each rank
    y = transpose_all_to_all(x, ctx)                                    # (S, H * W, D) -> (S * W, H, D)
    x = reverse_all_to_all(y, ctx)                                      # (S * W, H, D) -> (S, H * W, D)
    ctx.free()

Which element goes where, for W ranks of which rank r has the tokens first(r) .. first(r) + S_r - 1 of the sequence (S may be
one number for all, or a list: then S * W below is its sum):

    transpose: y at rank d  [first(s) + t, h, e]  =  x at rank s  [t, d * H + h, e]
    reverse:   x at rank d  [t, s * H + h, e]     =  y at rank s  [first(d) + t, h, e]

Each undoes the other.

How it works. Every program puts its share of the block for each peer into the peer's staging buffer, where blocks lie
without gaps, then copies its share of each block that has arrived to its place in `out`. `ready[buffer][s]` counts the
programs of rank s that have put their part. It only grows.

Two buffers, by the parity of the call, and no acknowledgement. A rank's call e overwrites at a peer what it wrote there in
call e - 2. It begins call e when its call e - 1 is complete, so when it has seen a signal of call e - 1 from every peer,
empty blocks included; a peer sends that in its launch e - 1, which its stream starts when its launch e - 2 has read
everything. This compares two ranks at a time, so it holds for any number of them; and it keeps a peer from adding to a
signal of call e + 2 while somebody still waits for call e. Both directions count as calls. The number of calls so far lies
in device memory, one word a program, so that a captured graph replays right.
"""

import itertools

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import shmem
from triton_dist.language.copy import copy_2d

from .arguments import (
    LAUNCH_OPTIONS,
    WORDS,
    as_int,
    as_words,
    checked_config,
    device_programs,
    need,
    need_apart,
    need_int,
    need_operand,
    need_words,
)
from .operator_context import OperatorContext, agreement, begin


@triton.jit
def sequence_all_to_all_kernel(
    x, out, staging, ready, epochs, offsets, cols, slot, x_stride, out_stride, ctx,
    REVERSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """cols: H * D; slot: elements of a staging slot, as many as the longest block has; offsets: first(r), int32 [W + 1]."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls so far
    buffer, uses = past % 2, past // 2
    first = tl.load(offsets + me)
    tokens = tl.load(offsets + me + 1) - first

    for i in range(0, world):
        peer = (me + world - i) % world  # itself, then who reads this rank's block first
        rows = tokens
        block = x + tl.cast(peer, tl.int64) * cols
        if REVERSE:
            begin = tl.load(offsets + peer)
            rows = tl.load(offsets + peer + 1) - begin
            block = x + tl.cast(begin, tl.int64) * x_stride
        if peer == me:
            place = out + tl.cast(first, tl.int64) * out_stride
            if REVERSE:
                place = out + tl.cast(me, tl.int64) * cols
            copy_2d(place, block, rows, cols, out_stride, x_stride, pid, programs, BLOCK_M, BLOCK_N)
        else:
            dst = staging + tl.cast(buffer * world + me, tl.int64) * slot
            dl.put_2d(dst, block, rows, cols, cols, x_stride, peer, ctx, pid, programs, BLOCK_M, BLOCK_N)
            dl.notify(dl.signal_at(ready, buffer * world + me), peer, ctx, 1, "add")

    for i in range(1, world):
        src = dl.owner_first(i, me, world)
        rows = tokens
        place = out + tl.cast(src, tl.int64) * cols
        if not REVERSE:
            begin = tl.load(offsets + src)
            rows = tl.load(offsets + src + 1) - begin
            place = out + tl.cast(begin, tl.int64) * out_stride
        token = dl.wait(dl.signal_at(ready, buffer * world + src), (uses + 1) * programs, ctx)
        arrived = dl.consume_token(staging + tl.cast(buffer * world + src, tl.int64) * slot, token)
        dl.get_2d(place, arrived, rows, cols, out_stride, cols, me, ctx, pid, programs, BLOCK_M, BLOCK_N)
    tl.store(epochs + pid + tl.arange(0, 1), past + 1 + tl.zeros((1,), tl.int32))


def transpose_reference(x, lengths=None, group=None):
    """(S, H * W, D) -> (S * W, H, D) by an all-gather and slices; `lengths`: tokens of each rank, None: all as x."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = lengths or [x.shape[0]] * world
    H = x.shape[1] // world
    shards = gather_rows(x, [(n, *x.shape[1:]) for n in lengths], group)
    return torch.cat([shard[:, rank * H : (rank + 1) * H] for shard in shards])


def reverse_reference(x, lengths=None, group=None):
    """(S * W, H, D) -> (S, H * W, D) by an all-gather and slices; `lengths`: tokens of each rank, None: equal ones."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = lengths or [x.shape[0] // world] * world
    first = sum(lengths[:rank])
    shards = gather_rows(x, [tuple(x.shape)] * world, group)
    return torch.cat([shard[first : first + lengths[rank]] for shard in shards], dim=1)


def gather_rows(x, shapes, group):
    """x of every rank, padded to one size on the way: not every backend gathers unequal ones."""
    rows = max(shape[0] for shape in shapes)
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    shards = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(shards, padded, group=group)
    return [shard[: shape[0]] for shard, shape in zip(shards, shapes)]


def default_config(dtype):
    """(constexprs of the kernel, programs) that suit this process's platform. Programs of all ranks wait for one another,
    so there are no more of them than the device runs at a time."""
    if triton_dist.backend == "cpu":
        return dict(BLOCK_M=256, BLOCK_N=2048), device_programs()
    return dict(BLOCK_M=16 if triton_dist.backend == "nvidia" else 32, BLOCK_N=512 // dtype.itemsize), device_programs()


class SequenceAllToAllContext(OperatorContext):
    """What the operators need besides their operands. Made by `create_sequence_all_to_all_context`."""

    def __init__(self, lengths, H, D, dtype, team, config, programs):
        super().__init__("sequence_all_to_all", team)
        self.lengths, self.H, self.D, self.dtype = lengths, H, D, dtype
        self.config, self.programs = config, programs
        self.tokens = lengths[self.rank]
        self.slot = max(lengths) * H * D
        self.staging = self.tensor((2, self.num_ranks, self.slot), WORDS[dtype.itemsize])
        self.ready = self.signals(2 * self.num_ranks)
        self.epochs = self.local(programs)
        self.offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)

    @property
    def by_tokens(self):
        """Shape of a tensor sharded by tokens on this rank: (S, H * W, D)."""
        return self.tokens, self.H * self.num_ranks, self.D

    @property
    def by_heads(self):
        """Shape of a tensor sharded by heads: (S * W, H, D)."""
        return sum(self.lengths), self.H, self.D


def rows_fit(call, name, tensor, shape, context):
    """Raises ValueError, naming rank and values, unless `tensor` is what the context was made for, its rows anywhere."""
    fits = tuple(tensor.shape) == tuple(shape)
    need(call, fits, f"{name} is {list(tensor.shape)}, the context was made for {list(shape)}")
    need_operand(call, name, tensor, context.dtype, context.device)
    rows, heads, width = tensor.shape
    adjacent = tensor.numel() == 0 or (
        (tensor.stride(2) == 1 or width == 1)
        and (tensor.stride(1) == width or heads == 1)
        and (tensor.stride(0) >= heads * width or rows == 1)
    )
    need(call, adjacent, f"{name} has strides {tensor.stride()}; a token's {heads} x {width} elements must be adjacent")


def token_lengths(call, S, num_ranks):
    """The tokens of each rank, a list; ValueError, naming rank and values, when S is neither a number nor one for each."""
    lengths = list(S) if isinstance(S, (list, tuple)) else [S] * num_ranks
    need(call, len(lengths) == num_ranks, f"S is {S!r}: give one length for each of the {num_ranks} ranks")
    whole = [as_int(n) for n in lengths]
    need(call, all(n is not None and n >= 0 for n in whole), f"S is {S!r}: give an int of 0 or more, or a list of them")
    need(call, sum(whole) < 2**31, f"S adds up to {sum(whole)} tokens: give less than 2**31")
    return whole


def create_sequence_all_to_all_context(S, H, D, dtype, team=0, config=None, programs=None):
    """Allocates what both directions need, once. Collective over all ranks of the heap.

    Args:
        S: tokens of each rank when sharded by tokens: an int, or a list with one int for each rank of the team. 0 or more.
        H: heads of each rank when sharded by heads, 0 or more.
        D: elements of a head, 0 or more.
        dtype: any torch dtype of 1, 2, 4 or 8 bytes; elements are moved, never computed with.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(dtype)[0]`.
        programs: programs in the grid; not more than the device runs at a time.

    All arguments must be equal on all ranks. Symmetric memory: 2 * num_ranks * max(S) * H * D elements and
    2 * num_ranks signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_sequence_all_to_all_context"
    with agreement(name, team) as agreed:
        lengths = token_lengths(name, S, shmem.team_n_pes(team))
        need_words(name, dtype)
        H, D = need_int(name, "H", H), need_int(name, "D", D)
        config, programs = checked_config(name, default_config(dtype), config, programs, LAUNCH_OPTIONS)
        agreed.on = f"S={S}, H={H}, D={D}, {dtype}, config={config}, programs={programs}"
    return SequenceAllToAllContext(lengths, H, D, dtype, team, config, programs)


def _exchange(call, x, out, context, reverse):
    begin(call, SequenceAllToAllContext, context, x=x, out=out)
    shape_in, shape_out = context.by_tokens, context.by_heads
    if reverse:
        shape_in, shape_out = shape_out, shape_in
    if out is None:
        out = torch.empty(shape_out, dtype=context.dtype, device=context.device)
    rows_fit(call, "x", x, shape_in, context)
    rows_fit(call, "out", out, shape_out, context)
    need_apart(call, out, dict(x=x))
    context.agree(call, "")
    sequence_all_to_all_kernel[(context.programs,)](
        as_words(x), as_words(out), context.staging, context.ready, context.epochs, context.offsets,
        context.H * context.D, context.slot, row_stride(x), row_stride(out), context.table,
        REVERSE=reverse, **context.config,
    )  # fmt: skip
    return out


def row_stride(x):
    """Elements from one token to the next; of one token alone, its own."""
    return max(x.stride(0), x.shape[1] * x.shape[2])


def transpose_all_to_all(x, context, out=None):
    """From sharded by tokens to sharded by heads: (S, H * W, D) -> (S * W, H, D).

    out [first(s) + t, h, e] at rank d = x [t, d * H + h, e] at rank s, where first(s) is the number of tokens of the ranks
    before s.

    Args:
        x: [S of this rank, H * num_ranks, D]; the elements of a token are adjacent, tokens may be apart. Any memory.
        context: of `create_sequence_all_to_all_context`.
        out: [sum of S, H, D], as x, written, no overlap with x; None: a new tensor.

    Returns: out.
    All ranks of the team must make the same calls (of both directions) in the same order. With `out` given nothing is
    allocated, and there is no host synchronisation: the call can be captured in a CUDA graph. `x` may be changed once the
    call is complete on this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    return _exchange("transpose_all_to_all", x, out, context, False)


def reverse_all_to_all(x, context, out=None):
    """From sharded by heads to sharded by tokens: (S * W, H, D) -> (S, H * W, D). Undoes `transpose_all_to_all`.

    out [t, s * H + h, e] at rank d = x [first(d) + t, h, e] at rank s, where first(d) is the number of tokens of the ranks
    before d.

    Args:
        x: [sum of S, H, D]; the elements of a token are adjacent, tokens may be apart. Any memory.
        context: of `create_sequence_all_to_all_context`.
        out: [S of this rank, H * num_ranks, D], as x, written, no overlap with x; None: a new tensor.

    Returns: out. Calls, capture and errors: as `transpose_all_to_all`.
    """
    return _exchange("reverse_all_to_all", x, out, context, True)
