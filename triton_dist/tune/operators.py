"""What the command tunes: for each operator its sizes, candidates, operands, a call, a check and what it is compared with."""

import torch
import torch.distributed as dist

import triton_dist
from triton_dist import kernels, shmem
from triton_dist.kernels.all_reduce import METHODS as ALL_REDUCE_METHODS
from triton_dist.kernels.allgather_gemm import METHODS as ALLGATHER_GEMM_METHODS
from triton_dist.kernels.arguments import KERNEL_METHODS, device_programs, name_of
from triton_dist.kernels.gemm_allreduce import METHODS as GEMM_ALLREDUCE_METHODS
from triton_dist.kernels.gemm_reduce_scatter import METHODS as GEMM_REDUCE_SCATTER_METHODS

# newer torch has new names for these
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ERROR = {2: 2e-2, 4: 1e-4}  # relative to the norm, by itemsize: far above rounding, far below what a wrong tile makes


def random(shape, dtype, device, *seed):
    """The same on every rank that asks with the same seed."""
    number = 0
    for part in seed:
        number = number * 1009 + part
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(number), device=device).to(dtype)


class Operator:
    """`sizes`: names of the numbers that a shape has. `call(context)` makes one call, `check(context)` looks at its result, of
    a context made by `make_context(candidate)`. `baseline()`: the same without this library, needs torch.distributed."""

    sizes = ()

    def __init__(self, shape, dtype, team):
        self.shape, self.dtype, self.team = shape, dtype, team
        self.rank, self.world, self.device = shmem.team_my_pe(team), shmem.team_n_pes(team), shmem.device()

    def key(self):
        return dict(dtype=name_of(self.dtype), **dict(zip(self.sizes, self.shape)))

    def poison(self):
        self.out.fill_(float("nan"))

    def check(self, context):
        """The last call's result against `expected()`."""
        found, expected = self.out.float(), self.expected().float()
        if expected.numel():
            error = ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()
            if not error < ERROR[self.dtype.itemsize]:  # NaN, too
                raise AssertionError(f"the result is wrong: relative error {error:.3g}")
        self.poison()


class Gemm(Operator):
    sizes = ("M", "N", "K")

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.a, self.b = self.operands(self.rank)

    def operands(self, rank):
        M, N, K = self.shape
        a, b = random((M, K), self.dtype, self.device, 1, rank), random((K, N), self.dtype, self.device, 2, rank)
        return a, b * K**-0.5

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
        _all_gather(self.gathered, self.a)
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
        _reduce_scatter(self.scattered, self.partial)


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


class Collective(Operator):
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
        _all_gather(self.theirs, self.x)


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
        _reduce_scatter(self.theirs, self.x)


class AllReduce(Collective):
    name, methods = "all_reduce", ALL_REDUCE_METHODS

    def __init__(self, shape, dtype, team):
        super().__init__(shape, dtype, team)
        self.out, self.theirs = torch.empty_like(self.x), torch.zeros_like(self.x)  # zeros stay finite, reduced in place
        self.poison()

    def candidates(self):
        return [dict(method=method) for method in self.methods if method != "flagged" or self.dtype.itemsize in (2, 4)]

    def make_context(self, candidate):
        return kernels.create_all_reduce_context(self.n, self.dtype, team=self.team, **candidate)

    def call(self, context):
        kernels.all_reduce(self.x, context, "sum", self.out)

    def expected(self):
        return self.whole_sum()

    def baseline(self):
        dist.all_reduce(self.theirs)


OPERATORS = {one.name: one for one in (AllGatherGemm, GemmReduceScatter, GemmAllReduce, AllGather, ReduceScatter, AllReduce)}
