"""MoE dispatch for GPUs, the method `pipelined` of `moe_dispatch` with the layout `tokens`: tokens stay where they have
travelled to, and only words are written for their slots.

Putters, placers and the teller are those of moe_dispatch_pipelined.py, and so is what they wait for, with these differences.

- The inbox has a region for every rank, and token t of rank s lies at s * max_tokens + t. A putter puts its tokens into the
  own inbox, too, where they have an expert here: they are loaded once for the peers and for that.
- Once a placer has numbered its tokens' slots, it writes those that are here into `index`, `out_origin` and `out_map`, and the
  peers' when `mapped` says that their rows are known. No token is read for that, so it is done while they come. At last the
  placers wait until all chunks are `sent`, each for some, so that every token is here when the kernel has ended.

The tokens of call e are read by what follows the call on this rank's stream. The peers' putters write the inbox in call e + 1
after `begun` says that this rank's call e + 1 has, hence after all that came before it on the stream.
"""

import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from .arguments import device_programs
from .moe_dispatch_pipelined import MoeDispatchPipelined
from .moe_dispatch_roles import name_rows, number_rows, placer_of, putter, share_of, teller


@triton.jit
def moe_dispatch_tokens_kernel(
    x, ids, first_expert, index, out_counts, number, out_origin, out_map, out_tokens, out_rows, totals,
    inbox, scales, rows, counts, begun, arrived, counted, numbered, mapped, sent, goes, partial, base, epochs,
    T, H, topk, E, max_tokens, max_received, max_rows, stride_x, stride_t, stride_k, ctx,
    PUTTERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid = tl.program_id(0)
    placers = tl.num_programs(0) - PUTTERS - 1
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls before this one
    chunks = tl.cdiv(max_tokens, CHUNK)
    if pid < PUTTERS:
        putter(x, ids, first_expert, inbox, scales, begun, sent, goes, past, pid, chunks, T, H, topk, E, max_tokens,
               stride_x, stride_t, stride_k, me, world, ctx, PUTTERS, CHUNK, BLOCK_P, BLOCK_H, K_PAD, FP8, 1)  # fmt: skip
    else:
        share = share_of(T, placers, BLOCK_C)
        if pid < PUTTERS + placers:
            placer = placer_of(pid - PUTTERS, placers, tl.num_programs(0))
            _placer(ids, first_expert, index, out_counts, number, out_origin, out_map, out_tokens, out_rows, totals, rows,
                    counts, arrived, counted, numbered, mapped, sent, partial, base, past, placer, placers, share,
                    chunks, T, topk, E, max_tokens, max_received, max_rows, stride_t, stride_k, me, world, ctx,
                    CHUNK, BLOCK_C, BLOCK_T, K_PAD, COLUMNS)  # fmt: skip
        else:
            teller(ids, first_expert, number, rows, counts, arrived, counted, numbered, mapped, partial, past, share,
                   T, topk, E, max_tokens, stride_t, stride_k, me, world, ctx, K_PAD, COLUMNS)  # fmt: skip
    tl.store(epochs + pid + tl.arange(0, 1), past + 1)


@triton.jit
def _placer(
    ids, first_expert, index, out_counts, number, out_origin, out_map, out_tokens, out_rows, totals, rows, counts,
    arrived, counted, numbered, mapped, sent, partial, base, past, placer, placers, share, chunks,
    T, topk, E, max_tokens, max_received, max_rows, stride_t, stride_k, me, world, ctx,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    failed, matrix, width = number_rows(
        ids, first_expert, out_counts, number, out_tokens, out_rows, totals, rows, counts, arrived, counted, numbered, partial,
        base, past, placer, share, T, topk, E, max_tokens, max_received, max_rows, stride_t, stride_k, me, world, ctx,
        BLOCK_C, K_PAD, COLUMNS,
    )  # fmt: skip
    tl.debug_barrier()  # every thread has stored its rows

    # The slots of the own tokens that this program has numbered.
    lane = tl.arange(0, BLOCK_T)
    own_rows = rows + me * max_tokens * topk
    start = tl.minimum(placer * share, T)
    end = tl.where(failed > 0, 0, tl.minimum(start + share, T))
    while start < end:
        t = start + lane
        name_rows(out_origin, out_map, index, own_rows, t, t < end, me, topk, max_tokens, K_PAD)
        start += BLOCK_T

    # The peers'.
    token = dl.wait(mapped, past + 1, ctx, "ge", world)
    rows = dl.consume_token(rows, token)
    peers = tl.where(failed > 0, 0, world - 1)
    blocks = tl.cdiv(max_tokens, BLOCK_T)
    item = placer
    while item < blocks * peers:
        block = item // peers
        source = dl.owner_first(item - block * peers + 1, me, world)
        theirs = tl.max(tl.load(matrix + source * width + E + world + 1 + tl.arange(0, 1)), 0)
        t = block * BLOCK_T + lane
        name_rows(out_origin, out_map, index, rows + source * max_tokens * topk, t, t < theirs, source, topk, max_tokens, K_PAD)
        item += placers

    # All their tokens are here.
    item = placer
    while item < chunks * peers:
        chunk = item // peers
        source = dl.owner_first(item - chunk * peers + 1, me, world)
        theirs = tl.max(tl.load(matrix + source * width + E + world + 1 + tl.arange(0, 1)), 0)
        if chunk * CHUNK < theirs:
            dl.wait(dl.signal_at(sent, source * chunks + chunk), past + 1, ctx)
        item += placers


def pipelined_tokens_config(max_tokens, hidden):
    """(constexprs and launch options of the kernel, programs) that suit this process's platform."""
    programs = device_programs()
    if triton_dist.backend != "nvidia":
        return dict(PUTTERS=1, CHUNK=64, BLOCK_P=64, BLOCK_C=64, BLOCK_T=64, BLOCK_H=1024), programs + 1
    if max_tokens <= 2 * programs:  # a token a program, all of a row on its way at once
        options = dict(BLOCK_H=min(8192, triton.next_power_of_2(hidden)), num_warps=16, maxnreg=128)
        return dict(PUTTERS=max(programs // 2, 1), CHUNK=2, BLOCK_P=1, BLOCK_C=2, BLOCK_T=32, **options), programs
    options = dict(BLOCK_H=min(4096, triton.next_power_of_2(hidden)), num_warps=8, maxnreg=128)
    return dict(PUTTERS=max(programs // 2, 1), CHUNK=8, BLOCK_P=4, BLOCK_C=8, BLOCK_T=32, **options), programs


def pipelined_tokens_candidates(max_tokens, hidden):
    """Arguments of `create_moe_dispatch_context` that tuning times beside the defaults: how many programs put, how many tokens
    at a time. Few, since each is compiled."""
    if triton_dist.backend != "nvidia":
        return [dict(config=dict(CHUNK=32, BLOCK_P=32))]
    programs = device_programs()
    if max_tokens <= 2 * programs:  # two programs a multiprocessor, so that every token has its own
        return [dict(config=dict(CHUNK=1, PUTTERS=programs, num_warps=8), programs=2 * programs)]
    return [
        *(dict(config=dict(PUTTERS=max(programs * n // 8, 1))) for n in (2, 3, 5)),
        dict(config=dict(CHUNK=16)),
        dict(programs=2 * programs),
    ]


class MoeDispatchPipelinedTokens(MoeDispatchPipelined):
    """Buffers of a context. As of the layout `rows`, but W * max_tokens tokens of the payload (and their scales)."""

    own = 1

    def __call__(self, x, ids, tokens, scales, counts, handle):
        o = self.owner
        moe_dispatch_tokens_kernel[(self.programs,)](
            x, ids, o.first_expert, handle.index, counts, handle.number, handle.origin, handle.map, handle.tokens, handle.rows,
            handle.totals, self.inbox, self.scales, self.rows, self.counts, self.begun, self.arrived, self.counted,
            self.numbered, self.mapped, self.sent, self.goes, self.partial, self.base, self.epochs,
            x.shape[0], o.H, o.topk, o.E, o.max_tokens, o.max_received, o.max_rows, x.stride(0), ids.stride(0), ids.stride(1),
            o.table, **self.config, K_PAD=o.k_pad, COLUMNS=self.columns, FP8=o.fp8,
        )  # fmt: skip
