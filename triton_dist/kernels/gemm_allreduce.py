"""GEMM-AllReduce: the sum over ranks of A @ B on every rank, in one kernel that sends tiles while it computes others.

    ctx = create_gemm_allreduce_context(M, N, torch.float16, method="two_shot")   # once: symmetric memory, signals, counters
    c = gemm_allreduce(a, b, ctx)                                                 # any number of calls
    ctx.free()

K is split over the ranks: rank r has A_r [M, K_r] and B_r [K_r, N]. The result [M, N] is cut into tiles; a tile of any
rank's partial product is computed by the same program number p on every rank, so that program p of a rank waits for
program p of its peers alone and every signal has one writer, which sets it to a count that only grows, over tiles and
over calls. Partial products travel in fp32 and are added in rank order, so all ranks have the same bits, every time; there
is one rounding. The counts of earlier calls lie in device memory, one word a program, so that a captured graph replays
right. Neither method has a barrier or an acknowledgement: the data that a rank receives tells it which slots are free.

one_shot: each program puts its partial tile into a slot of every rank, then adds the W partial tiles of the tile before.
`ready[s][p]` counts the tiles that program p of rank s has put. A rank sends (W - 1) * M * N fp32 values, in one hop: the
least latency, for small M * N. A program has SLOTS = 4 slots a source, used in turn. Why no slot is overwritten early: a
rank puts tile i after it has finished tile i - 2, for which it had to see that every peer had put tile i - 2. A peer does
that after it has finished tile i - 4, whose slot it is. Tiles are counted over calls, and the argument with them.

two_shot: a reduce-scatter and an all-gather in the same kernel. Every tile has an owner. A program computes the tiles of
its peers first and puts them into the owners' staging slots, then its own; then it adds the W partial tiles of each of its
own, rounds, and puts the result into every peer's gathered buffer; at last it copies what the peers have sent into `out`.
`ready[s][p]` counts partial tiles that program p of rank s has put here, `result[o][p]` result tiles of owner o. A rank
sends (W - 1) / W of M * N fp32 values and as many results: the least traffic. Why nothing is overwritten early: program p
of a rank ends a call when it has seen all results of p's tiles, and an owner sends one after it has read the partial tiles
behind it, so in the next call the staging slots are free. An owner sends a result of the next call after it has seen that
call's partial tile of every peer, whose program p has thus ended this call and read the gathered buffer.
Three more methods let partial sums travel in the operands' dtype, as torch.distributed's do: `tma`, a kernel for NVIDIA GPUs
(gemm_allreduce_tma.py); `columns`, products by libraries and copies by copy engines (gemm_allreduce_columns.py); and
`sequence`, torch's product and then an all_reduce, for results of few bytes.

Nobody waits in a circle: one_shot puts before it waits, and puts wait for nothing; so do two_shot's partial tiles, its
results wait for partial tiles alone, its end for results alone.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist import language as dl

from . import torch_ops
from .all_reduce import all_reduce, create_all_reduce_context
from .arguments import without_gradients
from .gemm_allreduce_columns import GemmAllReduceColumns
from .gemm_allreduce_tma import GemmAllReduceTma
from .gemm_reduce_scatter import check_operands, settle, sum_tile
from .gemm_tile import first_tile, store_tile, tile_product
from .operator_context import OperatorContext, begin, operands_of, passed_before
from .replays import Replays

METHODS = ("two_shot", "one_shot", "tma", "columns", "sequence")
SLOTS = tl.constexpr(4)


@triton.jit
def gemm_allreduce_one_shot_kernel(
    a, b, out, staging, ready, calls, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    past = tl.max(tl.load(calls + pid + tl.arange(0, 1)), 0)  # calls before this one
    count = past * tl.cdiv(tl.maximum(tiles - pid, 0), programs)  # tiles before this one
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    tile = pid
    while tile < tiles + programs:  # one turn more than this program has tiles
        if tile < tiles:
            pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
            acc = tile_product(
                a, b, pid_m * BLOCK_M, M, pid_n * BLOCK_N, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
            )  # fmt: skip
            slot = staging + tl.cast((me * programs + pid) * SLOTS + count % SLOTS, tl.int64) * BLOCK_M * BLOCK_N
            for i in range(1, world + 1):  # this rank last: its own slot takes part in the sum like all others
                dl.remote_store(slot + lanes, acc, dl.owner_first(i, me, world), ctx)
            dl.fence_dot(ctx)
            dl.notify_all(dl.signal_at(ready, me * programs + pid), ctx, count + 1)
        if tile >= programs:  # the tile before, while this one is on its way
            last_m, last_n = dl.tile_of(tile - programs, tiles_m, tiles_n, GROUP_M)
            first = pid * SLOTS + (count - 1) % SLOTS
            total = sum_tile(staging, ready, first, programs * SLOTS, count, ctx, BLOCK_M, BLOCK_N)
            store_tile(out, total, last_m * BLOCK_M, M, last_n * BLOCK_N, N, stride_om, BLOCK_M, BLOCK_N)
        tile += programs
        count += 1
    tl.debug_barrier()  # every thread has read the old count
    tl.store(calls + pid + tl.arange(0, 1), past + 1)


@triton.jit
def gemm_allreduce_two_shot_kernel(
    a, b, out, staging, ready, gathered, result, calls, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    shard = tl.cdiv(tiles_m * tiles_n, world)  # tiles of an owner; the last owners may have fewer
    past = tl.max(tl.load(calls + pid + tl.arange(0, 1)), 0)  # calls before this one
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    step = 1
    while step <= world:  # peers first, this rank last
        owner = dl.owner_first(step, me, world)
        tiles = tl.minimum(shard, tiles_m * tiles_n - owner * shard)  # may be negative
        tile = first_tile(owner * shard, pid, programs)
        count = past * tl.cdiv(tl.maximum(tiles - tile, 0), programs)
        while tile < tiles:
            pid_m, pid_n = dl.tile_of(owner * shard + tile, tiles_m, tiles_n, GROUP_M)
            acc = tile_product(
                a, b, pid_m * BLOCK_M, M, pid_n * BLOCK_N, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
            )  # fmt: skip
            count += 1
            slot = staging + tl.cast(me * shard + tile, tl.int64) * BLOCK_M * BLOCK_N
            dl.remote_store(slot + lanes, acc, owner, ctx)
            dl.fence_dot(ctx)
            dl.notify(dl.signal_at(ready, me * programs + pid), owner, ctx, count)
            tile += programs
        step += 1

    tiles = tl.minimum(shard, tiles_m * tiles_n - me * shard)
    tile = first_tile(me * shard, pid, programs)
    count = past * tl.cdiv(tl.maximum(tiles - tile, 0), programs)
    while tile < tiles:
        count += 1
        total = sum_tile(staging, ready, tile, shard, count, ctx, BLOCK_M, BLOCK_N)
        value = total.to(gathered.dtype.element_ty)
        pid_m, pid_n = dl.tile_of(me * shard + tile, tiles_m, tiles_n, GROUP_M)
        store_tile(out, value, pid_m * BLOCK_M, M, pid_n * BLOCK_N, N, stride_om, BLOCK_M, BLOCK_N)
        theirs = gathered + tl.cast(me * shard + tile, tl.int64) * BLOCK_M * BLOCK_N
        for i in range(1, world):
            peer = dl.owner_first(i, me, world)
            dl.remote_store(theirs + lanes, value, peer, ctx)
            dl.notify(dl.signal_at(result, me * programs + pid), peer, ctx, count)
        tile += programs

    step = 1
    while step < world:
        owner = dl.owner_first(step, me, world)
        tiles = tl.minimum(shard, tiles_m * tiles_n - owner * shard)
        tile = first_tile(owner * shard, pid, programs)
        count = past * tl.cdiv(tl.maximum(tiles - tile, 0), programs)
        while tile < tiles:
            count += 1
            token = dl.wait(dl.signal_at(result, owner * programs + pid), count, ctx)
            theirs = gathered + tl.cast(owner * shard + tile, tl.int64) * BLOCK_M * BLOCK_N
            value = tl.load(dl.consume_token(theirs, token) + lanes)
            pid_m, pid_n = dl.tile_of(owner * shard + tile, tiles_m, tiles_n, GROUP_M)
            store_tile(out, value, pid_m * BLOCK_M, M, pid_n * BLOCK_N, N, stride_om, BLOCK_M, BLOCK_N)
            tile += programs
        step += 1
    tl.debug_barrier()  # every thread has read the old count
    tl.store(calls + pid + tl.arange(0, 1), past + 1)


def reference(a, b, group=None):
    """The same by torch: products in fp32, an all-reduce over `group`, one rounding. [M, N]."""
    total = torch.matmul(a.float(), b.float())
    dist.all_reduce(total, group=group)
    return total.to(a.dtype)


class GemmAllReduceSequence:
    """The method `sequence`: torch's product, then all_reduce."""

    def __init__(self, owner, M, N, dtype):
        self.context = create_all_reduce_context(M * N, dtype, None, owner.team)
        self.product, self.result = (torch.empty(M, N, dtype=dtype, device=owner.device) for _ in range(2))

    def __call__(self, a, b, out):
        torch.mm(a, b, out=self.product)
        if out.is_contiguous():
            all_reduce(self.product, self.context, "sum", out)
        else:
            out.copy_(all_reduce(self.product, self.context, "sum", self.result))


