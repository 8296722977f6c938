"""MoE dispatch: every token to the ranks of its experts, grouped there by expert, in one kernel without a host barrier.

    ctx = create_moe_dispatch_context(max_tokens, hidden, topk, num_experts, torch.bfloat16)   # once
    tokens, counts, handle = moe_dispatch(x, topk_ids, ctx)                                    # any number of calls
    ctx.free()

A *slot* is one entry of topk_ids, a *row* one line of the result: a token appears in a row for each of its slots that
lives here, but travels to a rank once.

How it works. Every program numbers its tokens' slots by expert, and its tokens by the ranks that they go to. The sums
over programs, one line of E + W + 1 numbers a rank, go to every rank (`counts`, signal `counted[s]`: set by one program of
rank s to the number of the call). From that matrix all ranks derive the same things: where each rank's tokens begin in every
inbox, the row of every slot, and whether anything overflows anywhere; if so nobody sends. Then a program puts its
tokens into the inboxes, and for every slot two words: the token's place in the inbox and where it came from; tokens that
stay here may go straight into their rows (place -1, see PLACE_OWN), while the others are on their way. `filled[s]` counts
rank s's programs that have done so. At last the other rows are gathered from the inbox into the result.

Why nothing is overwritten early, whatever the number of ranks. A rank's counts of call e say that it has finished call
e - 1, because its calls follow one another on its stream. Inbox and maps are written in call e only after the counts of
all ranks for call e are here, so nobody still reads what call e - 1 left. The counts themselves are doubled by the
parity of e: a rank that writes those of call e has finished call e - 1, for which it needed everybody's counts, so
everybody had finished call e - 2. `filled` has several writers, but for the same reason none of them adds for call e + 1
before its reader has finished call e. So no acknowledgements are needed. The number of the call lies in device memory, a
word a program, so that a captured graph replays right.

Sizes on the host. The number of rows is known to the devices alone. Results have the capacity of the context, `counts`
(on the device) says how much of it is valid; nothing is synchronised for it. See `moe_dispatch` about `check`.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import shmem

from .arguments import (
    FLOATS,
    LAUNCH_OPTIONS,
    checked_config,
    device_programs,
    need,
    need_apart,
    need_dtype,
    need_int,
    need_operand,
)
from .moe_quantization import GROUP, PAYLOAD_FP8, quantize_tile
from .moe_routing import count_slots, expert_of, expert_owners, grouped, sum_lines
from .operator_context import OperatorContext, agreement, begin

# Whether a rank's own tokens go straight into their rows, and not by way of its inbox. On Ascend a store of chosen rows becomes
# a load, a choice and a store, which would write other rows back.
PLACE_OWN = triton_dist.backend == "nvidia"
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
def _place_rows(
    x, out, out_scales, start, end, row, here, H, stride_x,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, K_PAD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """This rank's own tokens, straight into the rows [BLOCK_T, K_PAD] of their slots that are `here`."""
    t = start + tl.arange(0, BLOCK_T)
    inside = (t < end)[:, None]
    from_row = x + t[:, None].to(tl.int64) * stride_x
    h, slot = tl.arange(0, BLOCK_H), tl.arange(0, K_PAD)[None, :]
    groups = tl.cdiv(H, _GROUP)
    for first in range(0, H, BLOCK_H):
        cols = (first + h)[None, :]
        tile = tl.load(from_row + cols, mask=inside & (cols < H), other=0.0)
        if FP8:
            scaled, scale = quantize_tile(tile, BLOCK_T, BLOCK_H)
            tile = scaled.to(out.dtype.element_ty)
        for j in tl.static_range(K_PAD):
            to = tl.sum(tl.where((slot == j) & here, row, 0), 1).to(tl.int64)[:, None]
            wanted = (tl.sum(((slot == j) & here).to(tl.int32), 1) > 0)[:, None]
            tl.store(out + to * H + cols, tile, mask=wanted & (cols < H))
            if FP8:
                group = first // _GROUP + tl.arange(0, BLOCK_H // _GROUP)[None, :]
                tl.store(out_scales + to * groups + group, scale, mask=wanted & (group < groups))


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
    x, ids, owners, first_expert, out, out_scales, out_counts, number, out_origin, out_rows, totals,
    inbox, scales, source, origin, counts, arrived, counted, filled, place, partial, base, epochs,
    T, H, topk, E, max_tokens, max_received, max_rows, stride_x, stride_t, stride_k, ctx,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr,
    FP8: tl.constexpr, PLACE_OWN: tl.constexpr,
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
    begins += tl.where(c < E, tl.cumsum(total, 0) - total, 0)
    wrong = tl.sum(tl.where(c == E + world, total, 0), 0)
    failed = (wrong > 0).to(tl.int32)
    rows_here = 0
    for d in range(0, world):
        low, high = tl.load(first_expert + d), tl.load(first_expert + d + 1)
        rows = tl.sum(tl.where((c >= low) & (c < high), total, 0), 0)
        received = tl.sum(tl.where(c == E + d, total, 0), 0)
        begins -= tl.where((c >= low) & (c < high), tl.sum(tl.where(c < low, total, 0), 0), 0)
        failed += (rows > max_rows).to(tl.int32) + (received > max_received).to(tl.int32)
        rows_here = tl.where(d == me, rows, rows_here)
        if pid == 0:
            tl.store(totals + d * 3 + tl.arange(0, 1), received)
            tl.store(totals + d * 3 + 1 + tl.arange(0, 1), rows)
            tl.store(totals + d * 3 + 2 + tl.arange(0, 1), wrong)
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
        for i in range(1, world + (0 if PLACE_OWN else 1)):
            peer = dl.owner_first(i, me, world)  # the own rank last: the link starts first
            here = kept & (owner == peer)
            at = tl.sum(tl.where(leads & here, spot, 0), 1)
            goes = tl.sum(here.to(tl.int32), 1) > 0
            dl.remote_store(source + row, tl.broadcast_to(at[:, None], (BLOCK_T, K_PAD)), peer, ctx, here)
            dl.remote_store(origin + row, me * max_tokens * topk + slot, peer, ctx, here)
            _send_rows(x, inbox, scales, start, end, at, goes, H, stride_x, peer, ctx, BLOCK_T, BLOCK_H, FP8)
        if PLACE_OWN:
            own = kept & (owner == me)
            tl.store(source + row, tl.full((BLOCK_T, K_PAD), -1, tl.int32), mask=own)
            tl.store(origin + row, me * max_tokens * topk + slot, mask=own)
            _place_rows(x, out, out_scales, start, end, row, own, H, stride_x, BLOCK_T, BLOCK_H, K_PAD, FP8)
        start += BLOCK_T
    dl.notify_all(dl.signal_at(filled, me), ctx, 1, "add")

    # Gather the rows.
    token = dl.wait(filled, (past + 1) * programs, ctx, "ge", world)
    inbox = dl.consume_token(inbox, token)
    r_lane = tl.arange(0, BLOCK_R)
    start = tl.where(failed > 0, rows_here, pid * BLOCK_R)
    while start < rows_here:
        row = start + r_lane
        valid = row < rows_here
        tl.store(out_origin + row, tl.load(origin + row, mask=valid), mask=valid)
        at = tl.load(source + row, mask=valid, other=0)
        if PLACE_OWN:
            if tl.max(at, 0) >= 0:  # not only own ones, which are there already
                _gather_rows(out, out_scales, inbox, scales, row, at, valid & (at >= 0), H, BLOCK_H, FP8)
        else:
            _gather_rows(out, out_scales, inbox, scales, row, at, valid, H, BLOCK_H, FP8)
        start += programs * BLOCK_R
    tl.store(epochs + pid + tl.arange(0, 1), past + 1)


