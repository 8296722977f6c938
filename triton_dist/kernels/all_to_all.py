"""All-to-all: every rank sends a piece of its rows to every rank; equal pieces, or as many rows as device counts say.

    ctx = create_all_to_all_context(max_rows, 128, torch.bfloat16)      # once: symmetric memory, signals, epochs
    out = all_to_all(x, ctx)                                            # x: the piece for rank 0, for rank 1, ...
    out, received = all_to_all_v(x, send_counts, ctx)                   # counts stay on the device
    ctx.verify()                                                        # when convenient: did all calls fit?
    ctx.free()

How it works. Every program puts its share of every piece into the peers' staging buffers, then copies its share of each
piece that has arrived to `out`. `ready[buffer][s]` counts the programs of rank s that have put their part. It only grows.

Two buffers, by the parity of the call, and no acknowledgement. A rank's call e overwrites at a peer what it wrote there
in call e - 2. It begins call e when its call e - 1 is complete, so when it has seen a signal of call e - 1 from every
peer, pieces of no rows included; a peer sends that in its launch e - 1, which its stream starts when its launch e - 2 has
read everything. This compares two ranks at a time, so it holds for any number of them; and it keeps a peer from adding
to a signal of call e + 2 while somebody still waits for call e. The number of calls so far lies in device memory, one
word a program, so that a captured graph replays right.

Variable pieces. The staging buffer is packed, so a sender must know what the others send: first each rank stores its
counts into every rank's table (`counts[buffer][s][d]`: rows from s to d; `counted[s]` holds the call's number). Then all
ranks have the same table and decide alike, before any row moves, whether each rank's rows fit into `max_rows`. If not,
nobody moves anything in that call, every `received` is zero, and every rank's status words say why; `verify` raises it.
A rank whose own counts are negative or exceed its x says so in the table, with the same consequence. With equal pieces
each rank sends the number of its rows with them, and a difference ends the same way.
"""

import math

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import shmem
from triton_dist.language.copy import copy

