"""AllGather-GEMM: C = concat(A of every rank) @ B, in one kernel that multiplies while shards are on their way.

    ctx = create_allgather_gemm_context(M, K, torch.float16)     # once: symmetric memory, signals, epochs
    c = allgather_gemm(a, b, ctx)                                # any number of calls
    ctx.free()

How it works. A shard is cut into chunks of CHUNK_M rows. Every program puts its share of chunk r + 1 into all peers'
staging buffers, then multiplies its share of chunk r's tiles, own chunk first, then the peers' in the order in which they
are served. `ready[buffer][s]` at the reader counts the programs of rank s that have put their part, `done[buffer][d]` at
the writer counts the programs of rank d that have finished reading. Both only grow, over rounds and over calls, so no value
of an earlier round or call can be taken for a later one's, and there is no barrier between calls. A signal serves one
buffer: if it counted all rounds, a program that runs a round ahead would pay for one that is behind. The count of rounds so
far lies in device memory, one word a program, so that a captured graph replays right.

A slot is written again only when `done` says that every program of its reader has finished the round that used it last;
a program waits for at most round r - 1 of its peers before it has put round r + 1, so nobody waits in a circle.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import shmem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _put_chunk(
    a, staging, ready, done, M, K, r, past, ctx,
    CHUNK_M: tl.constexpr, NUM_BUFFERS: tl.constexpr, COPY_BLOCK: tl.constexpr,
):  # fmt: skip
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    rows = tl.minimum(CHUNK_M, M - r * CHUNK_M)
    buffer, uses = (past + r) % NUM_BUFFERS, (past + r) // NUM_BUFFERS
    slot = tl.cast(buffer * world + me, tl.int64) * CHUNK_M * K
    start = tl.cast(r * CHUNK_M, tl.int64) * K
    for i in range(1, world):
        peer = (me + world - i) % world  # serves first who reads this shard first
        token = dl.wait(dl.signal_at(done, buffer * world + peer), uses * programs, ctx)
        dst = dl.consume_token(staging + slot, token)
        sig = dl.signal_at(ready, buffer * world + me)
        n = tl.cast(rows, tl.int64) * K
        dl.put_signal(dst, a + start, n, sig, peer, ctx, 1, "add", pid, programs, COPY_BLOCK)


@triton.jit
def _tile(
    a, b, c, pid_m, pid_n, rows, N, K, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a + m[:, None].to(tl.int64) * K + k[None, :]
    b_ptrs = b + k[:, None].to(tl.int64) * stride_bk + n[None, :].to(tl.int64) * stride_bn
    a_mask = m[:, None] < rows
    b_mask = n[None, :] < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(a_ptrs, mask=a_mask, other=0.0)
            y = tl.load(b_ptrs, mask=b_mask, other=0.0)
        else:
            x = tl.load(a_ptrs, mask=a_mask & (k[None, :] < K - start), other=0.0)
            y = tl.load(b_ptrs, mask=b_mask & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c + m[:, None].to(tl.int64) * stride_cm + n[None, :]
    tl.store(c_ptrs, acc.to(c.dtype.element_ty), mask=a_mask & b_mask)


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
    tiles_n = tl.cdiv(N, BLOCK_N)

    if rounds > 0:
        _put_chunk(a, staging, ready, done, M, K, 0, past, ctx, CHUNK_M, NUM_BUFFERS, COPY_BLOCK)
    r = 0
    while r < rounds:
        if r + 1 < rounds:
            _put_chunk(a, staging, ready, done, M, K, r + 1, past, ctx, CHUNK_M, NUM_BUFFERS, COPY_BLOCK)
        buffer, uses = (past + r) % NUM_BUFFERS, (past + r) // NUM_BUFFERS
        first_row = tl.cast(r * CHUNK_M, tl.int64)
        rows = tl.minimum(CHUNK_M, M - r * CHUNK_M)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        for i in range(0, world):
            src = dl.owner_first(i, me, world)
            chunk = a + first_row * K
            if src != me:
                slot = buffer * world + src
                token = dl.wait(dl.signal_at(ready, slot), (uses + 1) * programs, ctx)
                chunk = dl.consume_token(staging + tl.cast(slot, tl.int64) * CHUNK_M * K, token)
            out = c + (tl.cast(src, tl.int64) * M + first_row) * stride_cm
            tile = pid
            while tile < tiles_m * tiles_n:
                pid_m, pid_n = dl.tile_of(tile, tiles_m, tiles_n, GROUP_M)
                _tile(chunk, b, out, pid_m, pid_n, rows, N, K, stride_bk, stride_bn, stride_cm,
                      BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)  # fmt: skip
                tile += programs
        dl.fence_dot(ctx)
        for i in range(1, world):
            dl.notify(dl.signal_at(done, buffer * world + me), (me + i) % world, ctx, 1, "add")
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
        return {**tiles, "BLOCK_M": 512, "BLOCK_N": 512, "BLOCK_K": 1024}, 2
    if triton_dist.backend == "nvidia":
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        return {**tiles, "BLOCK_K": 64 if dtype.itemsize == 2 else 32}, programs
    return {**tiles, "BLOCK_N": 256}, 20


class AllGatherGemmContext:
    """What `allgather_gemm` needs besides its operands. Made by `create_allgather_gemm_context`."""

    def __init__(self, M, K, dtype, team, config, programs):
        self.M, self.K, self.dtype, self.team, self.config, self.programs = M, K, dtype, team, config, programs
        self.num_ranks = shmem.team_n_pes(team)
        self.table = shmem.context(team)
        self.staging = shmem.aclshmem_create_tensor(
            (config["NUM_BUFFERS"], self.num_ranks, config["CHUNK_M"], K), dtype
        )
        self.ready = shmem.create_signals(config["NUM_BUFFERS"] * self.num_ranks)
        self.done = shmem.create_signals(config["NUM_BUFFERS"] * self.num_ranks)
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=self.staging.device)

    def free(self):
        """Gives the symmetric memory back. Collective over all ranks; no call may be under way."""
        for tensor in (self.staging, self.ready, self.done):
            shmem.aclshmem_free_tensor(tensor)
        self.staging = None

    def check(self, a, b, out):
        """Raises ValueError, naming rank and values, unless the operands fit."""

        def need(fits, text):
            if not fits:
                raise ValueError(f"rank {shmem.my_pe()}: allgather_gemm: {text}")

        need(self.staging is not None, "the context was freed")
        need(tuple(a.shape) == (self.M, self.K), f"a is {list(a.shape)}, the context was made for [{self.M}, {self.K}]")
        need(b.dim() == 2 and b.shape[0] == self.K, f"b is {list(b.shape)}, it must be [{self.K}, N]")
        rows = self.M * self.num_ranks
        need(tuple(out.shape) == (rows, b.shape[1]), f"out is {list(out.shape)}, it must be [{rows}, {b.shape[1]}]")
        for name, tensor in (("a", a), ("b", b), ("out", out)):
            need(tensor.dtype == self.dtype, f"{name} is {tensor.dtype}, the context was made for {self.dtype}")
            need(tensor.device == self.epochs.device, f"{name} is on {tensor.device}, not on {self.epochs.device}")
        need(a.is_contiguous(), f"a has strides {a.stride()}; chunks are put as they lie: pass a.contiguous()")
        need(out.stride(1) == 1 or out.shape[1] <= 1, f"out has strides {out.stride()}; its rows must be contiguous")


def create_allgather_gemm_context(M, K, dtype, team=0, config=None, programs=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        M: rows of each rank's shard, 0 or more, equal on all ranks of the team.
        K: columns of the shards, 0 or more, equal on all ranks.
        dtype: torch.float16, bfloat16 or float32.
        team: team id of shmem; its ranks take part.
        config: dict that overrides entries of `default_config(dtype)[0]`.
        programs: programs in the grid, equal on all ranks; not more than the device runs at a time.

    Lasts for 2^31 * NUM_BUFFERS / (programs * chunks in a shard) calls, for the signals are int32 and only grow: millions.
    Then make a new one.

    Symmetric memory: NUM_BUFFERS * num_ranks * CHUNK_M * K elements and 2 * NUM_BUFFERS * num_ranks signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    problem = None
    if dtype not in DTYPES:
        problem = f"dtype is {dtype}: give one of {', '.join(map(str, DTYPES))}"
    elif not all(isinstance(n, int) and n >= 0 for n in (M, K)):
        problem = f"M is {M!r} and K is {K!r}: give integers of 0 or more"
    if problem:
        raise ValueError(f"rank {shmem.my_pe()}: create_allgather_gemm_context: {problem}")
    defaults, default_programs = default_config(dtype)
    unknown = set(config or {}) - set(defaults)
    if unknown:
        raise ValueError(f"create_allgather_gemm_context: config has {sorted(unknown)}; known are {sorted(defaults)}")
    config, programs = {**defaults, **(config or {})}, default_programs if programs is None else programs
    for name, value in {**config, "programs": programs}.items():
        least = 2 if name == "NUM_BUFFERS" else 1  # with one buffer every rank would wait for the others to read it first
        if not isinstance(value, int) or value < least:
            raise ValueError(f"create_allgather_gemm_context: {name} is {value!r}: give an integer of {least} or more")
    shmem.check_alike(
        f"create_allgather_gemm_context(M={M}, K={K}, {dtype}, config={config}, programs={programs})", team
    )
    return AllGatherGemmContext(M, K, dtype, team, config, programs)


def allgather_gemm(a, b, context, out=None):
    """C = concat(a of all ranks of the context's team, in rank order) @ b.

    Args:
        a: [M, K], this rank's shard, contiguous; M, K, dtype and device as the context's. Any memory.
        b: [K, N] with any strides; N may differ between ranks.
        context: of `create_allgather_gemm_context`.
        out: [M * num_ranks, N] with contiguous rows, written; None: a new tensor.

    Returns: out. fp32 accumulation, one rounding; the same bits every time.
    All ranks of the team must make the same calls in the same order. With `out` given nothing is allocated, and there is
    no host synchronisation: the call can be captured in a CUDA graph. `a` may be changed once the call is complete on
    this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    if out is None:
        out = torch.empty(a.shape[0] * context.num_ranks, b.shape[-1], dtype=a.dtype, device=a.device)
    context.check(a, b, out)
    allgather_gemm_kernel[(context.programs,)](
        a, b, out, context.staging, context.ready, context.done, context.epochs, context.M, b.shape[1], context.K,
        b.stride(0), b.stride(1), out.stride(0), context.table, **context.config,
        EVEN_K=context.K % context.config["BLOCK_K"] == 0,
    )  # fmt: skip
    return out
