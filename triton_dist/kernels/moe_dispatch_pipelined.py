"""MoE dispatch for GPUs, the method `pipelined` of `moe_dispatch`: the link works from the first moment on, and rows of the
tokens that have come are written meanwhile. For the layout `tokens`, which has no rows, see moe_dispatch_pipelined_tokens.py.

Some programs put (putters), the others count and place (placers), one tells: counts to all ranks, rows to the peers.

- Putters need no counts: a token has the same place in every inbox, in the region of its rank. They go through the tokens in
  chunks, and say of each chunk when it is complete: `sent[s][c]`, set to the number of the call.
- Placers number their tokens' slots by expert, a share of whole blocks of tokens each, so that the last placers have none and
  there are few lines to sum. `arrived[p]`, set to the number of the call, says that placer p has done so. The teller's sums
  over shares, one line of E + W + 2 numbers a rank, go to every rank (`counts`; `counted[s]`, set to the number of the call).
  From that matrix all ranks derive the row of every slot, and whether anything overflows anywhere; if so nobody places. A
  placer writes the rows of its tokens' slots into this rank's memory alone, those that are here into `rows` (-1 for the
  others); `numbered[p]`, set to the number of the call, says so. Who places tokens waits for the placers that numbered them.
  Peers need theirs only after their own tokens, so the teller sends them, while the placers go on: a release
  waits until its program's stores are at the peer, behind tokens that fill the link. `mapped[s]`, set to the
  number of the call, says that rank s's rows are here. A placer stores this rank's tokens into their rows, after that the
  peers', chunk after chunk, as they come.

Why nothing is overwritten early, whatever the number of ranks. `begun[s]` says that rank s's call e has begun, hence that
its call e - 1 has ended, because its calls follow one another on its stream; inboxes are written after that. Rows and counts:
as in moe_dispatch_gather.py, a rank's counts of call e say that it has finished call e - 1; rows are written only after the
counts of all ranks for call e are here (the teller, which does not wait for them, waits for `numbered`, and so for placers
that did), so nobody reads what call e - 1 left. The counts themselves are doubled by the parity of e. `arrived` and
`numbered` are of this rank alone, hence released at the scope of its device. What a wait needs of a peer does not depend on
anything that comes after the wait: nobody waits in a circle, if all programs run at the same time.
"""

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from .arguments import device_programs
from .moe_dispatch_roles import name_rows, number_rows, placer_of, putter, share_of, teller
from .moe_quantization import GROUP, quantize_tile

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _place_tokens(
    tokens, scales, out, out_scales, out_origin, out_map, rows, start, end, source, H, topk, max_tokens, stride,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, K_PAD: tl.constexpr, STREAM_ROWS: tl.constexpr,
    STREAM_TOKENS: tl.constexpr, FP8: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Tokens start .. start + BLOCK_T - 1, below end, of rank `source` into the rows of their slots. QUANTIZE: the tokens are
    not fp8 yet."""
    MODIFIER: tl.constexpr = ".cs" if STREAM_ROWS == 2 else ""
    ROWS: tl.constexpr = "evict_first" if STREAM_ROWS == 1 else ""
    TOKENS: tl.constexpr = "evict_first" if STREAM_TOKENS == 1 else ""
    t = start + tl.arange(0, BLOCK_T)
    inside = t < end
    h = tl.arange(0, BLOCK_H)
    groups = tl.cdiv(H, _GROUP)
    row_of = ()  # of every slot, all on their way at once
    for j in tl.static_range(K_PAD):
        row_of += (tl.load(rows + t * topk + j, mask=inside & (j < topk), other=-1),)
    for first in range(0, H, BLOCK_H):
        cols = (first + h)[None, :]
        from_row, mask = tokens + t[:, None].to(tl.int64) * stride, inside[:, None] & (cols < H)
        tile = tl.load(from_row + cols, mask=mask, other=0.0, eviction_policy=TOKENS)
        if FP8:
            group = first // _GROUP + tl.arange(0, BLOCK_H // _GROUP)[None, :]
            if QUANTIZE:
                scaled, scale = quantize_tile(tile, BLOCK_T, BLOCK_H)
                tile = scaled.to(out.dtype.element_ty)
            else:
                at = scales + t[:, None].to(tl.int64) * groups + group
                scale = tl.load(at, mask=inside[:, None] & (group < groups), other=0.0)
        for j in tl.static_range(K_PAD):
            to = row_of[j].to(tl.int64)[:, None]
            mask = (to >= 0) & (cols < H)
            tl.store(out + to * H + cols, tile, mask=mask, cache_modifier=MODIFIER, eviction_policy=ROWS)
            if FP8:
                tl.store(out_scales + to * groups + group, scale, mask=(to >= 0) & (group < groups))
    name_rows(out_origin, out_map, None, rows, t, inside, source, topk, max_tokens, K_PAD)


@triton.jit
def moe_dispatch_pipelined_kernel(
    x, ids, first_expert, out, out_scales, out_counts, number, out_origin, out_map, out_tokens, out_rows, totals,
    inbox, scales, rows, counts, begun, arrived, counted, numbered, mapped, sent, goes, partial, base, epochs,
    T, H, topk, E, max_tokens, max_received, max_rows, stride_x, stride_t, stride_k, ctx,
    PUTTERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr, STREAM_ROWS: tl.constexpr,
    STREAM_TOKENS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid = tl.program_id(0)
    placers = tl.num_programs(0) - PUTTERS - 1
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls before this one
    chunks = tl.cdiv(max_tokens, CHUNK)
    if pid < PUTTERS:
        putter(x, ids, first_expert, inbox, scales, begun, sent, goes, past, pid, chunks, T, H, topk, E, max_tokens,
               stride_x, stride_t, stride_k, me, world, ctx, PUTTERS, CHUNK, BLOCK_P, BLOCK_H, K_PAD, FP8, 0)  # fmt: skip
    else:
        share = share_of(T, placers, BLOCK_C if BLOCK_C > BLOCK_T else BLOCK_T)  # a group of tokens lies in one share
        if pid < PUTTERS + placers:
            placer = placer_of(pid - PUTTERS, placers, tl.num_programs(0))
            _placer(x, ids, first_expert, out, out_scales, out_counts, number, out_origin, out_map, out_tokens,
                    out_rows, totals, inbox, scales, rows, counts, arrived, counted, numbered, mapped, sent, partial,
                    base, past, placer, placers, share, T, H, topk, E, max_tokens, max_received, max_rows,
                    stride_x, stride_t, stride_k, ctx,
                    CHUNK, BLOCK_C, BLOCK_T, BLOCK_H, K_PAD, COLUMNS, STREAM_ROWS, STREAM_TOKENS, FP8)  # fmt: skip
        else:
            teller(ids, first_expert, number, rows, counts, arrived, counted, numbered, mapped, partial, past, share,
                   T, topk, E, max_tokens, stride_t, stride_k, me, world, ctx, K_PAD, COLUMNS)  # fmt: skip
    tl.store(epochs + pid + tl.arange(0, 1), past + 1)


@triton.jit
def _placer(
    x, ids, first_expert, out, out_scales, out_counts, number, out_origin, out_map, out_tokens, out_rows, totals,
    inbox, scales, rows, counts, arrived, counted, numbered, mapped, sent, partial, base, past, placer, placers, share,
    T, H, topk, E, max_tokens, max_received, max_rows, stride_x, stride_t, stride_k, ctx,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    K_PAD: tl.constexpr, COLUMNS: tl.constexpr, STREAM_ROWS: tl.constexpr, STREAM_TOKENS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    failed, matrix, width = number_rows(
        ids, first_expert, out_counts, number, out_tokens, out_rows, totals, rows, counts, arrived, counted, numbered, partial,
        base, past, placer, share, T, topk, E, max_tokens, max_received, max_rows, stride_t, stride_k, me, world, ctx,
        BLOCK_C, K_PAD, COLUMNS,
    )  # fmt: skip

    # The own tokens, then the peers', a group of BLOCK_T at a time. All placers are near the same token, so that what they
    # write at a time are few runs of rows, one for each expert: memory takes scattered rows at half the rate.
    start = placer * BLOCK_T
    while start < tl.where(failed > 0, 0, T):
        token = dl.wait(dl.signal_at(numbered, start // share), past + 1, ctx)
        own_rows = dl.consume_token(rows, token) + me * max_tokens * topk
        _place_tokens(x, scales, out, out_scales, out_origin, out_map, own_rows, start, T, me, H, topk,
                 max_tokens, stride_x, BLOCK_T, BLOCK_H, K_PAD, STREAM_ROWS, STREAM_TOKENS, FP8, FP8)  # fmt: skip
        start += placers * BLOCK_T
    token = dl.wait(mapped, past + 1, ctx, "ge", world)
    rows = dl.consume_token(rows, token)
    chunks = tl.cdiv(max_tokens, CHUNK)
    most = tl.where(failed > 0, 0, max_tokens)
    start = placer * BLOCK_T
    while start < most:
        for i in range(1, world):
            source = dl.owner_first(i, me, world)
            theirs = tl.max(tl.load(matrix + source * width + E + world + 1 + tl.arange(0, 1)), 0)
            if start < theirs:
                token = dl.wait(dl.signal_at(sent, source * chunks + start // CHUNK), past + 1, ctx)
                region = ((i - 1) * max_tokens).to(tl.int64)
                came = dl.consume_token(inbox, token) + region * H
                came_scales = dl.consume_token(scales, token) + region * tl.cdiv(H, _GROUP)
                _place_tokens(came, came_scales, out, out_scales, out_origin, out_map, rows + source * max_tokens * topk, start,
                         theirs, source, H, topk, max_tokens, H, BLOCK_T, BLOCK_H, K_PAD, STREAM_ROWS, STREAM_TOKENS,
                         FP8, False)  # fmt: skip
        start += placers * BLOCK_T


# How rows are stored and tokens are read before that. STREAM_ROWS: 0 as any memory; so that they leave the L2 cache first: 1 by
# an eviction policy, 2 by streaming stores (st.cs). STREAM_TOKENS: 1, tokens leave it first, too, once they are in their rows.
STREAMS = dict(STREAM_ROWS=2, STREAM_TOKENS=1)  # the largest values
NORMAL = dict.fromkeys(STREAMS, 0)


def pipelined_config(max_tokens, hidden):
    """(constexprs and launch options of the kernel, programs) that suit this process's platform."""
    programs = device_programs()
    if triton_dist.backend != "nvidia":
        return dict(PUTTERS=1, CHUNK=64, BLOCK_P=64, BLOCK_C=64, BLOCK_T=64, BLOCK_H=1024, **NORMAL), programs + 1
    if max_tokens <= 2 * programs:  # a token a program, all of a row on its way at once
        options = dict(BLOCK_H=min(8192, triton.next_power_of_2(hidden)), **NORMAL, num_warps=16, maxnreg=128)
        return dict(PUTTERS=max(programs // 2, 1), CHUNK=2, BLOCK_P=1, BLOCK_C=2, BLOCK_T=1, **options), programs
    # maxnreg: so that two programs share a multiprocessor, as they must
    options = dict(BLOCK_H=min(4096, triton.next_power_of_2(hidden)), **NORMAL, num_warps=8, maxnreg=128)
    return dict(PUTTERS=max(programs // 4, 1), CHUNK=8, BLOCK_P=4, BLOCK_C=8, BLOCK_T=2, **options), 2 * programs


def pipelined_candidates(max_tokens, hidden):
    """Arguments of `create_moe_dispatch_context` that tuning times beside the defaults: how rows are stored, how many programs
    put, how much of a row a program has on its way. Few, since each is compiled."""
    if triton_dist.backend != "nvidia":
        return [dict(config=dict(STREAM_ROWS=1, STREAM_TOKENS=1))]
    streams = [dict(STREAM_ROWS=1), dict(STREAM_ROWS=2), dict(STREAM_ROWS=1, STREAM_TOKENS=1)]
    programs = device_programs()
    if max_tokens <= 2 * programs:
        return [dict(config=streams[0])]
    few = dict(PUTTERS=max(programs // 8, 1))
    # four programs a multiprocessor
    small = dict(PUTTERS=max(programs // 2, 1), BLOCK_P=2, BLOCK_C=4, BLOCK_T=1, num_warps=4)
    return [
        *(dict(config=one) for one in (*streams, few, {**few, **streams[0]})),
        *(dict(config=one, programs=4 * programs) for one in (small, {**small, **streams[0]})),
    ]


class MoeDispatchPipelined:
    """Buffers of a context. Symmetric memory: (W - 1) * max_tokens tokens of the payload (and their scales), 4 bytes for each
    of W * max_tokens * k slots, 2 * W * (E + W + 2) * 4 bytes of counts, W * (3 + chunks of max_tokens)
    + 2 * programs signals."""

    own = 0  # 1: the inbox has a region for this rank's tokens, too

    def __init__(self, owner, config, programs):
        """`owner`: the MoeDispatchContext that the memory belongs to."""
        self.owner, self.config, self.programs = owner, config, programs
        world, max_tokens = owner.num_ranks, owner.max_tokens
        width = owner.E + world + 2
        self.columns = triton.next_power_of_2(width)
        regions = world - 1 + self.own
        received = max(regions * max_tokens, 1)
        self.inbox = owner.tensor((received, owner.H), owner.payload_dtype)
        self.scales = owner.tensor((received if owner.fp8 else 1, owner.groups), torch.float32)
        self.rows, self.counts = (
            owner.tensor(shape, torch.int32) for shape in ((world, max(max_tokens, 1), owner.topk), (2, world, width))
        )
        self.arrived, self.numbered = owner.signals(programs), owner.signals(programs)
        self.begun, self.counted, self.mapped = (owner.signals(world) for _ in range(3))
        self.sent = owner.signals(world * max(triton.cdiv(max_tokens, config["CHUNK"]), 1))
        self.goes = owner.local(max(regions, 1), max_tokens)
        self.partial, self.base = (owner.local(programs, self.columns) for _ in range(2))
        self.epochs = owner.local(programs)

    def __call__(self, x, ids, tokens, scales, counts, handle):
        o = self.owner
        moe_dispatch_pipelined_kernel[(self.programs,)](
            x, ids, o.first_expert, tokens, self.scales if scales is None else scales, counts, handle.number, handle.origin,
            handle.map, handle.tokens, handle.rows, handle.totals, self.inbox, self.scales, self.rows, self.counts, self.begun,
            self.arrived, self.counted, self.numbered, self.mapped, self.sent, self.goes, self.partial, self.base, self.epochs,
            x.shape[0], o.H, o.topk, o.E, o.max_tokens, o.max_received, o.max_rows, x.stride(0), ids.stride(0), ids.stride(1),
            o.table, **self.config, K_PAD=o.k_pad, COLUMNS=self.columns, FP8=o.fp8,
        )  # fmt: skip