def reference(x, topk_ids, owners, group=None):
    """`moe_routing.grouped` for this rank, after everybody's tokens and ids were gathered over `group` by torch.distributed."""
    said = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (x.cpu(), topk_ids.cpu()), group=group)
    return grouped([a for a, _ in said], [b for _, b in said], list(owners), dist.get_rank(group))


def default_config(max_tokens):
    """(constexprs and launch options of the kernel, programs) that suit this process's platform. Programs of all ranks wait
    for one another, so there are no more of them than the device runs at a time."""
    if triton_dist.backend == "cpu":
        return dict(BLOCK_T=64, BLOCK_R=64, BLOCK_H=1024), device_programs()
    if triton_dist.backend == "nvidia":
        if max_tokens <= 2 * device_programs():  # a token a program, all of a row on its way at once
            return dict(BLOCK_T=1, BLOCK_R=8, BLOCK_H=2048, num_warps=16), device_programs()
        # maxnreg: so that two programs share a multiprocessor, as they must
        return dict(BLOCK_T=2, BLOCK_R=4, BLOCK_H=4096, num_warps=8, maxnreg=128), 2 * device_programs()
    return dict(BLOCK_T=8, BLOCK_R=8, BLOCK_H=512), device_programs()


class MoeDispatchHandle:
    """What a dispatch leaves for `moe_combine`, on this rank's device; valid until a dispatch writes into it again.

    origin: [max_rows] int32, (source rank * max_tokens + token) * topk + slot of every row.
    number: [max_tokens, topk] int32, of this rank's own slots; negative where a slot was dropped.
    rows: [1] int32, rows of the result; -1 when the dispatch failed.
    totals: [num_ranks, 3] int32, alike on all ranks: tokens received by each rank, its rows, and how many ids of all
        ranks name no expert.
    num_tokens: int, this rank's tokens; None before the first dispatch. context: of the dispatch.
    """

    def __init__(self, context):
        def empty(*shape):
            return torch.empty(shape, dtype=torch.int32, device=context.device)

        self.context, self.num_tokens = context, None
        self.origin, self.number = empty(context.max_rows), empty(context.max_tokens, context.topk)
        self.rows, self.totals = empty(1), empty(context.num_ranks, 3)

    def check(self):
        """Raises on all ranks alike, with the same text, when the dispatch failed. Synchronises with the device."""
        c = self.context
        totals = self.totals.tolist()
        if totals[0][2]:
            raise ValueError(
                f"moe_dispatch: {totals[0][2]} entries of the ranks' topk_ids name no expert: they go from 0 to {c.E - 1}"
            )
        for rank, (received, rows, _) in enumerate(totals):
            for what, n, room in (("tokens", received, c.max_received), ("rows", rows, c.max_rows)):
                if n > room:
                    name = "max_received" if what == "tokens" else "max_rows"
                    raise OverflowError(
                        f"moe_dispatch: rank {rank} would get {n} {what}, the context holds {room}: nothing was sent; "
                        f"raise {name} of create_moe_dispatch_context"
                    )


