"""MoE dispatch: every token to the ranks of its experts, grouped there by expert, in one kernel without a host barrier.

    ctx = create_moe_dispatch_context(max_tokens, hidden, topk, num_experts, torch.bfloat16)   # once
    tokens, counts, handle = moe_dispatch(x, topk_ids, ctx)                                    # any number of calls
    ctx.free()

A *slot* is one entry of topk_ids, a *row* what the experts compute for one: a token has a row for each of its slots that
lives here, but travels to a rank once. The rows are ordered by expert.

| layout | what `tokens` is |
|---|---|
| rows | a copy of the token for each row, in the order of the rows |
| tokens | each token once, where it has travelled to; the experts' product gathers the rows by `handle.index` |

The layout tokens writes less: with 8 experts of a token on 2 ranks, rows are 4 to 8 times as many bytes as tokens.

| method | how |
|---|---|
| gather | counts are exchanged, tokens are put into the inboxes, then rows are gathered from them |
| pipelined | tokens travel from the beginning, and rows are written as they come; for GPUs |

They are in moe_dispatch_gather.py, moe_dispatch_pipelined.py and, for the layout tokens, moe_dispatch_pipelined_tokens.py.

Sizes on the host. The number of rows is known to the devices alone. Results have the capacity of the context, `counts`
(on the device) says how much of it is valid; nothing is synchronised for it. See `moe_dispatch` about `check`.
"""

import torch.distributed as dist

import triton_dist
from triton_dist import shmem

from .arguments import (
    FLOATS,
    LAUNCH_OPTIONS,
    checked_config,
    chosen_candidate,
    device_programs,
    name_of,
    need,
    need_dtype,
    need_int,
    platform_problem,
)
from .moe_dispatch_context import LAYOUTS, METHODS, MoeDispatchContext
from .moe_dispatch_gather import gather_config
from .moe_dispatch_pipelined import NORMAL, STREAMS, pipelined_config
from .moe_dispatch_pipelined_tokens import pipelined_tokens_config
from .moe_quantization import GROUP
from .moe_routing import (
    MOST_SLOTS,
    expert_owners,
    fit_putters,
    fit_slots,
    grouped,
    need_pipeline,
    pipeline_problem,
    slots_problem,
)
from .operator_context import agreement, begin


CHUNKED = dict(rows="BLOCK_T", tokens="BLOCK_P")  # layout -> the blocks of tokens that a chunk of `pipelined` is made of


def reference(x, topk_ids, owners, group=None):
    """`moe_routing.grouped` for this rank, after everybody's tokens and ids were gathered over `group` by torch.distributed."""
    said = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (x.cpu(), topk_ids.cpu()), group=group)
    return grouped([a for a, _ in said], [b for _, b in said], list(owners), dist.get_rank(group))


def default_config(method, max_tokens, hidden, layout="rows", topk=1):
    """(constexprs and launch options of the method's kernel, programs) that suit this process's platform. Programs of all ranks
    wait for one another, so there are no more of them than the device runs at a time."""
    if method == "gather":
        return fit_slots(gather_config(max_tokens, layout), topk, method)
    return fit_slots((pipelined_config if layout == "rows" else pipelined_tokens_config)(max_tokens, hidden), topk, method)


def _configured(max_tokens, hidden, method, config=None, programs=None, layout="rows", topk=1):
    """(config, programs) of a candidate that was measured; the defaults where it does not fit this size, for which the nearest
    one was measured, or this part of the device (see `concurrent`)."""
    defaults = default_config(method, max_tokens, hidden, layout, topk)
    tuned, programs = {**defaults[0], **(config or {})}, programs or defaults[1]
    fits = set(tuned) <= {*defaults[0], *LAUNCH_OPTIONS} and programs <= 4 * device_programs()
    fits = fits and slots_problem(tuned, topk, method) is None
    fits = fits and (method == "gather" or pipeline_problem(tuned, programs, 2, CHUNKED[layout]) is None)
    return (tuned, programs) if fits else defaults


