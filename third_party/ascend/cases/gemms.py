"""The fused products. Strides of 1 are constants, as Triton makes them when it is called."""

from . import Case, types

TILES = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8)
CASES = []


def _case(name, source, signature, **constants):
    CASES.append(Case(name, f"triton_dist/kernels/{source}", types(signature), {**TILES, **constants}))


for t in ("fp16", "bf16", "fp32"):
    for even in (True, False):
        tail = t if even else f"{t} ragged K"
        _case(
            f"allgather_gemm {tail}", "allgather_gemm.py:allgather_gemm_kernel",
            f"a: *{t}, b: *{t}, c: *{t}, staging: *{t}, ready: *i32, done: *i32, epochs: *i32, M: i32, N: i32, K: i32, "
            "stride_bk: i32, stride_cm: i32, ctx: *i64",
            stride_bn=1, BLOCK_N=256, CHUNK_M=512, NUM_BUFFERS=2, COPY_BLOCK=4096, EVEN_K=even,
        )  # fmt: skip
        sizes = "M: i32, N: i32, K: i32, stride_am: i32, stride_bk: i32, stride_om: i32, ctx: *i64"
        strides = dict(stride_ak=1, stride_bn=1, EVEN_K=even)
        _case(
            f"gemm_reduce_scatter {tail}", "gemm_reduce_scatter.py:gemm_reduce_scatter_kernel",
            f"a: *{t}, b: *{t}, out: *{t}, staging: *fp32, ready: *i32, done: *i32, calls: *i32, {sizes}", **strides,
        )  # fmt: skip
        _case(
            f"gemm_allreduce one_shot {tail}", "gemm_allreduce.py:gemm_allreduce_one_shot_kernel",
            f"a: *{t}, b: *{t}, out: *{t}, staging: *fp32, ready: *i32, calls: *i32, {sizes}", **strides,
        )  # fmt: skip
        _case(
            f"gemm_allreduce two_shot {tail}", "gemm_allreduce.py:gemm_allreduce_two_shot_kernel",
            f"a: *{t}, b: *{t}, out: *{t}, staging: *fp32, ready: *i32, gathered: *{t}, result: *i32, calls: *i32, {sizes}",
            **strides,
        )  # fmt: skip
