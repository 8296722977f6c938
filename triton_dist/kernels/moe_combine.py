"""MoE combine: the experts' rows back to the ranks of their tokens, and their weighted sum there, in one kernel.

    ctx = create_moe_combine_context(dispatch_context)                       # once
    tokens, counts, handle = moe_dispatch(x, topk_ids, dispatch_context)
    y = experts(tokens, counts)                                              # [max_rows, H], row for row
    out = moe_combine(y, weights, handle, ctx)                               # [T, H], any number of calls
    ctx.free()

After a dispatch by the method `pipelined` the combine is another kernel, see moe_combine_pipelined.py. After one by `gather`:
every program puts its share of the rows into the `returned` buffers of the ranks that they came from: there
is a place for every token and slot. `filled[s]` at the reader counts the programs of rank s that have put all their rows.
Then every program sums its share of the tokens: in fp32, by slot, whoever came first, so that the bits are the same
every time. For that a row travels for each slot; a sum made at the experts' rank would group the slots by rank.

`read[d]` at the writer counts the programs of rank d that have finished summing. A program puts its rows of call e when `read`
says that all programs of all ranks have finished call e - 1, so no place is overwritten before it was read. Both
signals only grow. They have several writers, but a program of rank s runs call e + 1 only when all programs of rank s have
finished call e (the calls follow one another on a stream), so nobody adds for a later call before all have added for this
one. What a wait needs of a peer does not depend on anything that comes after the wait, so nobody waits in a circle. The
number of the call lies in device memory, a word a program, so that a captured graph replays right.
"""

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from .arguments import (
    FLOATS,
    LAUNCH_OPTIONS,
    checked_config,
    device_programs,
    need,
    need_apart,
    need_dtype,
    need_operand,
)
from .moe_combine_pipelined import MoeCombinePipelined, pipelined_config
from .moe_dispatch_context import MoeDispatchContext, MoeDispatchHandle
from .moe_routing import fit_putters, need_pipeline
from .operator_context import OperatorContext, agreement, begin


@triton.jit
def moe_combine_kernel(
    y, weights, out, origin, number, rows, returned, filled, read, epochs,
    T, H, max_tokens, stride_y, stride_wt, stride_wk, stride_out, ctx,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls before this one
    lane, h = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_H)

    # Put the rows where they came from, once the last call's are read.
    token = dl.wait(read, past * programs, ctx, "ge", world)
    free = dl.consume_token(returned, token)
    n = tl.max(tl.load(rows + tl.arange(0, 1)), 0)  # -1: the dispatch failed
    start = pid * BLOCK_T
    while start < n:
        row = start + lane
        valid = row < n
        came = tl.load(origin + row, mask=valid, other=0)
        peer = came // (max_tokens * TOPK)
        slot = (came - peer * (max_tokens * TOPK)).to(tl.int64)
        to = dl.symm_at(free + slot * H, peer, ctx)
        of = y + row.to(tl.int64) * stride_y
        for first in range(0, H, BLOCK_H):
            mask = valid[:, None] & (first + h < H)[None, :]
            tile = tl.load(of[:, None] + (first + h)[None, :], mask=mask)
            tl.store(to[:, None] + (first + h)[None, :], tile, mask=mask)
        start += programs * BLOCK_T
    dl.notify_all(dl.signal_at(filled, me), ctx, 1, "add")

    # Sum the own tokens.
    token = dl.wait(filled, (past + 1) * programs, ctx, "ge", world)
    returned = dl.consume_token(returned, token)
    start = pid * BLOCK_T
    while start < T:
        t = (start + lane).to(tl.int64)
        for first in range(0, H, BLOCK_H):
            inside = (t < T)[:, None] & (first + h < H)[None, :]
            acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
            for j in tl.static_range(TOPK):  # unrolled: the loads of all slots are on their way together
                # Loads are masked by ranges alone: with another mask Ascend reads all lanes, past the end too, and chooses.
                kept = (tl.load(number + t * TOPK + j, mask=t < T, other=-1) >= 0) & (n >= 0)
                weight = tl.load(weights + t * stride_wt + j * stride_wk, mask=t < T, other=0.0)
                at = returned + (t * TOPK + j)[:, None] * H + (first + h)[None, :]
                tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                acc += tl.where(kept[:, None], weight[:, None] * tile, 0.0)
            acc = tl.where(n < 0, float("nan"), acc)
            tl.store(out + t[:, None] * stride_out + (first + h)[None, :], acc.to(out.dtype.element_ty), mask=inside)
        start += programs * BLOCK_T
    dl.notify_all(dl.signal_at(read, me), ctx, 1, "add")
    tl.store(epochs + pid + tl.arange(0, 1), past + 1)