from .arguments import (
    LAUNCH_OPTIONS,
    WORDS,
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

COUNT_LANES = 16  # a rank's counts fill whole lines of 64 bytes
BAD_COUNTS, CROWDED, UNEQUAL = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # status[1]


@triton.jit
def _fail(status, call, kind, who, rows):
    """The first failure stays until the host has read it."""
    lane = tl.arange(0, 1)
    if tl.max(tl.load(status + lane), 0) == 0:
        tl.store(status + 1 + lane, tl.zeros((1,), tl.int32) + kind)
        tl.store(status + 2 + lane, tl.zeros((1,), tl.int32) + who)
        tl.store(status + 3 + lane, tl.zeros((1,), tl.int32) + rows)
        tl.store(status + lane, tl.zeros((1,), tl.int32) + call)


@triton.jit
def all_to_all_kernel(
    x, out, staging, counts, ready, epochs, status, rows, row, max_rows, ctx, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls so far
    buffer, uses = past % 2, past // 2
    lane = tl.arange(0, 1)
    n = tl.cast(rows, tl.int64) * row
    slots = staging + tl.cast(buffer, tl.int64) * max_rows * row  # of max_rows // world rows each
    slot = tl.cast(max_rows // world, tl.int64) * row

    for i in range(1, world):
        peer = (me + world - i) % world  # serves first who reads this rank's piece first
        if pid == 0:
            dl.remote_store(counts + (buffer * world + me) * LANES + lane, tl.zeros((1,), tl.int32) + rows, peer, ctx)
        sig = dl.signal_at(ready, buffer * world + me)
        dl.put_signal(slots + me * slot, x + peer * n, n, sig, peer, ctx, 1, "add", pid, programs, BLOCK)
    copy(out + me * n, x + me * n, n, pid, programs, BLOCK)
    for i in range(1, world):
        src = dl.owner_first(i, me, world)
        token = dl.wait(dl.signal_at(ready, buffer * world + src), (uses + 1) * programs, ctx)
        sent = tl.max(tl.load(dl.consume_token(counts + (buffer * world + src) * LANES, token) + lane), 0)
        if sent == rows:
            dl.get(out + src * n, slots + src * slot, n, me, ctx, pid, programs, BLOCK)
        else:
            if pid == 0:
                _fail(status, past + 1, UNEQUAL, src, sent)
    tl.store(epochs + pid + lane, past + 1 + tl.zeros((1,), tl.int32))


@triton.jit
def _at(vector, lane, i):
    return tl.sum(tl.where(lane == i, vector, 0), 0)


@triton.jit
def _before(vector, lane, i):
    return tl.sum(tl.where(lane < i, vector, 0), 0)


@triton.jit
def all_to_all_v_kernel(
    x, send_counts, out, received, staging, counts, counted, ready, epochs, status, x_rows, row, max_rows, ctx,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls so far
    buffer, uses = past % 2, past // 2
    lane = tl.arange(0, LANES)

    # Program 0 tells every rank, this one included, how many rows it has for whom.
    if pid == 0:
        wide = tl.load(send_counts + lane, mask=lane < world, other=0).to(tl.int64)
        own = tl.minimum(tl.maximum(wide, -1), x_rows + 1).to(tl.int32)
        good = (tl.min(own, 0) >= 0) & (tl.sum(own, 0) <= x_rows)
        own = tl.where(good, own, -1)
        for i in range(0, world):
            peer = dl.owner_first(i, me, world)
            dl.remote_store(counts + (buffer * world + me) * LANES + lane, own, peer, ctx, mask=lane < world)
            dl.notify(dl.signal_at(counted, me), peer, ctx, past + 1)
    token = dl.wait(counted, past + 1, ctx, "ge", world)

    # matrix[s][d]: rows from rank s to rank d; the same on every rank.
    s, d = lane[:, None], lane[None, :]
    cells = dl.consume_token(counts + buffer * world * LANES, token) + s * LANES + d
    matrix = tl.load(cells, mask=(s < world) & (d < world), other=0)
    totals = tl.sum(matrix, 0)
    least = tl.min(matrix, 1)
    refused = tl.min(tl.where(least < 0, lane, LANES), 0)  # the first rank with wrong counts
    crowded = tl.min(tl.where(totals > max_rows, lane, LANES), 0)  # the first rank that would receive too much
    fits = (refused == LANES) & (crowded == LANES)
    if (pid == 0) & (fits == 0):
        if refused < LANES:
            _fail(status, past + 1, BAD_COUNTS, refused, 0)
        else:
            _fail(status, past + 1, CROWDED, crowded, _at(totals, lane, crowded))
    matrix = tl.where(fits, matrix, 0)
    to_send = tl.sum(tl.where(s == me, matrix, 0), 0)  # [d]
    before_mine = tl.sum(tl.where(s < me, matrix, 0), 0)  # [d] where this rank's rows begin at d
    to_receive = tl.sum(tl.where(d == me, matrix, 0), 1)  # [s]
    if pid == 0:
        tl.store(received + lane, to_receive, mask=lane < world)

    row = tl.cast(row, tl.int64)
    packed = staging + tl.cast(buffer, tl.int64) * max_rows * row
    for i in range(1, world):
        peer = (me + world - i) % world
        src = x + _before(to_send, lane, peer) * row
        dst = packed + _at(before_mine, lane, peer) * row
        sig = dl.signal_at(ready, buffer * world + me)
        dl.put_signal(dst, src, _at(to_send, lane, peer) * row, sig, peer, ctx, 1, "add", pid, programs, BLOCK)
    mine = x + _before(to_send, lane, me) * row
    copy(out + _before(to_receive, lane, me) * row, mine, _at(to_send, lane, me) * row, pid, programs, BLOCK)
    for i in range(1, world):
        src = dl.owner_first(i, me, world)
        begin = _before(to_receive, lane, src) * row
        token = dl.wait(dl.signal_at(ready, buffer * world + src), (uses + 1) * programs, ctx)
        piece = dl.consume_token(packed + begin, token)
        dl.get(out + begin, piece, _at(to_receive, lane, src) * row, me, ctx, pid, programs, BLOCK)
    tl.store(epochs + pid + tl.arange(0, 1), past + 1 + tl.zeros((1,), tl.int32))


def reference(x, send_counts=None, group=None):
    """The same by torch.distributed: (received rows [n, ...], received counts as a list of ints)."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [x.shape[0] // world] * world if send_counts is None else send_counts.tolist()
    shards, tables = [None] * world, [None] * world
    dist.all_gather_object(tables, counts, group=group)
    dist.all_gather_object(shards, x.cpu(), group=group)
    pieces = [torch.split(shard[: sum(table)], table)[rank] for shard, table in zip(shards, tables)]
    return torch.cat(pieces).to(x.device), [table[rank] for table in tables]


def default_config(dtype):
    """(constexprs of the kernels, programs) that suit this process's platform. Programs of all ranks wait for one another,
    so there are no more of them than the device runs at a time."""
    nbytes = {"cpu": 1 << 20, "nvidia": 8192}.get(triton_dist.backend, 16384)
    return dict(BLOCK=nbytes // dtype.itemsize), device_programs()


class AllToAllContext(OperatorContext):
    """What the operators need besides their operands. Made by `create_all_to_all_context`."""

    def __init__(self, max_rows, row_shape, dtype, team, config, programs):
        super().__init__("all_to_all", team)
        self.max_rows, self.row_shape, self.dtype = max_rows, row_shape, dtype
        self.config, self.programs = config, programs
        self.row = math.prod(row_shape)
        self.lanes = max(COUNT_LANES, triton.next_power_of_2(self.num_ranks))
        self.staging = self.tensor((2, max_rows, self.row), WORDS[dtype.itemsize])
        self.counts = self.tensor((2, self.num_ranks, self.lanes), torch.int32)
        self.counted = self.signals(self.num_ranks)
        self.ready = self.signals(2 * self.num_ranks)
        self.epochs, self.status = self.local(programs), self.local(4)

    def verify(self):
        """Raises ValueError if the rows of a call since the last `verify` did not fit (see the operators): on all ranks of
        the team alike, naming the first such call. Waits for this rank's device."""
        call, kind, who, rows = self.status.tolist()
        if not call:
            return
        self.status.zero_()
        if kind == BAD_COUNTS.value:
            why = f"no row moved: rank {who} gave send_counts that are negative or more than its rows of x"
        elif kind == CROWDED.value:
            why = f"no row moved: rank {who} would receive {rows} rows, the context's max_rows is {self.max_rows}"
        else:
            why = f"rank {who} sent {rows} rows to each rank, this rank another number: all_to_all wants equal pieces"
        raise ValueError(f"rank {shmem.my_pe()}: all_to_all: call {call} of this context: {why}")

    def check(self, call, x, out, out_rows, **counts):
        """Raises ValueError, naming rank and values, unless the operands fit."""

        def fit(fits, text):
            need(call, fits, text)

        for name, tensor in (("x", x), ("out", out)):
            shape = list(tensor.shape)
            need_operand(call, name, tensor, self.dtype, self.device)
            fit(
                tensor.dim() > 0 and tuple(tensor.shape[1:]) == self.row_shape,
                f"{name} is {shape}, the context was made for rows of {list(self.row_shape)}",
            )
            fit(tensor.is_contiguous(), f"{name} has strides {tensor.stride()}; rows are put as they lie: make it contiguous")
        fit((x.shape[0] + 1) * self.num_ranks < 2**31, f"x has {x.shape[0]} rows, too many to count in int32")
        if counts:
            fit(out.shape[0] >= out_rows, f"out has {out.shape[0]} rows, it must have {out_rows} or more")
        else:
            fit(x.shape[0] % self.num_ranks == 0, f"x has {x.shape[0]} rows, no multiple of {self.num_ranks} ranks")
            slot = self.max_rows // self.num_ranks
            fit(
                x.shape[0] <= slot * self.num_ranks,
                f"x has {x.shape[0]} rows, the context's max_rows is {self.max_rows}: {slot} for each of {self.num_ranks}",
            )
            fit(out.shape[0] == out_rows, f"out has {out.shape[0]} rows, it must have {out_rows}")
        for name, tensor in counts.items():
            kinds = (torch.int32, torch.int64) if name == "send_counts" else (torch.int32,)
            wanted = " or ".join(map(str, kinds))
            fit(
                tuple(tensor.shape) == (self.num_ranks,) and tensor.dtype in kinds and tensor.is_contiguous(),
                f"{name} is {tensor.dtype} {list(tensor.shape)}, it must be {wanted} [{self.num_ranks}], contiguous",
            )
            fit(tensor.device == self.device, f"{name} is on {tensor.device}, not on {self.device}")
        need_apart(call, out, dict(x=x))
        self.agree(call, "")


def create_all_to_all_context(max_rows, row_shape, dtype, team=0, config=None, programs=None):
    """Allocates what both operators need, once. Collective over all ranks of the heap.

    Args:
        max_rows: the most rows that one rank receives in a call from all ranks together, its own included; 0 or more.
        row_shape: shape of a row: an int or a tuple of ints of 0 or more, `()` for scalars.
        dtype: any torch dtype of 1, 2, 4 or 8 bytes; elements are moved, never computed with.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(dtype)[0]`.
        programs: programs in the grid; not more than the device runs at a time.

    All arguments must be equal on all ranks. Symmetric memory: 2 * max_rows rows, 3 * num_ranks signals, and 64 bytes or
    more for each rank's counts, twice.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_all_to_all_context"
    with agreement(name, team) as agreed:
        need_words(name, dtype)
        shape = tuple(row_shape) if isinstance(row_shape, (tuple, list)) else (row_shape,)
        shape = tuple(need_int(name, "an extent of row_shape", n) for n in shape)
        max_rows = need_int(name, "max_rows", max_rows)
        need(name, max_rows < 2**31, f"max_rows is {max_rows}: give less than 2**31")
        config, programs = checked_config(name, default_config(dtype), config, programs, LAUNCH_OPTIONS)
        agreed.on = f"max_rows={max_rows}, row_shape={shape}, {dtype}, config={config}, programs={programs}"
    return AllToAllContext(max_rows, shape, dtype, team, config, programs)


def all_to_all(x, context, out=None):
    """Rank r's i-th piece becomes rank i's r-th piece: `torch.distributed.all_to_all_single` with equal splits.

    Args:
        x: [num_ranks * R, *row_shape], contiguous, R rows for each rank in rank order; R may be 0 and may differ from call
            to call, not between ranks; at most max_rows // num_ranks. Any memory.
        context: of `create_all_to_all_context`.
        out: like x, contiguous, written, no overlap with x; None: a new tensor.

    Returns: out. Rows [s * R, (s + 1) * R) are rank s's piece for this rank.
    All ranks of the team must make the same calls (of both operators) in the same order. With `out` given nothing is
    allocated, and there is no host synchronisation: the call can be captured in a CUDA graph. `x` may be changed once the
    call is complete on this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context. When R differs between ranks
    the pieces of other sizes are not written and `context.verify()` raises on all ranks.
    """
    begin("all_to_all", AllToAllContext, context, x=x, out=out)
    if out is None:
        out = torch.empty_like(x)
    context.check("all_to_all", x, out, x.shape[0] if x.dim() else 0)
    all_to_all_kernel[(context.programs,)](
        as_words(x), as_words(out), context.staging, context.counts, context.ready, context.epochs, context.status,
        x.shape[0] // context.num_ranks, context.row, context.max_rows, context.table, LANES=context.lanes,
        **context.config,
    )  # fmt: skip
    return out


def all_to_all_v(x, send_counts, context, out=None, received=None):
    """Sends `send_counts[i]` rows to rank i; the counts are read on the device.

    Args:
        x: [rows, *row_shape], contiguous: the rows for rank 0 first, then those for rank 1, and so on. It may have more
            rows than the counts add up to. Any memory.
        send_counts: [num_ranks], int32 or int64, on the device; 0 is allowed.
        context: of `create_all_to_all_context`.
        out: [max_rows or more, *row_shape], contiguous, written, no overlap with x; None: a new tensor of max_rows rows.
        received: [num_ranks] int32, written; None: a new tensor.

    Returns: (out, received): rows from rank 0 first, then those from rank 1, and so on; received[s] of them are from rank
    s. Rows after these are not written.
    Overflow: when some rank would receive more than max_rows rows, or some rank's counts are negative or exceed its x, no
    row moves in that call on any rank and received is all zeros; `context.verify()` raises on all ranks. Later calls work.
    Ordering, capture and errors: as `all_to_all`; nothing is allocated with both out and received given.
    """
    begin("all_to_all_v", AllToAllContext, context, x=x, send_counts=send_counts, out=out, received=received)
    if out is None:
        out = torch.empty(context.max_rows, *context.row_shape, dtype=x.dtype, device=x.device)
    if received is None:
        received = torch.empty(context.num_ranks, dtype=torch.int32, device=x.device)
    context.check("all_to_all_v", x, out, context.max_rows, send_counts=send_counts, received=received)
    all_to_all_v_kernel[(context.programs,)](
        as_words(x), send_counts, as_words(out), received, context.staging, context.counts, context.counted,
        context.ready, context.epochs, context.status, x.shape[0], context.row, context.max_rows, context.table,
        LANES=context.lanes, **context.config,
    )  # fmt: skip
    return out, received