class GemmAllReduceKernel:
    """The methods `one_shot` and `two_shot`."""

    def __init__(self, owner, M, N, dtype, config, programs):
        self.M, self.N, self.config, self.table = M, N, config, owner.table
        world, tile = owner.num_ranks, (config["BLOCK_M"], config["BLOCK_N"])
        tiles = triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])
        self.programs = max(min(programs, tiles), 1)

        def slots(shape, dtype):
            """Slots, and the signals that go with them."""
            return owner.tensor(shape, dtype), owner.signals(world * self.programs)

        if owner.method == "one_shot":
            self.kernel = gemm_allreduce_one_shot_kernel
            self.buffers = slots((world, min(self.programs, tiles), SLOTS.value, *tile), torch.float32)
        else:
            self.kernel, shape = gemm_allreduce_two_shot_kernel, (world, triton.cdiv(tiles, world), *tile)
            self.buffers = (*slots(shape, torch.float32), *slots(shape, dtype))
        self.calls = owner.local(self.programs)

    def __call__(self, a, b, out):
        self.kernel[(self.programs,)](
            a, b, out, *self.buffers, self.calls, self.M, self.N, a.shape[1],
            *a.stride(), *b.stride(), out.stride(0), self.table, **self.config,
            EVEN_K=a.shape[1] % self.config["BLOCK_K"] == 0,
        )  # fmt: skip


