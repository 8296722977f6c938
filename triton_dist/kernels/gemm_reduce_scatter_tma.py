"""GEMM-ReduceScatter in one kernel for NVIDIA GPUs: the method `tma` of `gemm_reduce_scatter`.

As the method `kernel`, a program computes its tiles of the peers' rows first, stores each in its owner's staging slot and
signals; then its own tiles. It differs in three things. Operands are read by descriptors and two programs share a
multiprocessor (gemm_tma.py). Partial sums travel in the operands' dtype, half the bytes, and the own one stays in registers:
the peers' are added to it in fp32 as they are read. And there are two staging buffers in turn, by the parity of the call,
which need no acknowledgement.

Why nothing is overwritten early, for any number of ranks: rank r writes a slot of owner d in call e after its own call
e - 1 has ended (calls follow one another on a stream), for which it had to see a tile of d's call e - 1, which d's kernel
stored after d's call e - 2 had ended; and that was the last to read the slot. It takes that every rank has rows: contexts
with fewer rows than that use another method.
"""

import triton
import triton.language as tl

from triton_dist import language as dl

from .gemm_tile import first_tile, store_tile
from .gemm_tma import CONFIG, Operands, loaded_product, programs
from .launch import Launcher


@triton.jit
def turn_of(calls, M, N, world, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(calls before this one, tiles of an owner who has all rows, first element of the buffer whose turn it is)."""
    past = tl.max(tl.load(calls + tl.program_id(0) + tl.arange(0, 1)), 0)
    slots = tl.cdiv(tl.cdiv(M, world), BLOCK_M) * tl.cdiv(N, BLOCK_N)
    return past, slots, tl.cast(past % 2 * world, tl.int64) * slots * BLOCK_M * BLOCK_N


@triton.jit
def end_turn(calls, past):
    tl.debug_barrier()  # every thread has read the old count
    tl.store(calls + tl.program_id(0) + tl.arange(0, 1), past + 1)


@triton.jit
def send_partials(
    a, b, staging, ready, past, M, N, K, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """This program's tiles of the peers' rows, into the peers' `staging` [num_ranks, slots, BLOCK_M, BLOCK_N]."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    shard = tl.cdiv(M, world)
    tiles_n = tl.cdiv(N, BLOCK_N)
    slots = tl.cdiv(shard, BLOCK_M) * tiles_n
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for step in range(1, world):
        owner = dl.owner_first(step, me, world)
        rows = tl.maximum(tl.minimum(shard, M - owner * shard), 0)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        first = first_tile(owner * slots, pid, programs)
        count = past * tl.cdiv(tl.maximum(tiles_m * tiles_n - first, 0), programs)
        for tile in range(first, tiles_m * tiles_n, programs):
            pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
            acc = loaded_product(
                a, b, owner * shard + pid_m * BLOCK_M, pid_n * BLOCK_N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED,
            )  # fmt: skip
            count += 1
            slot = staging + tl.cast(me * slots + tile, tl.int64) * BLOCK_M * BLOCK_N
            dl.remote_store(slot + lanes, acc.to(staging.dtype.element_ty), owner, ctx)
            dl.notify(dl.signal_at(ready, me * programs + pid), owner, ctx, count)


@triton.jit
def add_partials(acc, staging, ready, tile, slots, count, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """acc plus what the peers have sent for this rank's tile, rank + 1 first, each when its count is there."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for i in range(1, world):
        source = dl.owner_first(i, me, world)
        token = dl.wait(dl.signal_at(ready, source * programs + pid), count, ctx)
        slot = staging + tl.cast(source * slots + tile, tl.int64) * BLOCK_M * BLOCK_N
        acc += tl.load(dl.consume_token(slot, token) + lanes).to(tl.float32)
    return acc


@triton.jit
def gemm_reduce_scatter_tma_kernel(
    a, b, out, staging, ready, calls, M, N, K, stride_om, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past, slots, turn = turn_of(calls, M, N, world, BLOCK_M, BLOCK_N)
    buffer = staging + turn
    shard = tl.cdiv(M, world)
    tiles_n = tl.cdiv(N, BLOCK_N)
    send_partials(
        a, b, buffer, ready, past, M, N, K, ctx,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, B_TRANSPOSED,
    )  # fmt: skip
    rows = tl.maximum(tl.minimum(shard, M - me * shard), 0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first = first_tile(me * slots, pid, programs)
    count = past * tl.cdiv(tl.maximum(tiles_m * tiles_n - first, 0), programs)
    for tile in range(first, tiles_m * tiles_n, programs):
        pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = loaded_product(
            a, b, me * shard + pid_m * BLOCK_M, pid_n * BLOCK_N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED,
        )  # fmt: skip
        count += 1
        acc = add_partials(acc, buffer, ready, tile, slots, count, ctx, BLOCK_M, BLOCK_N)
        store_tile(out, acc, pid_m * BLOCK_M, rows, pid_n * BLOCK_N, N, stride_om, BLOCK_M, BLOCK_N)
    end_turn(calls, past)


class GemmReduceScatterTma:
    """Buffers of a context for [M, N] sums of a 16-bit `dtype`, every rank having rows. Symmetric memory: 2 * M * N elements
    (rounded up to tiles) and num_ranks * programs signals."""

    def __init__(self, owner, M, N, dtype, config=None):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.M, self.N, self.config = M, N, {**CONFIG, **(config or {})}
        self.options = {name: self.config[name] for name in ("num_warps", "num_stages")}
        self.tiles = {name: self.config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")}
        self.launcher, self.operands = Launcher(gemm_reduce_scatter_tma_kernel), Operands(self.config)
        self.table = owner.table
        world, tile = owner.num_ranks, (self.config["BLOCK_M"], self.config["BLOCK_N"])
        slots = triton.cdiv(triton.cdiv(M, world), tile[0]) * triton.cdiv(N, tile[1])
        self.programs = programs(world * slots)
        self.staging = owner.tensor((2, world, slots, *tile), dtype)
        self.ready = owner.signals(world * self.programs)
        self.calls = owner.local(self.programs)

    def __call__(self, a, b, out):
        self.launch(self.launcher, a, b, out)

    def launch(self, launcher, a, b, out, *more):
        """A kernel that takes, behind this one's staging and signals, `more`."""
        left, right, transposed = self.operands(a, b)
        buffers = self.staging, self.ready, *more, self.calls
        arguments = left, right, out, *buffers, self.M, self.N, a.shape[1], out.stride(0), self.table
        launcher((self.programs, 1, 1), arguments, {**self.tiles, "B_TRANSPOSED": transposed}, **self.options)
        self.operands.forget()