class MoeDispatchContext(OperatorContext):
    """What `moe_dispatch` needs besides its operands. Made by `create_moe_dispatch_context`."""

    def __init__(self, max_tokens, H, topk, E, dtype, owners, max_received, max_rows, fp8, team, config, programs):
        super().__init__("moe_dispatch", team)
        self.max_tokens, self.H, self.topk, self.E, self.dtype, self.owners = max_tokens, H, topk, E, dtype, owners
        self.max_received, self.max_rows, self.fp8 = max_received, max_rows, fp8
        self.config, self.programs = config, programs
        self.num_local_experts = owners.count(self.rank)
        self.may_overflow = max_received < self.num_ranks * max_tokens or max_rows < self.num_ranks * max_tokens * topk
        self.groups = triton.cdiv(H, GROUP)
        width = E + self.num_ranks + 1
        self.columns, self.k_pad = triton.next_power_of_2(width), triton.next_power_of_2(topk)
        received, rows = max(max_received, 1), max(max_rows, 1)
        self.payload_dtype = PAYLOAD_FP8 if fp8 else dtype
        self.inbox = self.tensor((received, H), self.payload_dtype)
        self.scales = self.tensor((received if fp8 else 1, self.groups), torch.float32)
        self.source, self.origin, self.counts = (
            self.tensor(shape, torch.int32) for shape in ((rows,), (rows,), (2, self.num_ranks, width))
        )
        self.arrived = self.signals(1)
        self.counted, self.filled = (self.signals(self.num_ranks) for _ in range(2))
        first = [sum(owner < d for owner in owners) for d in range(self.num_ranks + 1)]
        self.owner_table, self.first_expert = (
            torch.tensor(values, dtype=torch.int32, device=self.device) for values in (owners, first)
        )
        self.place = self.local(max_tokens, topk)
        self.partial, self.base = self.local(programs, width), self.local(programs, width)
        self.epochs = self.local(programs)

    def empty(self):
        """A result for `moe_dispatch(..., out=...)`: (tokens, counts, handle), or ((payload, scales), counts, handle)."""
        device = self.device
        tokens = torch.empty(self.max_rows, self.H, dtype=self.payload_dtype, device=device)
        counts = torch.empty(self.num_local_experts, dtype=torch.int32, device=device)
        if self.fp8:
            tokens = tokens, torch.empty(self.max_rows, self.groups, dtype=torch.float32, device=device)
        return tokens, counts, MoeDispatchHandle(self)

    def check(self, x, ids, out):
        """Raises ValueError, naming rank and values, unless the operands fit."""
        call, device = "moe_dispatch", self.device

        def fit(fits, text):
            need(call, fits, text)

        fit(x.dim() == 2 and x.shape[1] == self.H, f"x is {list(x.shape)}, the context was made for [T, {self.H}]")
        fit(x.shape[0] <= self.max_tokens, f"x has {x.shape[0]} tokens, the context was made for {self.max_tokens}")
        shape = [x.shape[0], self.topk]
        fit(list(ids.shape) == shape, f"topk_ids is {list(ids.shape)}, it must be {shape}")
        fit(ids.dtype in (torch.int32, torch.int64), f"topk_ids is {ids.dtype}, it must be int32 or int64")
        need_operand(call, "x", x, self.dtype, device)
        fit(ids.device == device, f"topk_ids is on {ids.device}, not on {device}")
        fit(x.stride(1) == 1 or self.H == 1, f"x has strides {x.stride()}; its rows must be contiguous")
        fit(self._made_by_empty(out), "out does not fit: make it with empty() of this context")
        need_apart(call, (out[0][0] if self.fp8 else out[0]), {"x": x, "topk_ids": ids})
        self.agree(call, "")

    def _made_by_empty(self, out):
        """Whether `out` has the structure, shapes, dtypes and places of what `empty()` gives."""
        if not isinstance(out, (tuple, list)) or len(out) != 3 or getattr(out[2], "context", None) is not self:
            return False
        rows, columns = (self.max_rows, self.H), (self.max_rows, self.groups)
        wanted = [(out[0], rows, self.payload_dtype), (out[1], (self.num_local_experts,), torch.int32)]
        if self.fp8:
            if not isinstance(out[0], (tuple, list)) or len(out[0]) != 2:
                return False
            wanted = [(out[0][0], rows, PAYLOAD_FP8), (out[0][1], columns, torch.float32), wanted[1]]
        return all(
            isinstance(one, torch.Tensor) and tuple(one.shape) == shape and one.dtype == dtype
            and one.is_contiguous() and one.device == self.device
            for one, shape, dtype in wanted
        )  # fmt: skip