class GemmAllReduceContext(OperatorContext):
    """What `gemm_allreduce` needs besides its operands. Made by `create_gemm_allreduce_context`."""

    def __init__(self, M, N, dtype, method, team, config, programs):
        super().__init__("gemm_allreduce", team)
        self.M, self.N, self.dtype, self.method = M, N, dtype, method
        if method in ("one_shot", "two_shot"):
            self.run = GemmAllReduceKernel(self, M, N, dtype, config, programs)
        else:
            made = dict(tma=GemmAllReduceTma, columns=GemmAllReduceColumns, sequence=GemmAllReduceSequence)
            self.run = made[method](self, M, N, dtype)
        self.replays = Replays(self.run)

    def free(self):
        super().free()
        if self.method == "sequence":
            self.run.context.free()


def create_gemm_allreduce_context(M, N, dtype, method=None, team=0, config=None, programs=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        M, N: rows and columns of the sum, 0 or more, equal on all ranks of the team.
        dtype: torch.float16, bfloat16 or float32; float32 is multiplied in fp32, not in tf32.
        method: "one_shot" (one hop, for small M * N) or "two_shot" (least traffic), which give the same bits; "tma",
            "columns" or "sequence", which have no config and no programs. None: on nvidia, unless config or programs is
            given, as for `create_gemm_reduce_scatter_context`; elsewhere "two_shot".
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(dtype)[0]`; also num_warps and num_stages.
        programs: programs in the grid, equal on all ranks; not more than the device runs at a time.

    Symmetric memory: one_shot 4 * num_ranks * programs tiles of BLOCK_M * BLOCK_N in fp32 and num_ranks * programs
    signals; two_shot M * N elements (rounded up to tiles, their number to num_ranks) both in fp32 and in dtype, and twice
    as many signals; tma 4 * M * N elements, columns 2 * M * N, sequence 2 * num_ranks * M * N, and signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_gemm_allreduce_context"
    M, N, config, programs, method = settle(name, "gemm_allreduce", M, N, dtype, team, config, programs, method, METHODS)
    return torch_ops.register(GemmAllReduceContext(M, N, dtype, method, team, config, programs))


def gemm_allreduce(a, b, context, out=None):
    """The sum of a @ b over all ranks of the context's team, on every rank.

    Args:
        a: [M, K], any strides; K may differ between ranks and may be 0. Any memory.
        b: [K, N], any strides. M, N, dtype and device as the context's.
        context: of `create_gemm_allreduce_context`.
        out: [M, N] with contiguous rows, written, no overlap with a and b; None: a new tensor.

    Returns: out, the same bits on every rank and every time. one_shot and two_shot: fp32 accumulation, partial products
    added in rank order in fp32, one rounding. The others: each peer's product is rounded, and the sum in fp32 (sequence
    multiplies as torch.mm).
    All ranks of the team must make the same calls in the same order, on one stream. With `out` given nothing is
    allocated, and there is no host synchronisation: the call can be captured in a CUDA graph. `a` and `b` may be changed
    once the call is complete on this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    if out is None and torch.compiler.is_compiling():
        return torch_ops.gemm_allreduce(a, b, context.number)
    if not passed_before(context, operands_of(a, b, out)):
        begin("gemm_allreduce", GemmAllReduceContext, context, a=a, b=b, out=out)
        if out is None:
            out = torch.empty(context.M, context.N, dtype=context.dtype, device=context.device)
        check_operands("gemm_allreduce", context, a, b, out, context.M)
    context.replays(context.passed, *without_gradients(a, b), out)
    return out
