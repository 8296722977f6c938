"""Mixture of experts: the methods of a dispatch, and configurations of `pipelined`, are the candidates, timed together with the
combine that goes with each."""

import torch

from triton_dist import kernels
from triton_dist.kernels.moe_dispatch import METHODS
from triton_dist.kernels.moe_dispatch_pipelined import pipelined_candidates
from triton_dist.kernels.moe_dispatch_pipelined_tokens import pipelined_tokens_candidates
from triton_dist.kernels.moe_quantization import GROUP, quantize

from .tunable import Tunable, random


class MoeDispatch(Tunable):
    """A dispatch and its combine. `tokens` of each rank; `fp8`: 1 for the dispatch's fp8 payload. The experts change nothing,
    so a token comes back times its weights' sum."""

    name, sizes, compared = "moe_dispatch", ("tokens", "hidden", "topk", "experts", "fp8"), False
    layout, pipelined = "rows", staticmethod(pipelined_candidates)

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.T, self.H, self.k, self.E, self.fp8 = *shape[:4], bool(shape[4])
        self.x, self.ids = self.operands(self.rank)
        self.weights = random((self.T, self.k), torch.float32, self.device, 6, self.rank)
        self.out = torch.empty(self.T, self.H, dtype=dtype, device=self.device)
        self.y = None  # the experts' rows; those of the first dispatch serve all, since every method gives the same
        self.poison()

    def key(self):
        return {**super().key(), "fp8": self.fp8}  # no size

    def candidates(self):
        return [
            *(dict(method=method) for method in METHODS),
            *(dict(method="pipelined", **one) for one in self.pipelined(self.T, self.H)),
        ]

    def operands(self, rank):
        x = random((self.T, self.H), self.dtype, self.device, 4, rank)
        ids = random((self.T, self.E), torch.float32, self.device, 5, rank).topk(self.k).indices.to(torch.int32)
        return x, ids

    def make_context(self, candidate):
        return Exchange(self, candidate)

    def call(self, made):
        kernels.moe_dispatch(self.x, self.ids, made.dispatch, made.sent, check=False)
        kernels.moe_combine(self.y, self.weights, made.sent[2], made.combine, self.out)

    def seen(self, x):
        """The tokens as they arrive."""
        if not self.fp8:
            return x
        values, scales = quantize(x)
        return (values.float() * scales.repeat_interleave(GROUP, 1)[:, : self.H]).to(self.dtype)

    def rows(self):
        """What this rank receives, by plain torch: ordered by expert, source rank, token, slot."""
        xs, ids = (torch.cat(both) for both in zip(*map(self.operands, range(self.world))))
        each, more = divmod(self.E, self.world)  # experts of a rank; the first ranks have one more
        first = self.rank * each + min(self.rank, more)
        flat = ids.view(-1).long()
        mine = ((flat >= first) & (flat < first + each + (self.rank < more))).nonzero()[:, 0]
        return self.seen(xs)[mine[flat[mine].sort(stable=True).indices] // self.k]

    def expected(self):
        return self.seen(self.x).float() * self.weights.sum(1, keepdim=True)

    def check(self, made):
        tokens, counts, handle = made.sent
        handle.check()
        n, rows = int(counts.sum()), self.rows()
        which = slice(n) if handle.index is None else handle.index[:n].long()
        payload, *scales = (part[which] for part in (tokens if self.fp8 else [tokens]))
        if self.fp8:
            payload = (payload.float() * scales[0].repeat_interleave(GROUP, 1)[:, : self.H]).to(self.dtype)
        if not torch.equal(payload, rows):
            raise AssertionError("the rows that were dispatched are wrong")
        super().check(made)


class MoeDispatchTokens(MoeDispatch):
    """With the layout tokens; measured under a name of its own, since other candidates are good for it."""

    name = "moe_dispatch_tokens"
    layout, pipelined = "tokens", staticmethod(pipelined_tokens_candidates)


class Exchange:
    """Contexts and buffers of a candidate."""

    def __init__(self, owner, candidate):
        self.dispatch = kernels.create_moe_dispatch_context(
            owner.T, owner.H, owner.k, owner.E, owner.dtype, fp8=owner.fp8, team=owner.team, layout=owner.layout, **candidate
        )
        self.combine = kernels.create_moe_combine_context(self.dispatch)
        self.sent = self.dispatch.empty()
        if owner.y is None:
            rows = owner.rows()
            owner.y = torch.zeros(self.dispatch.max_rows, owner.H, dtype=owner.dtype, device=owner.device)
            owner.y[: len(rows)] = rows

    def free(self):
        self.combine.free()
        self.dispatch.free()