def create_moe_dispatch_context(
    max_tokens, hidden, topk, num_experts, dtype, placement=None, max_received=None, max_rows=None, fp8=False,
    team=0, config=None, programs=None, method=None, layout="rows",
):  # fmt: skip
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args (equal on all ranks of the team):
        max_tokens: most tokens that a rank has in a call, 0 or more.
        hidden, topk, num_experts: H, k and E, 1 or more; k at most 1024.
        dtype: torch.float16, bfloat16 or float32, of the tokens.
        placement: list or int tensor [E], the team rank of every expert, not decreasing; a rank may have any number of
            experts, also none. None: even, the first ranks have one more where E is not a multiple.
        max_received: tokens that a rank can receive in a call. None: the worst case, num_ranks * max_tokens.
        max_rows: rows that a rank's result can have. None: max_received * topk.
        fp8: send e4m3 values with an fp32 scale for each 128 columns of a token, its largest magnitude over 448. A NaN stays
            a NaN and leaves its group's scale alone; in a group with an infinity the finite values become zeros or NaN.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(method, max_tokens, hidden, layout, topk)[0]`, of gather when
            method is None.
        programs: programs in the grid; not more than the device runs at a time.
        method: "gather" or "pipelined"; see the top of this file. None: on nvidia, unless config or programs is given and
            where max_received holds the tokens of all peers (layout tokens: of all ranks), the fastest one that was measured,
            with the configuration that was (docs/tuning.md), else pipelined; in all other cases gather.
        layout: "rows" or "tokens"; see the top of this file.

    Symmetric memory: gather max_received, pipelined (num_ranks - 1) * max_tokens (layout tokens: num_ranks * max_tokens) times
    H elements of the payload (and its scales); and some words for every row or slot, see the methods' files.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_moe_dispatch_context"
    with agreement(name, team) as agreed:
        world = shmem.team_n_pes(team)
        max_tokens, hidden = need_int(name, "max_tokens", max_tokens), need_int(name, "hidden", hidden, 1)
        topk, num_experts = need_int(name, "topk", topk, 1), need_int(name, "num_experts", num_experts, 1)
        need_dtype(name, dtype, FLOATS)
        need(name, not (fp8 and triton_dist.backend == "ascend"), "fp8 is True: Ascend 910 chips have no fp8, send 16 bits")
        owners = expert_owners(name, placement, num_experts, world)
        max_received = need_int(name, "max_received", world * max_tokens if max_received is None else max_received)
        max_rows = need_int(name, "max_rows", max_received * topk if max_rows is None else max_rows)
        slots = world * max_tokens * topk
        need(name, topk <= MOST_SLOTS, f"topk is {topk}: give an integer of at most {MOST_SLOTS}")
        need(name, slots < 2**31, f"{world} ranks * {max_tokens} tokens * {topk} slots do not fit 31 bits")
        need(name, method is None or method in METHODS, f"method is {method!r}: give one of {', '.join(METHODS)}")
        need(name, platform_problem(method) is None, platform_problem(method))
        need(name, layout in list(LAYOUTS), f"layout is {layout!r}: give one of {', '.join(LAYOUTS)}")
        meant = method or "gather"  # by a config
        least = dict(programs=3, **NORMAL) if meant == "pipelined" else {}
        given = config, programs
        defaults = fit_putters(default_config(meant, max_tokens, hidden, layout, topk), programs)
        config, programs = checked_config(name, defaults, config, programs, LAUNCH_OPTIONS, least)
        problem = slots_problem(config, topk, meant)
        need(name, problem is None, problem)
        if meant == "pipelined":
            need_pipeline(name, config, programs, 2, CHUNKED[layout])
            for entry, most in STREAMS.items() if layout == "rows" else ():
                need(name, config[entry] <= most, f"{entry} is {config[entry]}: give an integer from 0 to {most}")
        agreed.on = (
            f"max_tokens={max_tokens}, hidden={hidden}, topk={topk}, num_experts={num_experts}, {dtype}, placement={owners}, "
            f"max_received={max_received}, max_rows={max_rows}, fp8={bool(fp8)}, method={method!r}, config={config}, "
            f"programs={programs}, layout={layout!r}"
        )
    if method is None:
        sources = world - 1 if layout == "rows" else world  # whose tokens the inbox of pipelined holds
        suited = "pipelined" if max_received >= sources * max_tokens else "gather"
        possible = ["gather", "pipelined"] if suited == "pipelined" else ["gather"]
        key = dict(tokens=max_tokens, hidden=hidden, topk=topk, experts=num_experts, fp8=bool(fp8), dtype=name_of(dtype))
        measured = dict(rows="moe_dispatch", tokens="moe_dispatch_tokens")[layout]
        chosen = chosen_candidate(name, possible, suited, *given, team, measured, key)
        method = chosen["method"]
        if method != meant or len(chosen) > 1:  # only where neither config nor programs was given
            config, programs = _configured(max_tokens, hidden, **chosen, layout=layout, topk=topk)
    if fp8:  # whole groups at a time
        config["BLOCK_H"] = max(config["BLOCK_H"], GROUP)
    return MoeDispatchContext(
        max_tokens, hidden, topk, num_experts, dtype, owners, max_received, max_rows, bool(fp8), team, layout,
        method, config, programs,
    )  # fmt: skip


