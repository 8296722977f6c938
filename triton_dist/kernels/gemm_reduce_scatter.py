"""GEMM-ReduceScatter: each rank's rows of sum over ranks of A @ B, in one kernel that sends tiles while it computes others.

    ctx = create_gemm_reduce_scatter_context(M, N, torch.float16)     # once: symmetric memory, signals, counters
    c = gemm_reduce_scatter(a, b, ctx)                                # any number of calls
    ctx.free()

K is split over the ranks: rank r has A_r [M, K_r] and B_r [K_r, N] and gets rows r * S to (r + 1) * S of
sum over r of A_r @ B_r, S = ceil(M / num_ranks). The last ranks may get fewer rows, or none.

How it works. The result is cut into tiles. A rank computes its partial product of the tiles that its peers own first and
stores each, in fp32, into the owner's staging slot of this rank; its own tiles come last, while those of the peers are on
their way. Then it adds the W partial products of each own tile in rank order, so that the bits do not depend on who came
first, and rounds once. Its own partial products take the same way through staging as all others: a product that is stored
at once, with nothing else to do, is what the Ascend compiler can split between its matrix and vector cores.

Tile t of owner d is computed by the same program number p on every rank. So program p of a rank waits for program p of
its peers alone, and every signal has one writer, which sets it to a count that only grows, over tiles and over calls:
`ready[s][p]` at the owner is the number of tiles that program p of rank s has stored there, `done[d][p]` at the writer the
number of calls that program p of rank d has finished. No value of an earlier call can be taken for a later one's, and there
is no barrier between calls. The number of calls so far lies in device memory, one word a program, so that a captured
graph replays right.

A slot is written in call e only when `done` says that its reader has finished call e - 1. Nobody waits in a circle: what
a program waits for while it serves its peers are earlier calls; it waits for this call's tiles only after it has stored
all that it owes to others.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from .arguments import (
    FLOATS,
    LAUNCH_OPTIONS,
    checked_config,
    device_programs,
    need,
    need_apart,
    need_dtype,
    need_int,
    need_operand,
)
from .gemm_tile import store_tile, tile_product
from .operator_context import OperatorContext, agreement, begin


@triton.jit
def first_tile(start, pid, programs):
    """The first of the tiles start, start + 1, ... that program `pid` computes, counted from `start`: dealt out in turn."""
    return (pid + programs - start % programs) % programs


@triton.jit
def sum_tile(staging, ready, first_slot, stride, count, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Adds up, in rank order, the tiles that lie in slots first_slot + rank * stride, each when its rank's count is there."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for source in range(0, dl.num_ranks(ctx)):
        token = dl.wait(dl.signal_at(ready, source * programs + pid), count, ctx)
        slot = staging + tl.cast(first_slot + source * stride, tl.int64) * BLOCK_M * BLOCK_N
        total += tl.load(dl.consume_token(slot, token) + lanes)
    return total


@triton.jit
def gemm_reduce_scatter_kernel(
    a, b, out, staging, ready, done, calls, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(calls + pid + tl.arange(0, 1)), 0)  # calls before this one
    shard = tl.cdiv(M, world)
    tiles_n = tl.cdiv(N, BLOCK_N)
    slots = tl.cdiv(shard, BLOCK_M) * tiles_n  # tiles of an owner who has all rows
    # A slot holds a tile as it is computed, BLOCK_M x BLOCK_N without gaps: no masks, and wide stores for any N.
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    step = 1
    while step <= world:  # peers first, this rank last
        owner = dl.owner_first(step, me, world)
        rows = tl.maximum(tl.minimum(shard, M - owner * shard), 0)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        tile = first_tile(owner * slots, pid, programs)
        count = past * tl.cdiv(tl.maximum(tiles_m * tiles_n - tile, 0), programs)
        while tile < tiles_m * tiles_n:
            pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
            row = owner * shard + pid_m * BLOCK_M
            acc = tile_product(
                a, b, row, owner * shard + rows, pid_n * BLOCK_N, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
            )  # fmt: skip
            count += 1
            token = dl.wait(dl.signal_at(done, owner * programs + pid), past, ctx)
            slot = staging + tl.cast(me * slots + tile, tl.int64) * BLOCK_M * BLOCK_N
            dl.remote_store(dl.consume_token(slot, token) + lanes, acc, owner, ctx)
            dl.fence_dot(ctx)
            dl.notify(dl.signal_at(ready, me * programs + pid), owner, ctx, count)
            tile += programs
        step += 1

    rows = tl.maximum(tl.minimum(shard, M - me * shard), 0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = first_tile(me * slots, pid, programs)
    count = past * tl.cdiv(tl.maximum(tiles_m * tiles_n - tile, 0), programs)
    while tile < tiles_m * tiles_n:
        count += 1
        total = sum_tile(staging, ready, tile, slots, count, ctx, BLOCK_M, BLOCK_N)
        pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
        store_tile(out, total, pid_m * BLOCK_M, rows, pid_n * BLOCK_N, N, stride_om, BLOCK_M, BLOCK_N)
        tile += programs
    dl.notify_all(dl.signal_at(done, me * programs + pid), ctx, past + 1)
    tl.debug_barrier()  # every thread has read the old count
    tl.store(calls + pid + tl.arange(0, 1), past + 1)


def reference(a, b, group=None):
    """The same by torch: products in fp32, an all-reduce over `group`, one rounding, this rank's rows."""
    total = torch.matmul(a.float(), b.float())
    dist.all_reduce(total, group=group)
    shard = -(-a.shape[0] // dist.get_world_size(group))
    first = dist.get_rank(group) * shard
    return total[first : first + shard].to(a.dtype)


def default_config(dtype):
    """(constexprs and launch options of the kernel, programs) that suit this process's platform. Programs of all ranks
    wait for one another, so there are no more of them than the device runs at a time."""
    config = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8)
    if triton_dist.backend == "cpu":
        config = dict(BLOCK_M=512, BLOCK_N=512, BLOCK_K=1024, GROUP_M=8)
    if triton_dist.backend == "nvidia":
        config.update(BLOCK_K=64 if dtype.itemsize == 2 else 32, num_warps=8)
    return config, device_programs()


