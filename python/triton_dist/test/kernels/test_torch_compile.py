"""`torch.compile` of modules that call an operator: one graph, the same results."""

import pytest

import triton_dist
from triton_dist import kernels, shmem

import torch

pytestmark = pytest.mark.dist


class TensorParallel(torch.nn.Module):
    """Two layers, the way tensor parallelism calls the operators: gathered rows in, scattered rows out, and a sum."""

    def __init__(self, rows, width, dtype):
        super().__init__()
        self.first, self.second = (
            torch.nn.Parameter(torch.randn(width, width, device=shmem.device()).to(dtype) / width**0.5, requires_grad=False)
            for _ in range(2)
        )
        world = shmem.pe_count()
        self.up = kernels.create_allgather_gemm_context(rows, width, dtype)
        self.down = kernels.create_gemm_reduce_scatter_context(rows * world, width, dtype)
        self.every = kernels.create_gemm_allreduce_context(rows, width, dtype)
        self.sum = kernels.create_all_reduce_context(rows * width, dtype)
        self.all, self.parts = (
            kernels.create_all_gather_context(rows * width, dtype), kernels.create_reduce_scatter_context(rows * width, dtype)
        )  # fmt: skip

    def forward(self, x):
        hidden = torch.relu(kernels.allgather_gemm(x, self.first, self.up))
        y = kernels.gemm_reduce_scatter(hidden, self.second, self.down) + x
        y = kernels.all_reduce(y * 0.5, self.sum, "max") + kernels.gemm_allreduce(y, self.second, self.every)
        return kernels.reduce_scatter(kernels.all_gather(y, self.all) * 2, self.parts)

    def free(self):
        for context in (self.up, self.down, self.every, self.sum, self.all, self.parts):
            context.free()


def compiled():
    torch.manual_seed(7 + shmem.my_pe())
    module = TensorParallel(32, 48, torch.bfloat16)
    backend = "inductor" if triton_dist.backend == "nvidia" else "aot_eager"
    fast = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(32, 48, device=shmem.device()).to(torch.bfloat16)
        expected, found = module(x), fast(x)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert (found.float() - expected.float()).norm() <= 2**-6 * expected.float().norm()  # inductor fuses and rounds less
    module.free()


def test_a_module_compiles_into_one_graph(ranks):
    ranks(2).run(compiled, timeout=240)
