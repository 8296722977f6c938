"""The fused GEMMs: their methods are the candidates."""

import torch
import torch.distributed as dist

import triton_dist
from triton_dist import kernels
from triton_dist.kernels.allgather_gemm import METHODS as ALLGATHER_GEMM_METHODS
from triton_dist.kernels.arguments import KERNEL_METHODS
from triton_dist.kernels.gemm_allreduce import METHODS as GEMM_ALLREDUCE_METHODS
from triton_dist.kernels.gemm_reduce_scatter import METHODS as GEMM_REDUCE_SCATTER_METHODS

from .tunable import Tunable, all_gather_single, random, reduce_scatter_single


class Gemm(Tunable):
    sizes = ("M", "N", "K")

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.a, self.b = self.operands(self.rank)

    def operands(self, rank):
        M, N, K = self.shape
        a, b = random((M, K), self.dtype, self.device, 1, rank), random((K, N), self.dtype, self.device, 2, rank)
        return a, b * max(K, 1) ** -0.5

    def candidates(self):
        """The methods; a GPU has better ones than the portable kernels. What a platform lacks is left out while tuning."""
        portable = KERNEL_METHODS if triton_dist.backend == "nvidia" else ()
        return [dict(method=method) for method in self.methods if method not in portable]


class AllGatherGemm(Gemm):
    name, methods = "allgather_gemm", ALLGATHER_GEMM_METHODS

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        M, N, K = shape
        self.out = torch.empty(self.world * M, N, dtype=dtype, device=self.device)
        self.poison()
        self.gathered = torch.empty(self.world * M, K, dtype=dtype, device=self.device)
        self.product = torch.empty_like(self.out)

    def make_context(self, candidate):
        M, _, K = self.shape
        return kernels.create_allgather_gemm_context(M, K, self.dtype, team=self.team, **candidate)

    def call(self, context):
        kernels.allgather_gemm(self.a, self.b, context, self.out)

    def expected(self):
        return torch.cat([self.operands(rank)[0] for rank in range(self.world)]) @ self.b

    def baseline(self):
        all_gather_single(self.gathered, self.a)
        torch.mm(self.gathered, self.b, out=self.product)


class Sum(Gemm):
    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        M, N, _ = shape
        self.shard = -(-M // self.world)
        self.partial = torch.zeros(self.world * self.shard, N, dtype=dtype, device=self.device)
        self.scattered = torch.empty(self.shard, N, dtype=dtype, device=self.device)

    def whole_sum(self):
        total = torch.zeros(self.shape[:2], dtype=torch.float32, device=self.device)
        for rank in range(self.world):
            a, b = self.operands(rank)
            total += a @ b
        return total


class GemmReduceScatter(Sum):
    name, methods = "gemm_reduce_scatter", GEMM_REDUCE_SCATTER_METHODS

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.first = min(self.rank * self.shard, shape[0])
        self.last = min(self.first + self.shard, shape[0])
        self.out = torch.empty(self.last - self.first, shape[1], dtype=dtype, device=self.device)
        self.poison()

    def make_context(self, candidate):
        return kernels.create_gemm_reduce_scatter_context(*self.shape[:2], self.dtype, team=self.team, **candidate)

    def call(self, context):
        kernels.gemm_reduce_scatter(self.a, self.b, context, self.out)

    def expected(self):
        return self.whole_sum()[self.first : self.last]

    def baseline(self):
        torch.mm(self.a, self.b, out=self.partial[: self.shape[0]])
        reduce_scatter_single(self.scattered, self.partial)


class GemmAllReduce(Sum):
    name, methods = "gemm_allreduce", GEMM_ALLREDUCE_METHODS

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.out = torch.empty(shape[:2], dtype=dtype, device=self.device)
        self.poison()

    def make_context(self, candidate):
        return kernels.create_gemm_allreduce_context(*self.shape[:2], self.dtype, team=self.team, **candidate)

    def call(self, context):
        kernels.gemm_allreduce(self.a, self.b, context, self.out)

    def expected(self):
        return self.whole_sum()

    def baseline(self):
        product = self.partial[: self.shape[0]]
        torch.mm(self.a, self.b, out=product)
        dist.all_reduce(product)