def settle(function, M, N, dtype, team, config, programs, more="", problem=None):
    """(M, N, config, programs) of a context for [M, N] results, the defaults filled in; ValueError for what is not supported,
    CollectiveMismatchError when ranks differ; before anything is allocated. `more`: further arguments on which the ranks
    agree; `problem`: what is wrong with those, or None."""
    with agreement(function, team) as agreed:
        need(function, problem is None, problem)
        need_dtype(function, dtype, FLOATS)
        M, N = need_int(function, "M", M), need_int(function, "N", N)
        config, programs = checked_config(function, default_config(dtype), config, programs, LAUNCH_OPTIONS)
        agreed.on = f"M={M}, N={N}, {dtype}{more}, config={config}, programs={programs}"
    return M, N, config, programs


class GemmReduceScatterContext(OperatorContext):
    """What `gemm_reduce_scatter` needs besides its operands. Made by `create_gemm_reduce_scatter_context`."""

    def __init__(self, M, N, dtype, team, config, programs):
        super().__init__("gemm_reduce_scatter", team)
        self.M, self.N, self.dtype, self.config = M, N, dtype, config
        shard = triton.cdiv(M, self.num_ranks)
        self.rows = max(min(shard, M - self.rank * shard), 0)  # of this rank's result
        slots = triton.cdiv(shard, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])
        self.programs = max(min(programs, self.num_ranks * slots), 1)
        tile = (config["BLOCK_M"], config["BLOCK_N"])
        self.staging = self.tensor((self.num_ranks, slots, *tile), torch.float32)
        self.ready = self.signals(self.num_ranks * self.programs)
        self.done = self.signals(self.num_ranks * self.programs)
        self.calls = self.local(self.programs)

    def check(self, a, b, out):
        """Raises ValueError, naming rank and values, unless the operands fit."""
        check_operands("gemm_reduce_scatter", self, a, b, out, self.rows)


def check_operands(function, context, a, b, out, rows):
    """ValueError, naming rank and values, unless a [M, K], b [K, N] and out [rows, N] fit the context."""

    def fit(fits, text):
        need(function, fits, text)

    M, N = context.M, context.N
    fit(a.dim() == 2 and a.shape[0] == M, f"a is {list(a.shape)}, the context was made for [{M}, K]")
    fit(tuple(b.shape) == (a.shape[1], N), f"b is {list(b.shape)}, it must be [{a.shape[1]}, {N}]")
    fit(tuple(out.shape) == (rows, N), f"out is {list(out.shape)}, it must be [{rows}, {N}]")
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        need_operand(function, name, tensor, context.dtype, context.device)
    fit(out.stride(1) == 1 or N <= 1, f"out has strides {out.stride()}; its rows must be contiguous")
    need_apart(function, out, dict(a=a, b=b))
    context.agree(function, "")


def create_gemm_reduce_scatter_context(M, N, dtype, team=0, config=None, programs=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        M, N: rows and columns of the whole sum, 0 or more, equal on all ranks of the team.
        dtype: torch.float16, bfloat16 or float32; float32 is multiplied in fp32, not in tf32.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(dtype)[0]`; also num_warps and num_stages.
        programs: programs in the grid, equal on all ranks; not more than the device runs at a time.

    Symmetric memory: fp32 for M * N elements (M rounded up to num_ranks * BLOCK_M, N to BLOCK_N) and
    2 * num_ranks * programs signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    M, N, config, programs = settle("create_gemm_reduce_scatter_context", M, N, dtype, team, config, programs)
    return GemmReduceScatterContext(M, N, dtype, team, config, programs)


def gemm_reduce_scatter(a, b, context, out=None):
    """This rank's rows of the sum of a @ b over all ranks of the context's team.

    Args:
        a: [M, K], any strides; K may differ between ranks and may be 0. Any memory.
        b: [K, N], any strides. M, N, dtype and device as the context's.
        context: of `create_gemm_reduce_scatter_context`.
        out: [rows, N] with contiguous rows, written, no overlap with a and b; None: a new tensor. Rank r of the team has rows
            r * S to min((r + 1) * S, M), S = ceil(M / num_ranks): `context.rows` of them.

    Returns: out. fp32 accumulation, partial products added in rank order in fp32, one rounding; the same bits every time.
    All ranks of the team must make the same calls in the same order, on one stream. With `out` given nothing is
    allocated, and there is no host synchronisation: the call can be captured in a CUDA graph. `a` and `b` may be changed
    once the call is complete on this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    begin("gemm_reduce_scatter", GemmReduceScatterContext, context, a=a, b=b, out=out)
    if out is None:
        out = torch.empty(context.rows, context.N, dtype=context.dtype, device=context.device)
    context.check(a, b, out)
    gemm_reduce_scatter_kernel[(context.programs,)](
        a, b, out, context.staging, context.ready, context.done, context.calls, context.M, context.N, a.shape[1],
        *a.stride(), *b.stride(), out.stride(0), context.table, **context.config,
        EVEN_K=a.shape[1] % context.config["BLOCK_K"] == 0,
    )  # fmt: skip
    return out