def create_moe_dispatch_context(
    max_tokens, hidden, topk, num_experts, dtype, placement=None, max_received=None, max_rows=None, fp8=False,
    team=0, config=None, programs=None,
):  # fmt: skip
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args (equal on all ranks of the team):
        max_tokens: most tokens that a rank has in a call, 0 or more.
        hidden, topk, num_experts: H, k and E, 1 or more.
        dtype: torch.float16, bfloat16 or float32, of the tokens.
        placement: list or int tensor [E], the team rank of every expert, not decreasing; a rank may have any number of
            experts, also none. None: even, the first ranks have one more where E is not a multiple.
        max_received: tokens that a rank can receive in a call. None: the worst case, num_ranks * max_tokens.
        max_rows: rows that a rank's result can have. None: max_received * topk.
        fp8: send e4m3 values with an fp32 scale for each 128 columns of a token, its largest magnitude over 448. A NaN stays
            a NaN and leaves its group's scale alone; in a group with an infinity the finite values become zeros or NaN.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(max_tokens)[0]`.
        programs: programs in the grid; not more than the device runs at a time.

    Symmetric memory: max_received * H elements of the payload (and its scales), 8 bytes a row, 2 * W * (E + W + 1) * 4 bytes
    of counts, 2 * W + 1 signals.
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
        need(name, slots < 2**31, f"{world} ranks * {max_tokens} tokens * {topk} slots do not fit 31 bits")
        config, programs = checked_config(name, default_config(max_tokens), config, programs, LAUNCH_OPTIONS)
        if fp8:  # whole groups at a time
            config["BLOCK_H"] = max(config["BLOCK_H"], GROUP)
        agreed.on = (
            f"max_tokens={max_tokens}, hidden={hidden}, topk={topk}, num_experts={num_experts}, {dtype}, placement={owners}, "
            f"max_received={max_received}, max_rows={max_rows}, fp8={bool(fp8)}, config={config}, programs={programs}"
        )
    return MoeDispatchContext(
        max_tokens, hidden, topk, num_experts, dtype, owners, max_received, max_rows, bool(fp8), team, config, programs
    )


