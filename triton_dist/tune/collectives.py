"""The collectives: methods, or grids and blocks, are the candidates."""

import torch
import torch.distributed as dist

from triton_dist import kernels
from triton_dist.kernels.all_reduce import METHODS as ALL_REDUCE_METHODS
from triton_dist.kernels.arguments import device_programs

from .tunable import Tunable, all_gather_single, random, reduce_scatter_single


class Collective(Tunable):
    """`bytes`: of a rank's shard, of its result for reduce_scatter, of the message for all_reduce."""

    sizes = ("bytes",)

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.n = max(shape[0] // dtype.itemsize, 1)
        self.x = self.operand(self.rank)

    def operand(self, rank):
        return random((self.extent(),), self.dtype, self.device, 3, rank)

    def extent(self):
        return self.n

    def candidates(self):
        """Programs of the largest grid, and elements that one moves at a time; {}: as it is."""
        most = device_programs()
        grids = [dict(programs=p, block=b) for p in (most // 4, most // 2, most) for b in (2048, 4096, 8192) if p]
        return [{}, *grids]

    def whole_sum(self):
        return sum(self.operand(rank).float() for rank in range(self.world))


class AllGather(Collective):
    name = "all_gather"

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.out, self.theirs = (torch.empty(self.world * self.n, dtype=dtype, device=self.device) for _ in range(2))
        self.poison()

    def make_context(self, candidate):
        return kernels.create_all_gather_context(self.n, self.dtype, team=self.team, **candidate)

    def call(self, context):
        kernels.all_gather(self.x, context, self.out)

    def expected(self):
        return torch.cat([self.operand(rank) for rank in range(self.world)])

    def baseline(self):
        all_gather_single(self.theirs, self.x)


class ReduceScatter(Collective):
    name = "reduce_scatter"

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.out, self.theirs = (torch.empty(self.n, dtype=dtype, device=self.device) for _ in range(2))
        self.poison()

    def extent(self):
        return self.world * self.n

    def make_context(self, candidate):
        return kernels.create_reduce_scatter_context(self.n, self.dtype, team=self.team, **candidate)

    def call(self, context):
        kernels.reduce_scatter(self.x, context, "sum", self.out)

    def expected(self):
        return self.whole_sum()[self.rank * self.n : (self.rank + 1) * self.n]

    def baseline(self):
        reduce_scatter_single(self.theirs, self.x)


class AllReduce(Collective):
    name, methods = "all_reduce", ALL_REDUCE_METHODS

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.out, self.theirs = torch.empty_like(self.x), torch.zeros_like(self.x)  # zeros stay finite, reduced in place
        self.poison()

    def candidates(self):
        """The methods; what does not take the dtype is left out while tuning."""
        return [dict(method=method) for method in self.methods]

    def make_context(self, candidate):
        return kernels.create_all_reduce_context(self.n, self.dtype, team=self.team, **candidate)

    def call(self, context):
        kernels.all_reduce(self.x, context, "sum", self.out)

    def expected(self):
        return self.whole_sum()

    def baseline(self):
        dist.all_reduce(self.theirs)
