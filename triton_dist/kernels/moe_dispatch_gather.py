"""MoE dispatch, the portable method `gather` of `moe_dispatch`: everything into the inboxes, then rows are gathered from them.
With the layout `tokens` they are not: the inbox is the result, and the slots' places in it the index.

How it works. Every program numbers its tokens' slots by expert, and its tokens by the ranks that they go to. The sums
over programs, one line of E + W + 1 numbers a rank, go to every rank (`counts`, signal `counted[s]`: set by one program of
rank s to the number of the call). From that matrix all ranks derive the same things: where each rank's tokens begin in every
inbox, the row of every slot, and whether anything overflows anywhere; if so nobody sends. Then a program puts its
tokens into the inboxes, and for every slot two words: the token's place in the inbox and where it came from. `filled[s]`
counts rank s's programs that have done so. At last the rows are gathered from the inbox into the result.

Why nothing is overwritten early, whatever the number of ranks. A rank's counts of call e say that it has finished call
e - 1, because its calls follow one another on its stream. Inbox and maps are written in call e only after the counts of
all ranks for call e are here, so nobody still reads what call e - 1 left, nor do kernels that followed it on a rank's stream.
The counts themselves are doubled by the parity of e: a rank that writes those of call e has finished call e - 1, for which it
needed everybody's counts, so everybody had finished call e - 2. `filled` has several writers, but for the same reason none
of them adds for call e + 1 before its reader has finished call e. So no acknowledgements are needed. The number of the call
lies in device memory, a word a program, so that a captured graph replays right.
"""

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from .arguments import device_programs
from .moe_quantization import GROUP, quantize_tile
from .moe_routing import count_slots, expert_of, rows_from_counts, sum_lines

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _send_rows(
    x, inbox, scales, start, end, at, goes, H, stride_x, peer, ctx,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    # Loads are masked by ranges alone, not by `goes`: Ascend would read all lanes, past the end of x too, and then choose.
    t = start + tl.arange(0, BLOCK_T)
    inside = (t < end)[:, None]
    from_row = x + t[:, None].to(tl.int64) * stride_x
    to = at.to(tl.int64)[:, None]
    h = tl.arange(0, BLOCK_H)
    for first in range(0, H, BLOCK_H):
        cols = (first + h)[None, :]
        mask = goes[:, None] & (cols < H)
        if FP8:
            groups = tl.cdiv(H, _GROUP)
            tile, scale = quantize_tile(tl.load(from_row + cols, mask=inside & (cols < H), other=0.0), BLOCK_T, BLOCK_H)
            dl.remote_store(inbox + to * H + cols, tile.to(inbox.dtype.element_ty), peer, ctx, mask)
            group = first // _GROUP + tl.arange(0, BLOCK_H // _GROUP)[None, :]
            dl.remote_store(scales + to * groups + group, scale, peer, ctx, goes[:, None] & (group < groups))
        else:
            tile = tl.load(from_row + cols, mask=inside & (cols < H))
            tl.store(dl.symm_at(inbox, peer, ctx) + to * H + cols, tile, mask=mask)


@triton.jit
def _gather_rows(
    out, out_scales, inbox, scales, row, at, valid, H, BLOCK_H: tl.constexpr, FP8: tl.constexpr
):
    """The inbox's places `at` into the valid ones of the rows."""
    of, to = tl.maximum(at, 0).to(tl.int64)[:, None], row.to(tl.int64)[:, None]
    h = tl.arange(0, BLOCK_H)
    for first in range(0, H, BLOCK_H):
        mask = valid[:, None] & (first + h < H)[None, :]
        tl.store(out + to * H + (first + h)[None, :], tl.load(inbox + of * H + (first + h)[None, :], mask=mask), mask=mask)
    if FP8:
        groups = tl.cdiv(H, _GROUP)
        for first in range(0, groups, 64):
            group = (first + tl.arange(0, 64))[None, :]
            mask = valid[:, None] & (group < groups)
            tl.store(out_scales + to * groups + group, tl.load(scales + of * groups + group, mask=mask), mask=mask)


@triton.jit
def moe_dispatch_kernel(
    x, ids, owners, first_expert, out, out_scales, index, out_counts, number, out_origin, out_rows, totals,
    inbox, scales, source, origin, counts, arrived, counted, filled, place, partial, base, epochs,
    T, H, topk, E, max_tokens, max_received, max_rows, stride_x, stride_t, stride_k, ctx,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls before this one
    width = E + world + 1
    c = tl.arange(0, COLUMNS)

    # Count the own tokens, and tell all ranks.
    share = tl.cdiv(T, programs)
    begin = tl.minimum(pid * share, T)
    end = tl.minimum(begin + share, T)
    count_slots(ids, owners, number, place, partial + pid * width, begin, end, topk, stride_t, stride_k, E, world,
           BLOCK_T, K_PAD, COLUMNS)  # fmt: skip
    dl.notify(arrived, me, ctx, 1, "add")
    matrix = counts + (past - past // 2 * 2) * world * width
    d = pid
    while d < world:
        token = dl.wait(arrived, (past + 1) * programs, ctx)
        line = sum_lines(dl.consume_token(partial, token), programs, c, width, COLUMNS)
        dl.remote_store(matrix + me * width + c, line, d, ctx, c < width)
        dl.notify(dl.signal_at(counted, me), d, ctx, past + 1)
        d += programs

    # Where everything goes. Columns: E experts, then the tokens that go to each rank, then the ids that do not exist.
    token = dl.wait(counted, past + 1, ctx, "ge", world)
    matrix = dl.consume_token(matrix, token)
    total = sum_lines(matrix, world, c, width, COLUMNS)
    begins = sum_lines(matrix, me, c, width, COLUMNS) + sum_lines(partial, pid, c, width, COLUMNS)
    begins, failed, rows_here = rows_from_counts(
        total, begins, matrix, first_expert, totals, None, pid == 0, c, width, E, me, world, max_received, max_rows
    )
    tl.store(base + pid * width + c, begins, mask=c < width)
    tl.debug_barrier()
    if pid == 0:
        low, high = tl.load(first_expert + me), tl.load(first_expert + me + 1)
        here = (c >= low) & (c < high)
        tl.store(out_counts + tl.where(here, c - low, 0), tl.where(failed > 0, 0, total), mask=here)
        tl.store(out_rows + tl.arange(0, 1), tl.where(failed > 0, -1, rows_here))

    # Send the own tokens, each to a rank once, and tell for every slot which place in the inbox its row comes from.
    t_lane, j = tl.arange(0, BLOCK_T), tl.arange(0, K_PAD)
    start = begin
    end = tl.where(failed > 0, begin, end)
    while start < end:
        t = (start + t_lane)[:, None]
        inside = (t < end) & (j < topk)[None, :]
        slot = t * topk + j[None, :]
        n = tl.load(number + slot, mask=inside, other=-1)
        p = tl.load(place + slot, mask=inside, other=-1)
        kept, leads = n >= 0, p >= 0
        e = tl.where(kept, expert_of(ids, t.to(tl.int64) * stride_t + j[None, :] * stride_k, inside, E), 0)
        owner = tl.load(owners + e, mask=kept, other=0)
        row = tl.where(kept, n + tl.load(base + pid * width + e, mask=kept, other=0), 0)
        spot = tl.where(leads, p + tl.load(base + pid * width + E + owner, mask=leads, other=0), 0)
        for i in range(1, world + 1):
            peer = dl.owner_first(i, me, world)  # the own rank last: the link starts first
            here = kept & (owner == peer)
            at = tl.sum(tl.where(leads & here, spot, 0), 1)
            goes = tl.sum(here.to(tl.int32), 1) > 0
            dl.remote_store(source + row, tl.broadcast_to(at[:, None], (BLOCK_T, K_PAD)), peer, ctx, here)
            dl.remote_store(origin + row, me * max_tokens * topk + slot, peer, ctx, here)
            _send_rows(x, inbox, scales, start, end, at, goes, H, stride_x, peer, ctx, BLOCK_T, BLOCK_H, FP8)
        start += BLOCK_T
    dl.notify_all(dl.signal_at(filled, me), ctx, 1, "add")

    # Gather the rows, or tell where they are.
    token = dl.wait(filled, (past + 1) * programs, ctx, "ge", world)
    inbox = dl.consume_token(inbox, token)
    r_lane = tl.arange(0, BLOCK_R)
    start = tl.where(failed > 0, rows_here, pid * BLOCK_R)
    while start < rows_here:
        row = start + r_lane
        valid = row < rows_here
        tl.store(out_origin + row, tl.load(origin + row, mask=valid), mask=valid)
        at = tl.load(source + row, mask=valid, other=0)
        if index is None:
            _gather_rows(out, out_scales, inbox, scales, row, at, valid, H, BLOCK_H, FP8)
        else:
            tl.store(index + row, at, mask=valid)
        start += programs * BLOCK_R
    tl.store(epochs + pid + tl.arange(0, 1), past + 1)


def gather_config(max_tokens, layout="rows"):
    """(constexprs and launch options of the kernel, programs) that suit this process's platform."""
    if triton_dist.backend == "cpu":
        return dict(BLOCK_T=64, BLOCK_R=64, BLOCK_H=1024), device_programs()
    words = dict(BLOCK_R=128) if layout == "tokens" else {}  # of a row only a word is moved
    if triton_dist.backend == "nvidia":
        if max_tokens <= 2 * device_programs():  # a token a program, all of a row on its way at once
            return dict(BLOCK_T=1, BLOCK_R=8, BLOCK_H=2048, num_warps=16) | words, device_programs()
        # maxnreg: so that two programs share a multiprocessor, as they must
        return dict(BLOCK_T=2, BLOCK_R=4, BLOCK_H=4096, num_warps=8, maxnreg=128) | words, 2 * device_programs()
    return dict(BLOCK_T=8, BLOCK_R=8, BLOCK_H=512) | words, device_programs()


class MoeDispatchGather:
    """Buffers of a context. Symmetric memory: max_received tokens of the payload (and their scales), 8 bytes a row,
    2 * W * (E + W + 1) * 4 bytes of counts, 2 * W + 1 signals."""

    def __init__(self, owner, config, programs):
        """`owner`: the MoeDispatchContext that the memory belongs to."""
        self.owner, self.config, self.programs = owner, config, programs
        world = owner.num_ranks
        width = owner.E + world + 1
        self.columns = triton.next_power_of_2(width)
        received, rows = max(owner.max_received, 1), max(owner.max_rows, 1)
        self.inbox = owner.tensor((received, owner.H), owner.payload_dtype)
        self.scales = owner.tensor((received if owner.fp8 else 1, owner.groups), torch.float32)
        self.source, self.origin, self.counts = (
            owner.tensor(shape, torch.int32) for shape in ((rows,), (rows,), (2, world, width))
        )
        self.arrived = owner.signals(1)
        self.counted, self.filled = (owner.signals(world) for _ in range(2))
        self.place = owner.local(owner.max_tokens, owner.topk)
        self.partial, self.base = owner.local(programs, width), owner.local(programs, width)
        self.epochs = owner.local(programs)

    def __call__(self, x, ids, tokens, scales, counts, handle):
        o = self.owner
        if handle.index is not None:
            tokens = scales = None
        elif scales is None:
            scales = self.scales
        moe_dispatch_kernel[(self.programs,)](
            x, ids, o.owner_table, o.first_expert, tokens, scales, handle.index, counts, handle.number, handle.origin,
            handle.rows, handle.totals, self.inbox, self.scales, self.source, self.origin, self.counts, self.arrived,
            self.counted, self.filled, self.place, self.partial, self.base, self.epochs, x.shape[0], o.H, o.topk, o.E,
            o.max_tokens, o.max_received, o.max_rows, x.stride(0), ids.stride(0), ids.stride(1), o.table,
            **self.config, K_PAD=o.k_pad, COLUMNS=self.columns, FP8=o.fp8,
        )  # fmt: skip
