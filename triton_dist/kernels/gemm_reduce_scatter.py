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

That is the method `kernel`. There are three more, whose partial sums travel in the operands' dtype, as torch.distributed's
do: `tma`, a kernel for NVIDIA GPUs (gemm_reduce_scatter_tma.py); `columns`, products by libraries and copies by copy engines
(gemm_reduce_scatter_columns.py); and `sequence`, torch's product and then a reduce_scatter, for results of few bytes.

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
from triton_dist import shmem

from . import torch_ops
from .arguments import (
    FLOATS,
    LAUNCH_OPTIONS,
    checked_config,
    checked_method,
    chosen_method,
    device_programs,
    name_of,
    need,
    need_apart,
    need_dtype,
    need_int,
    need_operand,
    without_gradients,
)
from .gemm_reduce_scatter_columns import GemmReduceScatterColumns
from .gemm_reduce_scatter_tma import GemmReduceScatterTma
from .gemm_tile import first_tile, store_tile, tile_product
from .gemm_tma import CONFIG
from .operator_context import OperatorContext, agreement, begin, operands_of, passed_before
from .replays import Replays
from .reduce_scatter import create_reduce_scatter_context, reduce_scatter

METHODS = ("kernel", "tma", "columns", "sequence")
COLUMNS_BYTES = 16 << 20  # of a rank's rows, from which products of the library and copy engines win
TILES = 64  # of all ranks, from which the method tma has work for enough of the device
ROWS = 128  # of a rank, from which its tiles are not mostly empty


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


def settle(function, operator, M, N, dtype, team, config, programs, method, methods):
    """(M, N, config, programs, method) of a context for [M, N] results, the defaults filled in; ValueError for what is not
    supported, CollectiveMismatchError when ranks differ; before anything is allocated."""
    with agreement(function, team) as agreed:
        checked_method(function, method, methods, config, programs)
        need_dtype(function, dtype, FLOATS)
        M, N = need_int(function, "M", M), need_int(function, "N", N)
        world = shmem.team_n_pes(team)
        tiled = dtype.itemsize == 2 and N > 0 and M > (world - 1) * triton.cdiv(M, world)  # every rank has rows
        need(
            function, method != "tma" or tiled,
            f"method is 'tma', which takes 16-bit dtypes and a row or more for each of {world} ranks, not {dtype} [{M}, {N}]: "
            "leave method open, or give another one",
        )  # fmt: skip
        given = config, programs
        config, programs = checked_config(function, default_config(dtype), config, programs, LAUNCH_OPTIONS)
        agreed.on = f"M={M}, N={N}, {dtype}, config={config}, programs={programs}, method={method!r}"
    if method is None:
        shard = triton.cdiv(M, world)
        tiles = world * triton.cdiv(shard, CONFIG["BLOCK_M"]) * triton.cdiv(N, CONFIG["BLOCK_N"])
        large = shard * N * dtype.itemsize >= COLUMNS_BYTES
        suited = "columns" if large else "tma" if tiled and tiles >= TILES and shard >= ROWS else "sequence"
        possible, key = [one for one in methods if one != "tma" or tiled], dict(dtype=name_of(dtype), M=M, N=N)
        method = chosen_method(function, possible, suited, *given, team, operator, key)
    return M, N, config, programs, method


class GemmReduceScatterSequence:
    """The method `sequence`: torch's product of all rows, then reduce_scatter."""

    def __init__(self, owner, M, N, dtype):
        shard = triton.cdiv(M, owner.num_ranks)
        self.context = create_reduce_scatter_context(shard * N, dtype, owner.team)
        rows = owner.num_ranks * shard  # the last ranks may have fewer
        self.product = torch.zeros(rows, N, dtype=dtype, device=owner.device)
        self.result = self.product.new_empty(shard, N)
        self.own_rows = self.product[:M]

    def __call__(self, a, b, out):
        torch.mm(a, b, out=self.own_rows)
        if out.is_contiguous() and out.shape == self.result.shape:
            reduce_scatter(self.product, self.context, "sum", out)
        else:
            out.copy_(reduce_scatter(self.product, self.context, "sum", self.result)[: out.shape[0]])