def moe_dispatch(x, topk_ids, context, out=None, check=None):
    """Sends every token to the ranks of its experts.

    Args:
        x: [T, H], this rank's tokens, rows contiguous (any row stride); T from 0 to max_tokens may differ between ranks
            and calls. Any memory.
        topk_ids: [T, k] int32 or int64, any strides: experts 0 .. E - 1; negative: dropped. A token may name an expert more
            than once; each slot is a row.
        context: of `create_moe_dispatch_context`.
        out: of `context.empty()` or an earlier result; None: new (with the layout tokens, counts and handle).
        check: whether to look, after the call, if it failed, and raise (OverflowError when some rank's tokens or rows exceed
            max_received or max_rows; ValueError for ids of E or more; on all ranks alike). That waits for the device. None:
            on `cpu`, and where the context is smaller than the worst case. False: `handle.check()` does it at any time.

    Returns: (tokens, counts, handle).
        tokens: [max_rows, H] of x's dtype, with fp8 a pair: payload [max_rows, H] float8_e4m3fn and scales
            [max_rows, cdiv(H, 128)] fp32. The first sum(counts) rows are valid, ordered by local expert, then source rank,
            token and slot; always the same. The rest is left as it was.
            Layout tokens: [n, H], with fp8 [n, H] and [n, cdiv(H, 128)], a view of the context's memory; n is max_received by
            gather and num_ranks * max_tokens by pipelined. tokens[handle.index[:sum(counts)]] is what the layout rows gives,
            bit for bit. Valid until this rank's next dispatch with the context, and until context.free(): what reads it on the
            call's stream before that needs nothing more, what reads it on another stream must be ordered before by an event.
        counts: [local experts] int32, rows of each expert.
        handle: a MoeDispatchHandle for `moe_combine`; its `index` with the layout tokens.
    When a call failed, counts are zero, handle.rows is -1, and `moe_combine` gives NaN; the next call works.
    All ranks of the team must make the same calls in the same order. With `out` given nothing is allocated; with
    check=False, too, there is no host synchronisation and the call can be captured in a CUDA graph.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    begin("moe_dispatch", MoeDispatchContext, context, x=x, topk_ids=topk_ids)
    out = context.empty() if out is None else out
    context.check(x, topk_ids, out)
    tokens, counts, handle = out
    tokens, scales = tokens if context.fp8 else (tokens, None)
    handle.num_tokens = x.shape[0]
    context.run(x, topk_ids, tokens, scales, counts, handle)
    if check or (check is None and (context.may_overflow or triton_dist.backend == "cpu")):
        handle.check()
    return out