def reference(x, topk_ids, weights, expert, num_experts):
    """[T, H] of x's dtype, by plain torch and without ranks: sum over slots j of weights[t, j] * expert(e, x[t]).

    `expert(e, rows)` maps rows [n, H] of x's dtype to rows of the same shape and dtype. The sum is in fp32, by slot.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for j in range(topk_ids.shape[1]):
        for e in range(num_experts):
            t = (topk_ids[:, j] == e).nonzero()[:, 0]
            if len(t):
                out[t] += weights[t, j, None] * expert(e, x[t]).float()
    return out.to(x.dtype)


def gather_config():
    """(constexprs of the kernel, programs) that suit this process's platform."""
    if triton_dist.backend == "cpu":
        return dict(BLOCK_T=64, BLOCK_H=1024), device_programs()
    if triton_dist.backend == "nvidia":  # whole rows, two programs a multiprocessor
        return dict(BLOCK_T=1, BLOCK_H=4096, num_warps=8), 2 * device_programs()
    return dict(BLOCK_T=8, BLOCK_H=512), device_programs()


def default_config(method, max_tokens, hidden):
    """(constexprs and launch options of the kernel after a dispatch by `method`, programs) that suit this process's platform.
    Programs of all ranks wait for one another, so there are no more of them than the device runs at a time."""
    return gather_config() if method == "gather" else pipelined_config(max_tokens, hidden)


class MoeCombineGather:
    """Buffers of a context. Symmetric memory: max_tokens * k rows and 2 * W signals."""

    def __init__(self, owner, config, programs):
        """`owner`: the MoeCombineContext that the memory belongs to."""
        self.owner, self.config, self.programs = owner, config, programs
        d = owner.dispatch
        self.returned = owner.tensor((max(d.max_tokens * d.topk, 1), d.H), owner.dtype)
        self.filled, self.read = (owner.signals(d.num_ranks) for _ in range(2))
        self.epochs = owner.local(programs)

    def __call__(self, y, weights, handle, out):
        d = self.owner.dispatch
        moe_combine_kernel[(self.programs,)](
            y, weights, out, handle.origin, handle.number, handle.rows, self.returned, self.filled, self.read, self.epochs,
            handle.num_tokens, d.H, d.max_tokens, y.stride(0), weights.stride(0), weights.stride(1), out.stride(0),
            self.owner.table, **self.config, TOPK=d.topk,
        )  # fmt: skip


class MoeCombineContext(OperatorContext):
    """What `moe_combine` needs besides its operands. Made by `create_moe_combine_context`."""

    def __init__(self, dispatch, dtype, config, programs):
        super().__init__("moe_combine", dispatch.team)
        self.dispatch, self.dtype = dispatch, dtype
        self.run = dict(gather=MoeCombineGather, pipelined=MoeCombinePipelined)[dispatch.method](self, config, programs)

    def check(self, y, weights, handle, out):
        """Raises ValueError, naming rank and values, unless the operands fit."""
        d, call = self.dispatch, "moe_combine"

        def fit(fits, text):
            need(call, fits, text)

        shapes = (("y", y, [d.max_rows, d.H]), ("weights", weights, [handle.num_tokens, d.topk]))
        for name, tensor, shape in (*shapes, ("out", out, [handle.num_tokens, d.H])):
            fit(list(tensor.shape) == shape, f"{name} is {list(tensor.shape)}, it must be {shape}")
            fit(tensor.device == self.device, f"{name} is on {tensor.device}, not on {self.device}")
        fit(weights.dtype == torch.float32, f"weights is {weights.dtype}, it must be torch.float32")
        for name, tensor in (("y", y), ("out", out)):
            need_operand(call, name, tensor, self.dtype, self.device)
            fit(tensor.stride(1) == 1 or d.H == 1, f"{name} has strides {tensor.stride()}; its rows must be contiguous")
        need_apart(call, out, dict(y=y, weights=weights))
        self.agree(call, "")


