"""Dispatch and combine of a mixture of experts: configurations of their kernels are the candidates."""

import torch

import triton_dist
from triton_dist import kernels
from triton_dist.kernels.arguments import device_programs
from triton_dist.kernels.moe_quantization import GROUP, quantize

from .tunable import Tunable, random


class Experts(Tunable):
    """`tokens` of each rank; `fp8`: 1 for the dispatch's fp8 payload."""

    sizes, compared = ("tokens", "hidden", "topk", "experts", "fp8"), False

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.T, self.H, self.k, self.E, self.fp8 = *shape[:4], bool(shape[4])
        self.x, self.ids = self.operands(self.rank)

    def key(self):
        return {**super().key(), "fp8": self.fp8}  # no size

    def operands(self, rank):
        x = random((self.T, self.H), self.dtype, self.device, 4, rank)
        ids = random((self.T, self.E), torch.float32, self.device, 5, rank).topk(self.k).indices.to(torch.int32)
        return x, ids

    def make_dispatch(self, **candidate):
        return kernels.create_moe_dispatch_context(
            self.T, self.H, self.k, self.E, self.dtype, fp8=self.fp8, team=self.team, **candidate
        )


class Dispatched:
    """A dispatch context, and what it writes into."""

    def __init__(self, context):
        self.context, self.out = context, context.empty()

    def free(self):
        self.context.free()


class MoeDispatch(Experts):
    name = "moe_dispatch"

    def candidates(self):
        """{}: as it is."""
        most = device_programs()
        if triton_dist.backend != "nvidia":
            return [{}, dict(programs=1)]
        blocks = [(1, 8, 2048, 16), (1, 4, 4096, 8), (2, 4, 4096, 8)]
        configs = [dict(BLOCK_T=t, BLOCK_R=r, BLOCK_H=h, num_warps=warps) for t, r, h, warps in blocks]
        return [{}, *(dict(config=config, programs=programs) for config in configs for programs in (most // 2, most))]

    def make_context(self, candidate):
        return Dispatched(self.make_dispatch(**candidate))

    def call(self, made):
        kernels.moe_dispatch(self.x, self.ids, made.context, made.out, check=False)

    def check(self, made):
        tokens, counts, handle = made.out
        handle.check()
        xs, ids = (torch.cat(both) for both in zip(*map(self.operands, range(self.world))))
        owners = torch.tensor(made.context.owners, device=self.device)
        flat = ids.view(-1).long()
        mine = (owners[flat] == self.rank).nonzero()[:, 0]
        rows = mine[flat[mine].sort(stable=True).indices] // self.k
        if self.fp8:
            values, scales = quantize(xs)
            pairs = (tokens[0].view(torch.uint8), values.view(torch.uint8)), (tokens[1], scales)
        else:
            pairs = ((tokens, xs),)
        n = int(counts.sum())
        if n != len(rows) or not all(torch.equal(found[:n], expected[rows]) for found, expected in pairs):
            raise AssertionError("the rows are wrong")


class MoeCombine(Experts):
    """One dispatch serves all candidates; the experts change nothing, so a token comes back times its weights' sum."""

    name = "moe_combine"

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.weights = random((self.T, self.k), torch.float32, self.device, 6, self.rank)
        self.out = torch.empty(self.T, self.H, dtype=dtype, device=self.device)
        self.poison()

    def candidates(self):
        most = device_programs()
        if triton_dist.backend != "nvidia":
            return [{}, dict(programs=1)]
        blocks = [(2048, 8, most), (2048, 8, 2 * most), (4096, 8, most), (4096, 16, most)]
        return [{}, *(dict(config=dict(BLOCK_T=1, BLOCK_H=h, num_warps=warps), programs=p) for h, warps, p in blocks)]

    def make_context(self, candidate):
        return Combined(self, candidate)

    def call(self, made):
        kernels.moe_combine(made.y, self.weights, made.handle, made.context, self.out)

    def expected(self):
        x = self.x
        if self.fp8:
            values, scales = quantize(x)
            x = values.float() * scales.repeat_interleave(GROUP, 1)[:, : self.H]
        return x.float() * self.weights.sum(1, keepdim=True)


class Combined:
    """A combine context after a dispatch of its own."""

    def __init__(self, owner, candidate):
        self.dispatch = owner.make_dispatch()
        tokens, _, self.handle = kernels.moe_dispatch(owner.x, owner.ids, self.dispatch, check=True)
        if owner.fp8:
            tokens = tokens[0].float() * tokens[1].repeat_interleave(GROUP, 1)[:, : owner.H]
        self.y = tokens.nan_to_num().to(owner.dtype)
        self.context = kernels.create_moe_combine_context(self.dispatch, **candidate)

    def free(self):
        self.context.free()
        self.dispatch.free()