def moe_dispatch(x, topk_ids, context, out=None, check=None):
    """Sends every token to the ranks of its experts.

    Args:
        x: [T, H], this rank's tokens, rows contiguous (any row stride); T from 0 to max_tokens may differ between ranks
            and calls. Any memory.
        topk_ids: [T, k] int32 or int64, any strides: experts 0 .. E - 1; negative: dropped. A token may name an expert more
            than once; each slot is a row.
        context: of `create_moe_dispatch_context`.
        out: of `context.empty()` or an earlier result; None: new.
        check: whether to look, after the call, if it failed, and raise (OverflowError when some rank's tokens or rows exceed
            max_received or max_rows; ValueError for ids of E or more; on all ranks alike). That waits for the device. None:
            on `cpu`, and where the context is smaller than the worst case. False: `handle.check()` does it at any time.

    Returns: (tokens, counts, handle).
        tokens: [max_rows, H] of x's dtype, with fp8 a pair: payload [max_rows, H] float8_e4m3fn and scales
            [max_rows, cdiv(H, 128)] fp32. The first sum(counts) rows are valid, ordered by local expert, then source rank,
            token and slot; always the same. The rest is left as it was.
        counts: [local experts] int32, rows of each expert.
        handle: a MoeDispatchHandle for `moe_combine`.
    When a call failed, counts are zero, handle.rows is -1, and `moe_combine` gives NaN; the next call works.
    All ranks of the team must make the same calls in the same order. With `out` given nothing is allocated; with
    check=False, too, there is no host synchronisation and the call can be captured in a CUDA graph.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    begin("moe_dispatch", MoeDispatchContext, context, x=x, topk_ids=topk_ids)
    out = context.empty() if out is None else out
    context.check(x, topk_ids, out)
    tokens, counts, handle = out
    tokens, scales = tokens if context.fp8 else (tokens, context.scales)
    handle.num_tokens = x.shape[0]
    c = context
    moe_dispatch_kernel[(c.programs,)](
        x, topk_ids, c.owner_table, c.first_expert, tokens, scales, counts, handle.number, handle.origin, handle.rows,
        handle.totals, c.inbox, c.scales, c.source, c.origin, c.counts, c.arrived, c.counted, c.filled,
        c.place, c.partial, c.base, c.epochs, x.shape[0], c.H, c.topk, c.E, c.max_tokens, c.max_received, c.max_rows,
        x.stride(0), topk_ids.stride(0), topk_ids.stride(1), c.table,
        **c.config, K_PAD=c.k_pad, COLUMNS=c.columns, FP8=c.fp8, PLACE_OWN=PLACE_OWN,
    )  # fmt: skip
    if check or (check is None and (context.may_overflow or triton_dist.backend == "cpu")):
        handle.check()
    return out