def create_moe_combine_context(dispatch, dtype=None, config=None, programs=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args (equal on all ranks of the team):
        dispatch: the MoeDispatchContext whose handles will be given; its team takes part. It may be freed before this one.
        dtype: torch.float16, bfloat16 or float32, of the experts' rows and the result. None: as the dispatch's tokens.
        config: dict that overrides entries of `default_config(dispatch.method, dispatch.max_tokens, dispatch.H)[0]`.
        programs: programs in the grid; not more than the device runs at a time.

    Symmetric memory: max_tokens * topk * H elements and some signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_moe_combine_context"
    fits = isinstance(dispatch, MoeDispatchContext)
    need(name, fits, f"dispatch is a {type(dispatch).__name__}, it must be what create_moe_dispatch_context made")
    with agreement(name, dispatch.team) as agreed:
        dtype = dispatch.dtype if dtype is None else dtype
        need_dtype(name, dtype, FLOATS)
        pipelined = dispatch.method == "pipelined"
        defaults = fit_putters(default_config(dispatch.method, dispatch.max_tokens, dispatch.H), programs)
        least = dict(programs=2 if pipelined else 1)
        config, programs = checked_config(name, defaults, config, programs, LAUNCH_OPTIONS, least)
        if pipelined:
            need_pipeline(name, config, programs, 1)
        sizes = f"max_tokens={dispatch.max_tokens}, hidden={dispatch.H}, topk={dispatch.topk}"
        agreed.on = f"{sizes}, {dtype}, config={config}, programs={programs}"
    return MoeCombineContext(dispatch, dtype, config, programs)


def moe_combine(y, weights, handle, context, out=None):
    """out[t] = sum over the slots j of token t, in their order, of weights[t, j] * (row of that slot).

    Args:
        y: [max_rows, H] of the context's dtype, rows contiguous: the experts' results, row for row as `moe_dispatch` gave the
            tokens. Any memory; rows from sum(counts) on are not read.
        weights: [T, k] fp32, any strides; those of dropped slots do not matter.
        handle: of the `moe_dispatch` in question; it can be used more than once.
        context: of `create_moe_combine_context`.
        out: [T, H] with contiguous rows, written, no overlap with y; None: a new tensor.

    Returns: out. fp32 sums, one rounding; the same bits every time. A token without kept slots gives zeros. When the dispatch
    failed (see there) everything is NaN.
    All ranks of the team must make the same calls in the same order. With `out` given nothing is allocated, and there is
    no host synchronisation: the call can be captured in a CUDA graph.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    call = "moe_combine"
    begin(call, MoeCombineContext, context, y=y, weights=weights, out=out)
    d = context.dispatch
    fits = isinstance(handle, MoeDispatchHandle)
    need(call, fits, f"handle is a {type(handle).__name__}, it must be the third of what moe_dispatch returned")
    same = handle.context is d
    need(call, same, "the handle is of another dispatch context than the one this context was made for")
    need(call, handle.num_tokens is not None, "the handle is empty: no moe_dispatch has written it")
    if out is None:
        out = torch.empty(handle.num_tokens, d.H, dtype=context.dtype, device=context.device)
    context.check(y, weights, handle, out)
    context.run(y, weights, handle, out)
    return out
