"""What every operator launches on two H200s, compiled for sm_90 without a GPU: `python nvidia_operators.py OUT [NAME ...]`.

The operators are called as users call them, in their default configurations, as rank 0 of two ranks whose memory is this
process's; a launch compiles its kernel for the arguments that it got, and runs nothing. Writes {case: {kernel: {ptx, shared,
registers, spills}}} as JSON. Run with TRITON_DIST_BACKEND=nvidia in a process of its own.
"""

import os

os.environ["TRITON_DIST_BACKEND"] = "nvidia"

import triton_dist  # noqa: F401, I001

import json
import sys
import types

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nvidia_methods import usage
from triton_dist import backends, context, kernels, shmem
from triton_dist.tuning import identity

identity.device_name = lambda: "a device that nobody has tuned for"

PROGRAMS = 132  # multiprocessors of an H200
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
compiled = {}  # kernel -> facts, of the current case


class Driver:
    """Stands in for the driver of an H200 as far as compiling asks."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Platform:
    """Two ranks, of which this process is the first; the other one says what this one says."""

    process_group = "nccl"

    def load(self):
        pass

    def device_count(self):
        return 2

    def prepare(self, rank):
        return torch.device("cpu")

    def heap(self, rank, n_ranks, nbytes, options):
        return Heap(n_ranks, nbytes)

    def meeting(self, rank, n_ranks):
        return types.SimpleNamespace(
            address="here", store=None, claim=lambda: None, met=lambda: None, clear=lambda: None, withdraw=lambda: None,
            join=lambda said: [said] * n_ranks, vote=lambda said, timeout, lost: [said] * n_ranks,
        )  # fmt: skip


class Heap:
    rank, device = 0, torch.device("cpu")

    def __init__(self, n_ranks, nbytes):
        self.n_ranks, self.nbytes = n_ranks, nbytes
        self.descriptor = {"process": backends.processes.identity()}

    def connect(self, descriptors, store, timeout):
        memory = torch.empty(self.n_ranks * self.nbytes + 4096, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 4096 :]
        self.tensors = [memory[r * self.nbytes : (r + 1) * self.nbytes] for r in range(self.n_ranks)]
        self.bases = [tensor.data_ptr() for tensor in self.tensors]
        self.span = self.bases[0], self.bases[-1] + self.nbytes

    def mapped_by_all(self):
        pass

    def tensor(self, rank):
        return self.tensors[rank]

    def exchange(self, team, text, describe, timeout=None):
        return [text] * len(team.members)

    def limit_waits(self, seconds):
        pass

    def recorder(self):
        return None

    def close(self):
        pass


def compile_only(self, *args, grid, warmup, **options):
    made = run(self, *args, grid=grid, warmup=True, **options)
    name = f"{made.name}{len([one for one in compiled if one.startswith(made.name)]) or ''}"
    if not any(one["ptx"] == made.asm["ptx"] for one in compiled.values()):
        compiled[name] = usage(made)


run, JITFunction.run = JITFunction.run, compile_only


def random(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


def gemm(create, function, M, N, K, dtype=BF16, **options):
    call = getattr(kernels, function)

    def case():
        made = getattr(kernels, create)(*((M, K) if function == "allgather_gemm" else (M, N)), dtype, **options)
        call(random(M, K, dtype=dtype), random(K, N, dtype=dtype), made)

    return case


def collective(name, n, dtype=BF16, *arguments, **options):
    def case():
        made = getattr(kernels, f"create_{name}_context")(n, dtype, **options)
        size = 2 * n if name == "reduce_scatter" else n
        getattr(kernels, name)(random(size).to(dtype), *arguments, made)

    return case


def barrier():
    kernels.barrier(kernels.create_barrier_context())


def all_to_all(variable):
    def case():
        made = kernels.create_all_to_all_context(4096, (4096,), BF16)
        if variable:
            kernels.all_to_all_v(random(2000, 4096), torch.tensor([1500, 500], dtype=torch.int32), made)
        else:
            kernels.all_to_all(random(4096, 4096), made)

    return case


def sequence(name):
    def case():
        made = kernels.create_sequence_all_to_all_context(1024, 16, 128, BF16)
        shape = (2048, 16, 128) if name == "reverse_all_to_all" else (1024, 32, 128)
        getattr(kernels, name)(random(*shape), made)

    return case


def qkv():
    made = kernels.create_qkv_all_to_all_context(1024, 32, 8, 128, BF16)
    kernels.qkv_all_to_all(random(1024, 32, 128), random(1024, 8, 128), random(1024, 8, 128), made)


def moe(tokens, hidden, topk, experts, fp8, **options):
    def case():
        dispatch = kernels.create_moe_dispatch_context(tokens, hidden, topk, experts, BF16, fp8=fp8, **options)
        combine = kernels.create_moe_combine_context(dispatch)
        ids = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)]).to(torch.int32)
        result = dispatch.empty()
        kernels.moe_dispatch(random(tokens, hidden), ids, dispatch, result, check=False)
        y = torch.zeros(dispatch.max_rows, hidden, dtype=BF16)
        kernels.moe_combine(y, torch.rand(tokens, topk), result[2], combine)

    return case


ag, rs, ar = "create_allgather_gemm_context", "create_gemm_reduce_scatter_context", "create_gemm_allreduce_context"
CASES = {
    **{f"allgather_gemm {d}": gemm(ag, "allgather_gemm", 4096, 4096, 4096, d, method="kernel") for d in (BF16, FP16, FP32)},
    "allgather_gemm ragged": gemm(ag, "allgather_gemm", 1000, 999, 501, method="kernel"),
    "gemm_reduce_scatter ragged": gemm(rs, "gemm_reduce_scatter", 1000, 999, 501, method="kernel"),
    "gemm_reduce_scatter tma ragged": gemm(rs, "gemm_reduce_scatter", 1000, 999, 501, method="tma"),
    "gemm_allreduce ragged": gemm(ar, "gemm_allreduce", 1000, 999, 501, method="two_shot"),
    **{
        f"gemm_reduce_scatter {m}": gemm(rs, "gemm_reduce_scatter", 8192, 4096, 2048, method=m) for m in ("kernel", "tma")
    },
    "gemm_reduce_scatter fp16": gemm(rs, "gemm_reduce_scatter", 8192, 4096, 2048, FP16, method="kernel"),
    "gemm_reduce_scatter fp32": gemm(rs, "gemm_reduce_scatter", 8192, 4096, 2048, FP32, method="kernel"),
    **{
        f"gemm_allreduce {m}": gemm(ar, "gemm_allreduce", 8192, 4096, 2048, method=m) for m in ("two_shot", "one_shot", "tma")
    },
    **{f"all_reduce {m}": collective("all_reduce", 1 << 20, method=m)
       for m in ("mesh", "two_shot", "ring", "flagged", "pipelined")},
    "all_reduce fp32": collective("all_reduce", 1 << 20, FP32, method="mesh"),
    "all_gather": collective("all_gather", 1 << 20),
    "reduce_scatter": collective("reduce_scatter", 1 << 20),
    "broadcast": collective("broadcast", 1 << 20, BF16, 0),
    "barrier": barrier,
    "all_to_all": all_to_all(False),
    "all_to_all_v": all_to_all(True),
    "reverse_all_to_all": sequence("reverse_all_to_all"),
    "transpose_all_to_all": sequence("transpose_all_to_all"),
    "qkv_all_to_all": qkv,
    "moe large": moe(4096, 4096, 8, 64, False),
    "moe small fp8": moe(128, 7168, 8, 256, True),
    "moe large tokens": moe(4096, 4096, 8, 64, False, layout="tokens"),
    "moe small fp8 tokens": moe(128, 7168, 8, 256, True, layout="tokens"),
    "moe gather tokens": moe(4096, 4096, 8, 64, False, layout="tokens", method="gather"),
}  # fmt: skip


def main(out, *names):
    triton.runtime.driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=PROGRAMS)
    backends.in_process = Platform()
    results = {}
    for name in names or CASES:
        assert shmem.aclshmem_init(shmem.InitAttr(0, 2, "", 4 << 30)) == 0, shmem.last_error()
        compiled.clear()
        CASES[name]()
        results[name] = dict(compiled)
        assert context.heap_map
        shmem.aclshmem_finalize()
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
