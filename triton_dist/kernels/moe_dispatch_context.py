"""What `moe_dispatch` needs and leaves: its context, made once, and the handle of a call, for `moe_combine`."""

import torch
import triton

from .arguments import need, need_apart, need_operand, overlap
from .moe_dispatch_gather import MoeDispatchGather
from .moe_dispatch_pipelined import MoeDispatchPipelined
from .moe_dispatch_pipelined_tokens import MoeDispatchPipelinedTokens
from .moe_quantization import GROUP, PAYLOAD_FP8
from .operator_context import OperatorContext

METHODS = ("gather", "pipelined")
LAYOUTS = dict(
    rows=dict(gather=MoeDispatchGather, pipelined=MoeDispatchPipelined),
    tokens=dict(gather=MoeDispatchGather, pipelined=MoeDispatchPipelinedTokens),
)


class MoeDispatchHandle:
    """What a dispatch leaves for `moe_combine`, on this rank's device; valid until a dispatch writes into it again.

    origin: [max_rows] int32, (source rank * max_tokens + token) * topk + slot of every row.
    index: [max_rows] int32, of the layout tokens: which row of the result's `tokens` each row is, in the order by expert; else
        None. Entries from sum(counts) on are left as they were.
    number: [max_tokens, topk] int32, of this rank's own slots; negative where a slot was dropped.
    rows: [1] int32, rows of the result; -1 when the dispatch failed.
    totals: [num_ranks, 3] int32, alike on all ranks: tokens received by each rank, its rows, and how many ids of all
        ranks name no expert.
    map: [num_ranks, max_tokens, topk] int32, tokens: [num_ranks] int32, of the method pipelined: the row of every slot of
        every rank's tokens that is here, else -1, and how many tokens each rank had; else None.
    num_tokens: int, this rank's tokens; None before the first dispatch. context: of the dispatch.
    """

    def __init__(self, context):
        def empty(*shape):
            return torch.empty(shape, dtype=torch.int32, device=context.device)

        self.context, self.num_tokens = context, None
        self.origin, self.number = empty(context.max_rows), empty(context.max_tokens, context.topk)
        self.index = empty(context.max_rows) if context.layout == "tokens" else None
        self.map = self.tokens = None
        if context.method == "pipelined":
            self.map, self.tokens = empty(context.num_ranks, context.max_tokens, context.topk), empty(context.num_ranks)
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
                        f"moe_dispatch: rank {rank} would get {n} {what}, the context holds {room}: nobody got any; "
                        f"raise {name} of create_moe_dispatch_context"
                    )


class MoeDispatchContext(OperatorContext):
    """What `moe_dispatch` needs besides its operands. Made by `create_moe_dispatch_context`."""

    def __init__(
        self, max_tokens, H, topk, E, dtype, owners, max_received, max_rows, fp8, team, layout, method, config, programs
    ):
        super().__init__("moe_dispatch", team)
        self.layout, self.method = layout, method
        self.max_tokens, self.H, self.topk, self.E, self.dtype, self.owners = max_tokens, H, topk, E, dtype, owners
        self.max_received, self.max_rows, self.fp8 = max_received, max_rows, fp8
        self.num_local_experts = owners.count(self.rank)
        self.may_overflow = max_received < self.num_ranks * max_tokens or max_rows < self.num_ranks * max_tokens * topk
        self.groups, self.k_pad = triton.cdiv(H, GROUP), triton.next_power_of_2(topk)
        self.payload_dtype = PAYLOAD_FP8 if fp8 else dtype
        first = [sum(owner < d for owner in owners) for d in range(self.num_ranks + 1)]
        self.owner_table, self.first_expert = (
            torch.tensor(values, dtype=torch.int32, device=self.device) for values in (owners, first)
        )
        self.run = LAYOUTS[layout][method](self, config, programs)
        places = max_received if method == "gather" else self.num_ranks * max_tokens
        self.inbox = (self.run.inbox[:places], self.run.scales[:places])  # the tokens of the layout tokens

    def empty(self):
        """A result for `moe_dispatch(..., out=...)`: (tokens, counts, handle), or ((payload, scales), counts, handle). With the
        layout tokens, `tokens` is the same memory of the context every time."""
        need("moe_dispatch", self.symmetric is not None, "the context was freed")
        counts = torch.empty(self.num_local_experts, dtype=torch.int32, device=self.device)
        payload, scales = self.inbox
        if self.layout == "rows":
            payload = torch.empty(self.max_rows, self.H, dtype=self.payload_dtype, device=self.device)
            scales = torch.empty(self.max_rows, self.groups, dtype=torch.float32, device=self.device) if self.fp8 else None
        return (payload, scales) if self.fp8 else payload, counts, MoeDispatchHandle(self)

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
        views = ", whose tokens are the context's own memory" if self.layout == "tokens" else ""
        fit(self._made_by_empty(out), f"out does not fit: make it with empty() of this context{views}")
        parts = out[0] if self.fp8 else [out[0]]
        if self.layout == "tokens":
            for name, operand in (("x", x), ("topk_ids", ids)):
                apart = not any(overlap(part, operand) for part in parts)
                fit(apart, f"{name} lies in the context's own memory, as `tokens` do, where this call writes: give a copy")
        else:
            need_apart(call, parts[0], {"x": x, "topk_ids": ids})
        self.agree(call, "")

    def _made_by_empty(self, out):
        """Whether `out` has the structure, shapes, dtypes and places of what `empty()` gives; with the layout tokens, whether
        its tokens are the context's."""
        if not isinstance(out, (tuple, list)) or len(out) != 3 or getattr(out[2], "context", None) is not self:
            return False
        n = self.max_rows if self.layout == "rows" else len(self.inbox[0])
        rows, columns = (n, self.H), (n, self.groups)
        wanted = [(out[0], rows, self.payload_dtype), (out[1], (self.num_local_experts,), torch.int32)]
        if self.fp8:
            if not isinstance(out[0], (tuple, list)) or len(out[0]) != 2:
                return False
            wanted = [(out[0][0], rows, PAYLOAD_FP8), (out[0][1], columns, torch.float32), wanted[1]]
        fits = all(
            isinstance(one, torch.Tensor) and tuple(one.shape) == shape and one.dtype == dtype
            and one.is_contiguous() and one.device == self.device
            for one, shape, dtype in wanted
        )  # fmt: skip
        parts = out[0] if self.fp8 else [out[0]]
        return fits and (self.layout == "rows" or all(a.data_ptr() == b.data_ptr() for a, b in zip(parts, self.inbox)))
