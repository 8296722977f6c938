"""AllGather-GEMM: C = concat(A of every rank) @ B, in one kernel that multiplies while shards are on their way.

    ctx = create_allgather_gemm_context(M, K, torch.float16)     # once: symmetric memory, signals, epochs
    c = allgather_gemm(a, b, ctx)                                # any number of calls
    ctx.free()

How it works. A shard is cut into chunks of CHUNK_M rows. Every program puts its share of chunk r + 1 into all peers'
staging buffers, then multiplies its share of chunk r's tiles, own chunk first, then the peers' in the order in which they
are served. `ready[s][p]` at the reader is the number of chunks of which program p of rank s has put its part, `done[d][p]` at
the writer the number of chunks that program p of rank d has read. Each has one writer, which sets it (an add by a kernel
with a product in it would count twice on Ascend), and only grows, over chunks and over calls: no value of an earlier one can
be taken for a later one's, and there is no barrier between calls. The count of chunks so far lies in device memory, one word
a program, so that a captured graph replays right.

That is the method `kernel`. There are two more, for the device's own product library: `streams`
(allgather_gemm_streams.py) and `sequence`, an all_gather and then one product, for messages of few bytes.

A slot is written again only when `done` says that every program of its reader has finished the round that used it last;
a program waits for at most round r - 1 of its peers before it has put round r + 1, so nobody waits in a circle.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from . import torch_ops
from .all_gather import all_gather, create_all_gather_context
from .allgather_gemm_streams import AllGatherGemmStreams
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
from .gemm_tile import store_tile, tile_product
from .operator_context import OperatorContext, agreement, begin, operands_of, passed_before
from .replays import Replays

METHODS = ("kernel", "streams", "sequence")
SEQUENCE_BYTES = 4 << 20  # a shard up to which an all-gather by a kernel beats a copy engine's


@triton.jit
def _put_chunk(
    a, staging, ready, done, M, K, r, past, ctx,
    CHUNK_M: tl.constexpr, NUM_BUFFERS: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    rows = tl.minimum(CHUNK_M, M - r * CHUNK_M)
    buffer, count = (past + r) % NUM_BUFFERS, past + r + 1
    slot = tl.cast(buffer * world + me, tl.int64) * CHUNK_M * K
    start = tl.cast(r * CHUNK_M, tl.int64) * K
    for i in range(1, world):
        peer = (me + world - i) % world  # serves first who reads this shard first
        token = dl.wait(dl.signal_at(done, peer * programs), count - NUM_BUFFERS, ctx, "ge", programs)
        dst = dl.consume_token(staging + slot, token)
        sig = dl.signal_at(ready, me * programs + pid)
        n = tl.cast(rows, tl.int64) * K
        dl.put_signal(dst, a + start, n, sig, peer, ctx, count, "set", pid, programs, COPY_BLOCK)


@triton.jit
def _multiply_chunk(
    a, b, c, rows, N, K, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """c[rows, N] = a[rows, K] @ b; this program's share of the tiles."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    while tile < tiles_m * tiles_n:
        pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tile_product(a, b, row, rows, col, N, K, K, 1, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
        store_tile(c, acc, row, rows, col, N, stride_cm, BLOCK_M, BLOCK_N)
        tile += tl.num_programs(0)


@triton.jit
def allgather_gemm_kernel(
    a, b, c, staging, ready, done, epochs, M, N, K, stride_bk, stride_bn, stride_cm, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    CHUNK_M: tl.constexpr, NUM_BUFFERS: tl.constexpr, COPY_BLOCK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # rounds of all earlier calls
    rounds = tl.cdiv(M, CHUNK_M)

    if rounds > 0:
        _put_chunk(a, staging, ready, done, M, K, 0, past, ctx, CHUNK_M, NUM_BUFFERS, COPY_BLOCK)
    r = 0
    while r < rounds:
        if r + 1 < rounds:
            _put_chunk(a, staging, ready, done, M, K, r + 1, past, ctx, CHUNK_M, NUM_BUFFERS, COPY_BLOCK)
        buffer, count = (past + r) % NUM_BUFFERS, past + r + 1
        first_row = tl.cast(r * CHUNK_M, tl.int64)
        rows = tl.minimum(CHUNK_M, M - r * CHUNK_M)
        own = c + (tl.cast(me, tl.int64) * M + first_row) * stride_cm
        _multiply_chunk(a + first_row * K, b, own, rows, N, K, stride_bk, stride_bn, stride_cm,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_K)  # fmt: skip
        i = 1
        while i < world:  # Ascend: in a `for` its matrix core would not wait for the chunk
            src = dl.owner_first(i, me, world)
            token = dl.wait(dl.signal_at(ready, src * programs), count, ctx, "ge", programs)
            chunk = dl.consume_token(staging + tl.cast(buffer * world + src, tl.int64) * CHUNK_M * K, token)
            out = c + (tl.cast(src, tl.int64) * M + first_row) * stride_cm
            _multiply_chunk(chunk, b, out, rows, N, K, stride_bk, stride_bn, stride_cm,
                            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_K)  # fmt: skip
            i += 1
        dl.fence_dot(ctx)
        for i in range(1, world):
            dl.notify(dl.signal_at(done, me * programs + pid), (me + i) % world, ctx, count)
        r += 1
    tl.store(epochs + pid + tl.arange(0, 1), past + rounds)


def reference(a, b, group=None):
    """The same by torch: an all-gather over `group`, a product in fp32, one rounding. [M * num_ranks, N]."""
    shards = [torch.empty_like(a) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, a.contiguous(), group=group)
    return torch.matmul(torch.cat(shards).float(), b.float()).to(a.dtype)


def default_config(dtype):
    """(constexprs of the kernel, programs) that suit this process's platform. Programs of all ranks wait for one another,
    so there are no more of them than the device runs at a time."""
    tiles = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, CHUNK_M=512, NUM_BUFFERS=2, COPY_BLOCK=4096)
    if triton_dist.backend == "cpu":  # an interpreter likes few programs and large tiles
        tiles.update(BLOCK_M=512, BLOCK_N=512, BLOCK_K=1024)
    elif triton_dist.backend == "nvidia":
        tiles.update(BLOCK_K=64, num_warps=8)
        if dtype.itemsize == 4:  # products of fp32 take registers where others take the matrix units
            tiles.update(BLOCK_M=64, BLOCK_K=32)
    else:
        tiles.update(BLOCK_N=256)
    return tiles, device_programs()


class AllGatherGemmSequence:
    """The method `sequence`: all_gather into a buffer of this rank, then torch's product of all rows."""

    def __init__(self, owner, M, K, dtype):
        self.context = create_all_gather_context(M * K, dtype, owner.team)
        self.gathered = torch.empty(owner.num_ranks * M, K, dtype=dtype, device=owner.device)

    def __call__(self, a, b, out):
        all_gather(a, self.context, self.gathered)
        torch.mm(self.gathered, b, out=out)


class AllGatherGemmKernel:
    """The method `kernel`."""

    def __init__(self, owner, M, K, dtype, config, programs):
        self.M, self.K, self.config, self.programs, self.table = M, K, config, programs, owner.table
        self.staging = owner.tensor((config["NUM_BUFFERS"], owner.num_ranks, config["CHUNK_M"], K), dtype)
        self.ready = owner.signals(owner.num_ranks * programs)
        self.done = owner.signals(owner.num_ranks * programs)
        self.epochs = owner.local(programs)

    def __call__(self, a, b, out):
        allgather_gemm_kernel[(self.programs,)](
            a, b, out, self.staging, self.ready, self.done, self.epochs, self.M, b.shape[1], self.K,
            b.stride(0), b.stride(1), out.stride(0), self.table, **self.config,
            EVEN_K=self.K % self.config["BLOCK_K"] == 0,
        )  # fmt: skip


class AllGatherGemmContext(OperatorContext):
    """What `allgather_gemm` needs besides its operands. Made by `create_allgather_gemm_context`."""

    def __init__(self, M, K, dtype, team, config, programs, method):
        super().__init__("allgather_gemm", team)
        self.M, self.K, self.dtype, self.method = M, K, dtype, method
        if method == "kernel":
            self.run = AllGatherGemmKernel(self, M, K, dtype, config, programs)
        else:
            self.run = (AllGatherGemmStreams if method == "streams" else AllGatherGemmSequence)(self, M, K, dtype)
        self.replays = Replays(self.run)

    def free(self):
        super().free()
        if self.method == "sequence":
            self.run.context.free()

    def check(self, a, b, out):
        """Raises ValueError, naming rank and values, unless the operands fit."""

        def fit(fits, text):
            need("allgather_gemm", fits, text)

        fit(tuple(a.shape) == (self.M, self.K), f"a is {list(a.shape)}, the context was made for [{self.M}, {self.K}]")
        fit(b.dim() == 2 and b.shape[0] == self.K, f"b is {list(b.shape)}, it must be [{self.K}, N]")
        rows = self.M * self.num_ranks
        fit(tuple(out.shape) == (rows, b.shape[1]), f"out is {list(out.shape)}, it must be [{rows}, {b.shape[1]}]")
        for name, tensor in (("a", a), ("b", b), ("out", out)):
            need_operand("allgather_gemm", name, tensor, self.dtype, self.device)
        fit(a.is_contiguous(), f"a has strides {a.stride()}; chunks are put as they lie: pass a.contiguous()")
        fit(out.stride(1) == 1 or out.shape[1] <= 1, f"out has strides {out.stride()}; its rows must be contiguous")
        need_apart("allgather_gemm", out, dict(a=a, b=b))
        self.agree("allgather_gemm", "", a, b, out)


def create_allgather_gemm_context(M, K, dtype, team=0, config=None, programs=None, method=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        M: rows of each rank's shard, 0 or more, equal on all ranks of the team.
        K: columns of the shards, 0 or more, equal on all ranks.
        dtype: torch.float16, bfloat16 or float32.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(dtype)[0]`.
        programs: programs in the grid, equal on all ranks; not more than the device runs at a time.
        method: "kernel", "streams" or "sequence", see the top of this file; the last two have no config and no programs, and
            `streams` is not available on ascend. None: on nvidia, unless config or programs is given, the faster one that was
            measured (docs/tuning.md), else "sequence" for shards of up to 4 MiB and "streams"; elsewhere "kernel".

    kernel lasts for 2^31 / (chunks in a shard) calls, for the signals are int32 and only grow: millions. Then make a new one.

    Symmetric memory: kernel NUM_BUFFERS * num_ranks * CHUNK_M * K elements and 2 * num_ranks * programs signals; streams
    num_ranks * M * K elements, sequence twice that (and as much of this rank's own), and some signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_allgather_gemm_context"
    with agreement(name, team) as agreed:
        need_dtype(name, dtype, FLOATS)
        M, K = need_int(name, "M", M), need_int(name, "K", K)
        checked_method(name, method, METHODS, config, programs)
        given = config, programs
        least = dict(NUM_BUFFERS=2)  # with one buffer every rank would wait for the others to read it first
        config, programs = checked_config(name, default_config(dtype), config, programs, LAUNCH_OPTIONS, least)
        agreed.on = f"M={M}, K={K}, {dtype}, config={config}, programs={programs}, method={method!r}"
    if method is None:
        suited = "sequence" if M * K * dtype.itemsize <= SEQUENCE_BYTES else "streams"
        key = dict(dtype=name_of(dtype), M=M, K=K)
        method = chosen_method(name, METHODS, suited, *given, team, "allgather_gemm", key)
    return torch_ops.register(AllGatherGemmContext(M, K, dtype, team, config, programs, method))


def allgather_gemm(a, b, context, out=None):
    """C = concat(a of all ranks of the context's team, in rank order) @ b.

    Args:
        a: [M, K], this rank's shard, contiguous; M, K, dtype and device as the context's. Any memory.
        b: [K, N] with any strides; N may differ between ranks.
        context: of `create_allgather_gemm_context`.
        out: [M * num_ranks, N] with contiguous rows, written, no overlap with a and b; None: a new tensor.

    Returns: out. fp32 accumulation, one rounding; the same bits every time. (streams and sequence multiply as torch.mm does,
    under torch's settings for reduced precision.)
    All ranks of the team must make the same calls in the same order. With `out` given nothing is allocated, and there is
    no host synchronisation: the call can be captured in a CUDA graph. `a` may be changed once the call is complete on
    this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    if out is None and torch.compiler.is_compiling():
        return torch_ops.allgather_gemm(a, b, context.number)
    if not passed_before(context, operands_of(a, b, out)):
        begin("allgather_gemm", AllGatherGemmContext, context, a=a, b=b, out=out)
        if out is None:
            columns = b.shape[-1] if b.dim() else 1
            out = torch.empty(context.M * context.num_ranks, columns, dtype=context.dtype, device=context.device)
        context.check(a, b, out)
    context.replays(context.passed, *without_gradients(a, b), out)
    return out
