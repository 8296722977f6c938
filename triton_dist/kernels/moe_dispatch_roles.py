"""What the programs of the method `pipelined` of `moe_dispatch` do in both of its kernels: putters and the teller all they do,
placers what comes before the rows. moe_dispatch_pipelined.py says who waits for whom, and why nothing is overwritten early."""

import triton
import triton.language as tl

from triton_dist import language as dl

from .moe_quantization import GROUP, quantize_tile
from .moe_routing import MOST_CHUNK, expert_of, number_by_expert, rows_from_counts, sum_lines

_GROUP = tl.constexpr(GROUP)
_MARKED = tl.constexpr(MOST_CHUNK)  # tokens marked at a time
_TOLD = tl.constexpr(2048)  # slots told at a time


@triton.jit
def _mark_tokens(
    ids, first_expert, goes, T, topk, E, max_tokens, stride_t, stride_k, me, world, pid,
    PUTTERS: tl.constexpr, CHUNK: tl.constexpr, K_PAD: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """goes[i - 1, t]: whether token t of this putter's chunks goes to the peer of step i; OWN, 0 or 1: this rank is the last
    one. In a block of its own, for beside the tokens' columns every thread would read all ids."""
    j = tl.arange(0, K_PAD)[None, :]
    n = tl.arange(0, _MARKED)
    first = pid * CHUNK
    while first < T:
        t = first + n // CHUNK * (PUTTERS * CHUNK) + n % CHUNK
        at = t[:, None].to(tl.int64) * stride_t + j * stride_k
        e = expert_of(ids, at, (t < T)[:, None] & (j < topk), E)
        for i in range(1, world + OWN):
            peer = dl.owner_first(i, me, world)
            low, high = tl.load(first_expert + peer), tl.load(first_expert + peer + 1)
            some = tl.max(((e >= low) & (e < high)).to(tl.int32), 1)
            tl.store(goes + (i - 1) * max_tokens + t, some, mask=t < T)
        first += PUTTERS * _MARKED
    tl.debug_barrier()


@triton.jit
def _put_tokens(
    x, goes, inbox, scales, start, end, H, max_tokens, stride_x, me, world, ctx,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, FP8: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Tokens start .. start + BLOCK_P - 1, below end, to the inboxes of the peers that have one of their experts. OWN, 0 or 1:
    inboxes have a region for every rank, and the own inbox gets its tokens, too."""
    t = start + tl.arange(0, BLOCK_P)
    inside = t < end
    from_row = x + t[:, None].to(tl.int64) * stride_x
    h = tl.arange(0, BLOCK_H)
    for first in range(0, H, BLOCK_H):
        cols = (first + h)[None, :]
        tile = tl.load(from_row + cols, mask=inside[:, None] & (cols < H), other=0.0)
        if FP8:
            groups = tl.cdiv(H, _GROUP)
            group = first // _GROUP + tl.arange(0, BLOCK_H // _GROUP)[None, :]
            scaled, scale = quantize_tile(tile, BLOCK_P, BLOCK_H)
            tile = scaled.to(inbox.dtype.element_ty)
        for i in range(1, world + OWN):
            peer = dl.owner_first(i, me, world)
            sent = (tl.load(goes + (i - 1) * max_tokens + t, mask=inside, other=0) > 0)[:, None]
            region = me if OWN else world - 1 - i  # the peer sees this rank in its step world - i
            to = (region * max_tokens + t).to(tl.int64)[:, None]
            tl.store(dl.symm_at(inbox, peer, ctx) + to * H + cols, tile, mask=sent & (cols < H))
            if FP8:
                dl.remote_store(scales + to * groups + group, scale, peer, ctx, sent & (group < groups))


@triton.jit
def putter(
    x, ids, first_expert, inbox, scales, begun, sent, goes, past, pid, chunks, T, H, topk, E, max_tokens,
    stride_x, stride_t, stride_k, me, world, ctx,
    PUTTERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, K_PAD: tl.constexpr,
    FP8: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """What a putter does. OWN: see `_put_tokens`; nobody is told of the own tokens."""
    if pid == 0:
        dl.notify_all(dl.signal_at(begun, me), ctx, past + 1)
    _mark_tokens(ids, first_expert, goes, T, topk, E, max_tokens, stride_t, stride_k, me, world, pid,
                 PUTTERS, CHUNK, K_PAD, OWN)  # fmt: skip
    token = dl.wait(begun, past + 1, ctx, "ge", world)
    free = dl.consume_token(inbox, token)
    free_scales = dl.consume_token(scales, token)
    chunk = pid
    while chunk * CHUNK < T:
        end = tl.minimum(chunk * CHUNK + CHUNK, T)
        start = chunk * CHUNK
        while start < end:
            _put_tokens(x, goes, free, free_scales, start, end, H, max_tokens, stride_x, me, world, ctx,
                        BLOCK_P, BLOCK_H, FP8, OWN)  # fmt: skip
            start += BLOCK_P
        for i in range(1, world):
            dl.notify(dl.signal_at(sent, me * chunks + chunk), dl.owner_first(i, me, world), ctx, past + 1)
        chunk += PUTTERS


@triton.jit
def _tell_counts(
    partial, counts, counted, lines, T, E, past, me, world, ctx, COLUMNS: tl.constexpr
):
    """The sums of this rank's lines of counts, to all ranks."""
    c = tl.arange(0, COLUMNS)
    width = E + world + 2
    line = sum_lines(partial, lines, c, COLUMNS, COLUMNS)
    line = tl.where(c == E + world + 1, T, line)
    for i in range(0, world):
        to = counts + ((past - past // 2 * 2) * world + me) * width + c
        dl.remote_store(to, line, dl.owner_first(i + 1, me, world), ctx, c < width)
    dl.notify_all(dl.signal_at(counted, me), ctx, past + 1)


@triton.jit
def _tell_rows(
    ids, first_expert, number, rows, mapped, T, topk, E, max_tokens, stride_t, stride_k, past, me, world, ctx,
    K_PAD: tl.constexpr,
):  # fmt: skip
    """Every peer the rows of the slots that live there."""
    TOKENS: tl.constexpr = _TOLD // K_PAD if K_PAD < _TOLD else 1
    j = tl.arange(0, K_PAD)[None, :]
    start = 0
    while start < T:
        t = (start + tl.arange(0, TOKENS))[:, None]
        inside = (t < T) & (j < topk)
        slot = t * topk + j
        row = tl.load(number + slot, mask=inside, other=-1)
        e = expert_of(ids, t.to(tl.int64) * stride_t + j * stride_k, inside, E)
        for i in range(1, world):
            peer = dl.owner_first(i, me, world)
            low, high = tl.load(first_expert + peer), tl.load(first_expert + peer + 1)
            there = tl.where((e >= low) & (e < high), row, -1)
            dl.remote_store(rows + me * max_tokens * topk + slot, there, peer, ctx, inside)
        start += TOKENS
    dl.notify_all(dl.signal_at(mapped, me), ctx, past + 1)


@triton.jit
def teller(
    ids, first_expert, number, rows, counts, arrived, counted, numbered, mapped, partial, past, share,
    T, topk, E, max_tokens, stride_t, stride_k, me, world, ctx, K_PAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the teller does."""
    shares = shares_of(T, share)
    token = dl.wait(arrived, past + 1, ctx, "ge", shares)
    _tell_counts(dl.consume_token(partial, token), counts, counted, shares, T, E, past, me, world, ctx, COLUMNS)
    token = dl.wait(numbered, past + 1, ctx, "ge", shares)
    _tell_rows(ids, first_expert, dl.consume_token(number, token), rows, mapped, T, topk, E, max_tokens, stride_t,
               stride_k, past, me, world, ctx, K_PAD)  # fmt: skip


@triton.jit
def placer_of(position, placers, programs):
    """The number of the placer that is the `position`-th program after the putters: those that share a multiprocessor with a
    putter come last, without tokens to number if there are placers enough. A device with room for two programs a
    multiprocessor gives each one first: program p shares that of p + programs / 2. Only the time depends on that."""
    turn = tl.cdiv(programs, 2) % placers
    return (position + placers - turn) % placers


@triton.jit
def share_of(T, placers, BLOCK: tl.constexpr):
    """Tokens that a placer numbers, if any: whole blocks, so that the last placers have none."""
    return tl.maximum(tl.cdiv(tl.cdiv(T, placers), BLOCK), 1) * BLOCK


@triton.jit
def shares_of(T, share):
    """How many placers, the first ones, number tokens; the first one always does, if only none."""
    return tl.maximum(tl.cdiv(T, share), 1)


@triton.jit
def _notify_here(sig, value):
    """`dl.notify` for the programs of this rank alone: a release at the scope of the device, which no store on its way to a
    peer has to hold up."""
    tl.debug_barrier()
    tl.atomic_xchg(sig, value, sem="release", scope="gpu")


@triton.jit
def number_rows(
    ids, first_expert, out_counts, number, out_tokens, out_rows, totals, rows, counts, arrived, counted, numbered, partial,
    base, past, placer, share, T, topk, E, max_tokens, max_received, max_rows, stride_t, stride_k, me, world, ctx,
    BLOCK_C: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Counts the own tokens, a placer's share of them, and leaves the rows of their slots in `number`, those that are here in
    `rows`. Returns: (whether the call fails, 0 if not; `counts` of all ranks; numbers of a rank there)."""
    width = E + world + 2  # experts, tokens that go to each rank, ids that do not exist, tokens
    c = tl.arange(0, COLUMNS)

    # Count the own tokens. The sums over placers and over ranks follow while the counts of the others come.
    numbers = placer < shares_of(T, share)
    begin = tl.minimum(placer * share, T)
    end = tl.minimum(begin + share, T)
    if numbers:
        number_by_expert(ids, first_expert, number, partial + placer * COLUMNS, begin, end, topk, stride_t, stride_k, E, world,
               BLOCK_C, K_PAD, COLUMNS)  # fmt: skip
        _notify_here(dl.signal_at(arrived, placer), past + 1)
    earlier = tl.where(numbers, placer, 0)  # nobody else's sum is needed
    if earlier > 0:
        dl.wait(arrived, past + 1, ctx, "ge", earlier)
    begins = sum_lines(partial, earlier, c, COLUMNS, COLUMNS)

    # The row of every slot.
    token = dl.wait(counted, past + 1, ctx, "ge", world)
    matrix = dl.consume_token(counts, token) + (past - past // 2 * 2) * world * width
    total = tl.zeros((COLUMNS,), tl.int32)
    line = tl.arange(0, 8)[:, None]
    for first in range(0, world, 8):
        mask = (first + line < world) & (c < width)[None, :]
        lines = tl.load(matrix + (first + line) * width + c[None, :], mask=mask, other=0)
        total += tl.sum(lines, 0)
        begins += tl.sum(tl.where(first + line < me, lines, 0), 0)
    begins, failed, rows_here = rows_from_counts(
        total, begins, matrix, first_expert, totals, out_tokens, placer == 0, c, width, E, me, world, max_received, max_rows
    )
    tl.store(base + placer * COLUMNS + c, begins)
    tl.debug_barrier()
    low, high = tl.load(first_expert + me), tl.load(first_expert + me + 1)
    if placer == 0:
        here = (c >= low) & (c < high)
        tl.store(out_counts + tl.where(here, c - low, 0), tl.where(failed > 0, 0, total), mask=here)
        tl.store(out_rows + tl.arange(0, 1), tl.where(failed > 0, -1, rows_here))

    # The rows of the own tokens' slots: all for the program that tells the peers, those that are here for the placers.
    t_lane, j = tl.arange(0, BLOCK_C), tl.arange(0, K_PAD)
    start = begin
    end = tl.where(failed > 0, begin, end)
    while start < end:
        t = (start + t_lane)[:, None]
        inside = (t < end) & (j < topk)[None, :]
        slot = t * topk + j[None, :]
        n = tl.load(number + slot, mask=inside, other=-1)
        kept = n >= 0
        e = tl.where(kept, expert_of(ids, t.to(tl.int64) * stride_t + j[None, :] * stride_k, inside, E), 0)
        row = tl.where(kept, n + tl.load(base + placer * COLUMNS + e, mask=kept, other=0), -1)
        tl.store(number + slot, row, mask=inside)
        tl.store(rows + me * max_tokens * topk + slot, tl.where((e >= low) & (e < high), row, -1), mask=inside)
        start += BLOCK_C
    if numbers:
        _notify_here(dl.signal_at(numbered, placer), past + 1)
    return failed, matrix, width


@triton.jit
def name_rows(out_origin, out_map, index, rows, t, inside, source, topk, max_tokens, K_PAD: tl.constexpr):
    """Where the rows of the tokens t, those inside, of rank `source` come from, and which rows their slots have here. `rows`:
    of the source's slots. index: None, or gets for each row its token's place, source * max_tokens + token."""
    j = tl.arange(0, K_PAD)[None, :]
    slot = t[:, None] * topk + j
    named = inside[:, None] & (j < topk)
    row = tl.load(rows + slot, mask=named, other=-1)
    origin = source * max_tokens * topk + slot
    tl.store(out_origin + row, origin, mask=row >= 0)
    tl.store(out_map + origin, row, mask=named)
    if index is not None:
        place = (source * max_tokens + t)[:, None]
        tl.store(index + row, tl.broadcast_to(place, row.shape), mask=row >= 0)