class GemmReduceScatterKernel:
    """The method `kernel`."""

    def __init__(self, owner, M, N, config, programs):
        self.M, self.N, self.config, self.table = M, N, config, owner.table
        world, tile = owner.num_ranks, (config["BLOCK_M"], config["BLOCK_N"])
        slots = triton.cdiv(triton.cdiv(M, world), tile[0]) * triton.cdiv(N, tile[1])
        self.programs = max(min(programs, world * slots), 1)
        self.staging = owner.tensor((world, slots, *tile), torch.float32)
        self.ready = owner.signals(world * self.programs)
        self.done = owner.signals(world * self.programs)
        self.calls = owner.local(self.programs)

    def __call__(self, a, b, out):
        gemm_reduce_scatter_kernel[(self.programs,)](
            a, b, out, self.staging, self.ready, self.done, self.calls, self.M, self.N, a.shape[1],
            *a.stride(), *b.stride(), out.stride(0), self.table, **self.config,
            EVEN_K=a.shape[1] % self.config["BLOCK_K"] == 0,
        )  # fmt: skip


class GemmReduceScatterContext(OperatorContext):
    """What `gemm_reduce_scatter` needs besides its operands. Made by `create_gemm_reduce_scatter_context`."""

    def __init__(self, M, N, dtype, team, config, programs, method):
        super().__init__("gemm_reduce_scatter", team)
        self.M, self.N, self.dtype, self.method = M, N, dtype, method
        shard = triton.cdiv(M, self.num_ranks)
        self.rows = max(min(shard, M - self.rank * shard), 0)  # of this rank's result
        if method == "kernel":
            self.run = GemmReduceScatterKernel(self, M, N, config, programs)
        else:
            made = dict(tma=GemmReduceScatterTma, columns=GemmReduceScatterColumns, sequence=GemmReduceScatterSequence)
            self.run = made[method](self, M, N, dtype)
        self.replays = Replays(self.run)

    def free(self):
        super().free()
        if self.method == "sequence":
            self.run.context.free()

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
    context.agree(function, "", a, b, out)


def create_gemm_reduce_scatter_context(M, N, dtype, team=0, config=None, programs=None, method=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        M, N: rows and columns of the whole sum, 0 or more, equal on all ranks of the team.
        dtype: torch.float16, bfloat16 or float32; float32 is multiplied in fp32, not in tf32.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(dtype)[0]`; also num_warps and num_stages.
        programs: programs in the grid, equal on all ranks; not more than the device runs at a time.
        method: "kernel", "tma", "columns" or "sequence", see the top of this file; the last three have no config and no
            programs. tma is for nvidia, 16-bit dtypes and M that gives every rank rows; columns is not available on ascend.
            None: on nvidia, unless config or programs is given, the fastest that was measured (docs/tuning.md); where none
            was, "columns" where a rank's rows have 16 MiB or more, else "tma" where it can and has 64 tiles or more, else
            "sequence"; elsewhere "kernel".

    Symmetric memory: kernel fp32 for M * N elements (M rounded up to num_ranks * BLOCK_M, N to BLOCK_N) and
    2 * num_ranks * programs signals; tma and sequence 2 * M * N elements, columns M * N, and signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_gemm_reduce_scatter_context"
    M, N, config, programs, method = settle(name, "gemm_reduce_scatter", M, N, dtype, team, config, programs, method, METHODS)
    return torch_ops.register(GemmReduceScatterContext(M, N, dtype, team, config, programs, method))


def gemm_reduce_scatter(a, b, context, out=None):
    """This rank's rows of the sum of a @ b over all ranks of the context's team.

    Args:
        a: [M, K], any strides; K may differ between ranks and may be 0. Any memory.
        b: [K, N], any strides. M, N, dtype and device as the context's.
        context: of `create_gemm_reduce_scatter_context`.
        out: [rows, N] with contiguous rows, written, no overlap with a and b; None: a new tensor. Rank r of the team has rows
            r * S to min((r + 1) * S, M), S = ceil(M / num_ranks): `context.rows` of them.

    Returns: out, the same bits every time. kernel: fp32 accumulation, partial products added in rank order in fp32, one
    rounding. The others: each peer's product is rounded, the sum in fp32 once more (sequence multiplies as torch.mm).
    All ranks of the team must make the same calls in the same order, on one stream. With `out` given nothing is
    allocated, and there is no host synchronisation: the call can be captured in a CUDA graph. `a` and `b` may be changed
    once the call is complete on this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    if out is None and torch.compiler.is_compiling():
        return torch_ops.gemm_reduce_scatter(a, b, context.number)
    if not passed_before(context, operands_of(a, b, out)):
        begin("gemm_reduce_scatter", GemmReduceScatterContext, context, a=a, b=b, out=out)
        if out is None:
            out = torch.empty(context.rows, context.N, dtype=context.dtype, device=context.device)
        context.check(a, b, out)
    context.replays(context.passed, *without_gradients(a, b), out)
    return out
