"""GEMM-AllReduce in one kernel for NVIDIA GPUs: the method `tma` of `gemm_allreduce`.

The method `tma` of `gemm_reduce_scatter` (see there, also for why its staging needs no acknowledgement), and an all-gather in
the same kernel: an owner stores each finished tile into the gathered buffers of its peers and signals; at the end each program
copies to `out` what its peers have sent. The gathered buffers take turns by the parity of the call, for the same reason:
owner d's results of call e overwrite those of e - 2, which rank r had copied before it began call e - 1, and d has ended
call e - 1, for which it had to see a tile of r.
"""

import triton
import triton.language as tl

from triton_dist import language as dl

from .gemm_reduce_scatter_tma import GemmReduceScatterTma, add_partials, end_turn, send_partials, turn_of
from .gemm_tile import first_tile, store_tile
from .gemm_tma import loaded_product
from .launch import Launcher


@triton.jit
def gemm_allreduce_tma_kernel(
    a, b, out, staging, ready, gathered, result, calls, M, N, K,
    stride_om, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past, slots, turn = turn_of(calls, M, N, world, BLOCK_M, BLOCK_N)
    shard = tl.cdiv(M, world)
    tiles_n = tl.cdiv(N, BLOCK_N)
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    send_partials(
        a, b, staging + turn, ready, past, M, N, K, ctx,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, B_TRANSPOSED,
    )  # fmt: skip

    rows = tl.maximum(tl.minimum(shard, M - me * shard), 0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first = first_tile(me * slots, pid, programs)
    count = past * tl.cdiv(tl.maximum(tiles_m * tiles_n - first, 0), programs)
    for tile in range(first, tiles_m * tiles_n, programs):
        pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = me * shard + pid_m * BLOCK_M
        acc = loaded_product(
            a, b, row, pid_n * BLOCK_N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED,
        )  # fmt: skip
        count += 1
        value = add_partials(acc, staging + turn, ready, tile, slots, count, ctx, BLOCK_M, BLOCK_N)
        value = value.to(gathered.dtype.element_ty)
        theirs = gathered + turn + tl.cast(me * slots + tile, tl.int64) * BLOCK_M * BLOCK_N
        for i in range(1, world):
            peer = dl.owner_first(i, me, world)
            dl.remote_store(theirs + lanes, value, peer, ctx)
            dl.notify(dl.signal_at(result, me * programs + pid), peer, ctx, count)
        store_tile(out, value, row, me * shard + rows, pid_n * BLOCK_N, N, stride_om, BLOCK_M, BLOCK_N)

    for i in range(1, world):
        owner = dl.owner_first(i, me, world)
        rows = tl.maximum(tl.minimum(shard, M - owner * shard), 0)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        first = first_tile(owner * slots, pid, programs)
        count = past * tl.cdiv(tl.maximum(tiles_m * tiles_n - first, 0), programs)
        for tile in range(first, tiles_m * tiles_n, programs):
            count += 1
            pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
            token = dl.wait(dl.signal_at(result, owner * programs + pid), count, ctx)
            theirs = gathered + turn + tl.cast(owner * slots + tile, tl.int64) * BLOCK_M * BLOCK_N
            value = tl.load(dl.consume_token(theirs, token) + lanes)
            row = owner * shard + pid_m * BLOCK_M
            store_tile(out, value, row, owner * shard + rows, pid_n * BLOCK_N, N, stride_om, BLOCK_M, BLOCK_N)
    end_turn(calls, past)


class GemmAllReduceTma:
    """Buffers of a context for [M, N] sums of a 16-bit `dtype`, every rank having rows. Symmetric memory: 4 * M * N elements
    (rounded up to tiles) and 2 * num_ranks * programs signals."""

    def __init__(self, owner, M, N, dtype, config=None):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.launcher = Launcher(gemm_allreduce_tma_kernel)
        self.scatter = GemmReduceScatterTma(owner, M, N, dtype, config)
        self.gathered = owner.tensor(tuple(self.scatter.staging.shape), dtype)
        self.result = owner.signals(owner.num_ranks * self.scatter.programs)

    def __call__(self, a, b, out):
        self.scatter.launch(self.launcher, a, b, out, self.gathered, self.result)
