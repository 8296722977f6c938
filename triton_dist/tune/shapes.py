"""Sizes that the command tunes when none are given, the most wanted ones first: those of the benchmarks, a grid of few rows,
narrow and ragged ones, then rows between those of the grid and wider matrices."""

LARGE = {
    "allgather_gemm": [(4096, 4096, 4096), (4096, 3584, 8192), (8192, 8192, 8192), (1024, 8192, 8192)],
    "gemm_reduce_scatter": [(8192, 4096, 2048), (8192, 3584, 4096), (16384, 8192, 4096), (1024, 4096, 2048)],
}
LARGE["gemm_allreduce"] = LARGE["gemm_reduce_scatter"]
COLUMNS = [(4096, 4096), (512, 4096), (4096, 512), (1000, 1544)]  # N, K of the grid
ROWS = {  # M: of each rank for the first, in all for the sums
    "allgather_gemm": (1, 8, 64, 256, 1000, 4096, 8192),
    "gemm_reduce_scatter": (1, 2, 16, 128, 512, 2000, 8192, 16384),
}
ROWS["gemm_allreduce"] = ROWS["gemm_reduce_scatter"]
BETWEEN = {"allgather_gemm": (32, 128, 512, 2048), "gemm_reduce_scatter": (64, 256, 1024, 4096)}
BETWEEN["gemm_allreduce"] = BETWEEN["gemm_reduce_scatter"]
WIDE = {  # N, K
    "allgather_gemm": [(4096, 8192), (2048, 5120)],
    "gemm_reduce_scatter": [(8192, 4096), (5120, 2048)],
}
WIDE["gemm_allreduce"] = WIDE["gemm_reduce_scatter"]
BYTES = [1 << power for power in range(13, 28, 2)]  # of a message of the collectives
TOKENS = [(4096, 4096, 8, 64, 0), (128, 7168, 8, 256, 1)]  # tokens a rank, hidden, top k, experts, fp8


def grid(operator):
    """Shapes of a fused GEMM on which no choice may be slower than the way without this library."""
    return [(M, N, K) for M in ROWS[operator] for N, K in COLUMNS]


def defaults(operator, on_cpu):
    """List of tuples of the operator's sizes."""
    if operator in LARGE:
        denser = [(M, N, K) for M in BETWEEN[operator] for N, K in (COLUMNS[0], *WIDE[operator])]
        denser += [(M, N, K) for M in ROWS[operator][3:6] for N, K in WIDE[operator]]
        return [(64, 48, 32)] if on_cpu else list(dict.fromkeys(LARGE[operator] + grid(operator) + denser))
    if operator.startswith("moe"):
        return [(8, 256, 2, 8, 0)] if on_cpu else TOKENS
    return [(4096,)] if on_cpu else [(n,) for n in BYTES]
