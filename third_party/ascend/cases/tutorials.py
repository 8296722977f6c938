"""The kernels of the ten tutorials, with their default types and their Ascend sizes."""

from . import Case, types

CASES = []


def _case(file, kernel, signature, **constants):
    source = f"tutorials/ascend/{file}.py:{kernel}"
    CASES.append(Case(f"tutorial {file[:2]}", source, types(signature), constants))


GEMM = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, EVEN_K=True)
MATRICES = "a_ptr: *fp16, b_ptr: *fp16, c_ptr: *fp16"

_case(
    "01-ascend-allgather-gemm", "allgather_gemm_kernel",
    f"{MATRICES}, staging_ptr: *fp16, ready_ptr: *i32, done_ptr: *i32, M: i32, N: i32, K: i32, first_round: i32, ctx: *i64",
    **{**GEMM, "BLOCK_N": 256}, CHUNK_M=512, NUM_BUFFERS=2,
)  # fmt: skip
_case(
    "02-ascend-gemm-reduce-scatter", "gemm_reduce_scatter_kernel",
    f"{MATRICES}, staging_ptr: *fp32, ready_ptr: *i32, done_ptr: *i32, M: i32, N: i32, K: i32, calls: i32, ctx: *i64", **GEMM,
)  # fmt: skip
_case(
    "03-ascend-gemm-allreduce-oneshot", "gemm_allreduce_kernel",
    f"{MATRICES}, staging_ptr: *fp32, ready_ptr: *i32, M: i32, N: i32, K: i32, calls: i32, ctx: *i64", **GEMM,
)  # fmt: skip
EXCHANGE = "x_ptr: *bf16, y_ptr: *bf16, staging_ptr: *bf16"
_case(
    "04-ascend-reverse-all2all", "reverse_all_to_all_kernel",
    f"{EXCHANGE}, ready_ptr: *i32, done_ptr: *i32, S: i32, cols: i32, first_round: i32, ctx: *i64",
    PRODUCERS=10, CONSUMERS=10, CHUNK=512, NUM_BUFFERS=2, BLOCK_M=64, BLOCK_N=128,
)  # fmt: skip
_case(
    "05-ascend-reverse-all2all-barrier", "reverse_all_to_all_barrier_kernel",
    f"{EXCHANGE}, barrier_ptr: *i32, S: i32, cols: i32, first_round: i32, ctx: *i64", CHUNK=512, BLOCK_M=64, BLOCK_N=128,
)  # fmt: skip
_case(
    "06-ascend-gemm-ar-notify", "gemm_allreduce_kernel",
    f"{MATRICES}, slots_ptr: *fp32, ready_ptr: *i32, done_ptr: *i32, M: i32, N: i32, K: i32, calls: i32, ctx: *i64", **GEMM,
)  # fmt: skip
_case(
    "07-ascend-qkv-alltoall", "qkv_all_to_all_kernel",
    "q_ptr: *bf16, k_ptr: *bf16, v_ptr: *bf16, q_out_ptr: *bf16, k_out_ptr: *bf16, v_out_ptr: *bf16, staging_ptr: *bf16, "
    "ready_ptr: *i32, done_ptr: *i32, S: i32, q_cols: i32, kv_cols: i32, q_stride: i32, kv_stride: i32, copies: i32, "
    "first_round: i32, ctx: *i64",
    CHUNK=448, BLOCK_M=16, BLOCK_N=128,
)  # fmt: skip
_case(
    "08-ascend-transpose-all2all", "transpose_all_to_all_kernel",
    f"{EXCHANGE}, arrived_ptr: *i32, S: i32, H: i32, D: i32, call: i32, ctx: *i64", BLOCK_S=128, BLOCK_M=64, BLOCK_N=128,
)  # fmt: skip
_case(
    "09-ascend-dispatch-all2all", "dispatch_kernel",
    "x_ptr: *bf16, ids_ptr: *i32, out_ptr: *bf16, out_counts_ptr: *i32, out_origin_ptr: *i32, inbox_ptr: *bf16, "
    "counts_ptr: *i32, origin_ptr: *i32, arrived_ptr: *i32, counted_ptr: *i32, filled_ptr: *i32, number_ptr: *i32, "
    "partial_ptr: *i32, base_ptr: *i32, T: i32, H: i32, topk: i32, E: i32, PER: i32, call: i32, ctx: *i64",
    BLOCK_T=8, BLOCK_H=512, K_PAD=8, E_PAD=64,
)  # fmt: skip
_case(
    "10-ascend-combine-all2all", "combine_kernel",
    "y_ptr: *bf16, weights_ptr: *fp32, ids_ptr: *i32, out_ptr: *bf16, origin_ptr: *i32, returned_ptr: *bf16, "
    "filled_ptr: *i32, read_ptr: *i32, rows: i32, T: i32, H: i32, topk: i32, call: i32, ctx: *i64",
    BLOCK_T=8, BLOCK_H=512,
)  # fmt: skip
