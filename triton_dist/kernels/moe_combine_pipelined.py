"""MoE combine for GPUs, after a dispatch by the method `pipelined`: tokens are summed while rows of later ones travel.

Some programs put (putters), the others sum. The dispatch has left at the experts' rank, in `map`, the row of every slot of
every rank's tokens. So a putter goes through the tokens of a peer in their order, a chunk at a time, puts the rows of their
slots that are here into the peer's `returned`, where every token and slot has a place, and says so: `sent[s][c]`, set to the
number of the call. Whoever sums the tokens of a chunk waits for that of each peer. Rows of this rank's own tokens are summed
from where they are, and travel nowhere. Sums are in fp32, by slot, whoever came first: the same bits every time.

`begun[d]` at the writer says that rank d's call e has begun, hence that its call e - 1 has ended, because its calls
follow one another on its stream: no place is overwritten before it was read. What a wait needs of a peer does not depend on
anything that comes after the wait, so nobody waits in a circle. The number of the call lies in device memory, a word a program,
so that a captured graph replays right.
"""

import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from .arguments import device_programs


@triton.jit
def _put_slots(y, places, map, start, end, H, stride_y, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr):
    """The rows of the slots start .. start + BLOCK_S - 1, below end, that are here, into their places."""
    slot = start + tl.arange(0, BLOCK_S)
    row = tl.load(map + slot, mask=slot < end, other=-1)
    of = y + tl.maximum(row, 0)[:, None].to(tl.int64) * stride_y
    to = places + slot[:, None].to(tl.int64) * H
    h = tl.arange(0, BLOCK_H)
    for first in range(0, H, BLOCK_H):
        cols = (first + h)[None, :]
        mask = (row >= 0)[:, None] & (cols < H)
        tl.store(to + cols, tl.load(of + cols, mask=mask), mask=mask)


@triton.jit
def _sum_tokens(
    y, weights, out, returned, number, own, start, end, failed, H, stride_y, stride_wt, stride_wk, stride_out,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    t = start + tl.arange(0, BLOCK_T)
    inside = t < end
    h = tl.arange(0, BLOCK_H)
    for first in range(0, H, BLOCK_H):
        cols = (first + h)[None, :]
        acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
        for j in tl.static_range(TOPK):  # unrolled: the loads of all slots are on their way together
            slot = t * TOPK + j
            kept = (tl.load(number + slot, mask=inside, other=-1) >= 0) & (failed == 0)
            row = tl.load(own + slot, mask=inside, other=-1)
            weight = tl.load(weights + t.to(tl.int64) * stride_wt + j * stride_wk, mask=inside, other=0.0)
            of = y + tl.maximum(row, 0).to(tl.int64) * stride_y
            at = tl.where(row >= 0, of, returned + slot.to(tl.int64) * H)  # one load: half of the registers of two
            tile = tl.load(at[:, None] + cols, mask=kept[:, None] & (cols < H), other=0.0).to(tl.float32)
            acc += tl.where(kept[:, None], weight[:, None] * tile, 0.0)
        acc = tl.where(failed, float("nan"), acc)
        at = out + t[:, None].to(tl.int64) * stride_out + cols
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (cols < H))


@triton.jit
def moe_combine_pipelined_kernel(
    y, weights, out, map, tokens, number, rows, returned, begun, sent, epochs,
    T, H, max_tokens, stride_y, stride_wt, stride_wk, stride_out, ctx,
    PUTTERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    TOPK: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid = tl.program_id(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls before this one
    chunks = tl.cdiv(max_tokens, CHUNK)
    failed = tl.max(tl.load(rows + tl.arange(0, 1)), 0) < 0
    if pid < PUTTERS:
        if pid == 0:
            dl.notify_all(dl.signal_at(begun, me), ctx, past + 1)
        token = dl.wait(begun, past + 1, ctx, "ge", world)
        free = dl.consume_token(returned, token)
        item = pid
        while item < chunks * (world - 1):
            chunk = item // (world - 1)
            peer = dl.owner_first(item - chunk * (world - 1) + 1, me, world)
            theirs = tl.max(tl.load(tokens + peer + tl.arange(0, 1)), 0)
            theirs = tl.where(failed, 0, theirs)
            if chunk * CHUNK < theirs:
                end = tl.minimum(chunk * CHUNK + CHUNK, theirs) * TOPK
                start = chunk * CHUNK * TOPK
                places = dl.symm_at(free, peer, ctx)
                while start < end:
                    _put_slots(y, places, map + peer * max_tokens * TOPK, start, end, H, stride_y, BLOCK_S, BLOCK_H)
                    start += BLOCK_S
                dl.notify(dl.signal_at(sent, me * chunks + chunk), peer, ctx, past + 1)
            item += PUTTERS
    else:
        start = (pid - PUTTERS) * BLOCK_T
        while start < T:
            here = returned
            if not failed:
                for i in range(1, world):
                    source = dl.owner_first(i, me, world)
                    token = dl.wait(dl.signal_at(sent, source * chunks + start // CHUNK), past + 1, ctx)
                    here = dl.consume_token(here, token)
            _sum_tokens(y, weights, out, here, number, map + me * max_tokens * TOPK, start, T, failed, H, stride_y,
                        stride_wt, stride_wk, stride_out, BLOCK_T, BLOCK_H, TOPK)  # fmt: skip
            start += (tl.num_programs(0) - PUTTERS) * BLOCK_T
    tl.store(epochs + pid + tl.arange(0, 1), past + 1)


def pipelined_config(max_tokens, hidden):
    """(constexprs and launch options of the kernel, programs) that suit this process's platform."""
    programs = device_programs()
    if triton_dist.backend != "nvidia":
        return dict(PUTTERS=1, CHUNK=64, BLOCK_S=64, BLOCK_T=64, BLOCK_H=1024), programs
    options = dict(BLOCK_T=1, BLOCK_H=min(4096, triton.next_power_of_2(hidden)), num_warps=16)
    if max_tokens <= 2 * programs:  # maxnreg: so that two programs share a multiprocessor, as they must
        return dict(PUTTERS=programs, CHUNK=1, BLOCK_S=4, maxnreg=64, **options), 2 * programs
    return dict(PUTTERS=max(programs // 4, 1), CHUNK=4, BLOCK_S=8, maxnreg=128, **options), programs


class MoeCombinePipelined:
    """Buffers of a context. Symmetric memory: max_tokens * k rows, W * (1 + chunks of max_tokens) signals."""

    def __init__(self, owner, config, programs):
        """`owner`: the MoeCombineContext that the memory belongs to."""
        self.owner, self.config, self.programs = owner, config, programs
        d = owner.dispatch
        self.returned = owner.tensor((max(d.max_tokens * d.topk, 1), d.H), owner.dtype)
        self.begun = owner.signals(d.num_ranks)
        self.sent = owner.signals(d.num_ranks * max(triton.cdiv(d.max_tokens, config["CHUNK"]), 1))
        self.epochs = owner.local(programs)

    def __call__(self, y, weights, handle, out):
        d = self.owner.dispatch
        moe_combine_pipelined_kernel[(self.programs,)](
            y, weights, out, handle.map, handle.tokens, handle.number, handle.rows, self.returned, self.begun, self.sent,
            self.epochs, handle.num_tokens, d.H, d.max_tokens, y.stride(0), weights.stride(0), weights.stride(1),
            out.stride(0), self.owner.table, **self.config, TOPK=d.topk,
        )  # fmt: skip
