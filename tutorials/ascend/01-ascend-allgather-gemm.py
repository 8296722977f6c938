"""
AllGather-GEMM in one kernel
============================

Every rank holds a shard of A (M x K) and all of B (K x N). Every rank wants C = concat(all shards) @ B, of shape
(M * world_size) x N. The usual way is two steps: all-gather the shards, then multiply. While the first step runs, the
compute units idle; while the second runs, the links idle.

This tutorial does both in one kernel. While a round of A blocks is being multiplied, the next round is already on its
way. You will meet the four things that every kernel of this library is made of: a *symmetric heap*, a *put*, a *signal*
that says "the data is there", and a second signal that says "you may write there again".

Run it with one process a rank:

    torchrun --nproc-per-node=2 tutorials/ascend/01-ascend-allgather-gemm.py

It runs on NPUs, on NVIDIA GPUs, and on any machine at all through Triton's interpreter; `import triton_dist` picks.
Options: --M --N --K (per rank), --dtype, --warmup and --iters (with --iters 1 or more it also prints times).
"""

import argparse
import os
import sys
import time

# %%
# `triton_dist` comes before `triton`: on a machine without an accelerator it switches Triton's interpreter on, and
# Triton decides at its import whether it interprets.
import triton_dist
import triton_dist.language as dl
from triton_dist import shmem

import torch
import torch.distributed as dist
import triton
import triton.language as tl

# Where the ranks meet to set up the heap. Empty: through torch.distributed, so any number of runs can share a host.
# Set it (tcp://host:port) only if your ranks cannot meet that way.
G_IP_PORT = os.environ.get("G_IP_PORT", "")


# %%
# The picture
# -----------
#
# A rank cuts its shard into *chunks* of CHUNK_M rows. Round r is about chunk r of every rank. Each rank has a *staging
# buffer* in the symmetric heap, where peers put their chunks:
#
#     staging[NUM_BUFFERS][world_size][CHUNK_M][K]      the slot [r % NUM_BUFFERS][s] holds chunk r of rank s
#
# "Symmetric" means: every rank has that buffer at the same place in its own heap. So this rank's pointer to a slot, plus
# a peer, names the same slot in the peer's memory. `dl.put(dst, src, n, peer, ctx)` copies from here to there.
#
# Two arrays of signals say when. A signal is an integer with 64 bytes to itself. There is one for each program of each rank:
#
#     ready[s][p]   lives at the reader.  "Program p of rank s has put its part of that many chunks."   set by that program
#     done[d][p]    lives at the writer.  "Program p of rank d has read that many of your chunks."       set by that program
#
# The counts go on over rounds and calls, and nobody ever resets them. So a value left over from the last round can never
# be taken for this one's. Why a signal for each program, and not one that all of them add to? Programs drift apart: one that
# is a round ahead would pay for one that is behind, and the sum would be reached while a part of the chunk is still missing.
# (And on an NPU, a kernel with a product in it runs its signals on two vector cores: a set twice is a set, an add is not.)
#
# In a picture, for two ranks and two buffers:
#
#     rank 0   put chunk 0 -> 1 | put chunk 1 -> 1 | multiply 0/0, 0/1 | put chunk 2 -> 1 | multiply 1/0, 1/1 | ...
#     rank 1   put chunk 0 -> 0 | put chunk 1 -> 0 | multiply 0/1, 0/0 | put chunk 2 -> 0 | multiply 1/1, 1/0 | ...
#                                                    ^ own chunk first: it needs no wait
#
# Why is no slot overwritten early? Chunk r goes where chunk r - NUM_BUFFERS was. Before a rank writes it, it waits until
# `done` says that *all* programs of the reader have finished round r - NUM_BUFFERS. And why does nobody wait for ever? A
# program puts its part of round r + 1 before it multiplies round r, and what it waits for there is at most round r - 1
# of its peers: they owe it nothing that depends on what it has not done yet.
#
# There is no barrier over all ranks in a round: a rank that is early runs ahead until its buffers are full.


@triton.jit
def put_chunk(
    a_ptr, staging_ptr, ready_ptr, done_ptr, M, K, r, first_round, ctx, CHUNK_M: tl.constexpr, NUM_BUFFERS: tl.constexpr
):
    """This program's share of chunk r of the own shard, to every peer."""
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.minimum(CHUNK_M, M - r * CHUNK_M)
    count = first_round + r + 1  # of chunks, this one included
    slot = (first_round + r) % NUM_BUFFERS * world + me
    src = a_ptr + tl.cast(r * CHUNK_M, tl.int64) * K
    dst = staging_ptr + tl.cast(slot, tl.int64) * CHUNK_M * K
    for i in range(1, world):
        # The peer that multiplies our chunk first is served first: it is the one whose next neighbour we are.
        peer = (me + world - i) % world
        # The slot is free when all programs of the peer have finished the round that used it last.
        token = dl.wait(dl.signal_at(done_ptr, peer * programs), count - NUM_BUFFERS, ctx, "ge", programs)
        free = dl.consume_token(dst, token)  # costs nothing; it says what the wait was for
        # All programs share the copy, 4096 elements at a time in turn (enough for 16 bytes or more a thread of a GPU);
        # each of them sets its own signal at the peer after its own part.
        sig = dl.signal_at(ready_ptr, me * programs + pid)
        n = tl.cast(rows, tl.int64) * K
        dl.put_signal(free, src, n, sig, peer, ctx, count, "set", pid, programs, 4096)


@triton.jit
def multiply_chunk(
    a_ptr, b_ptr, c_ptr, rows, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """c[rows, N] = a[rows, K] @ b[K, N], the tiles dealt out over the programs. Ordinary Triton."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    offs_k = tl.arange(0, BLOCK_K)
    tile = tl.program_id(0)
    while tile < tiles:
        offs_m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        a_ptrs = a_ptr + offs_m[:, None].to(tl.int64) * K + offs_k[None, :]
        b_ptrs = b_ptr + offs_k[:, None].to(tl.int64) * N + offs_n[None, :]
        a_mask = offs_m[:, None] < rows
        b_mask = offs_n[None, :] < N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if EVEN_K:
                a = tl.load(a_ptrs, mask=a_mask, other=0.0)
                b = tl.load(b_ptrs, mask=b_mask, other=0.0)
            else:
                a = tl.load(a_ptrs, mask=a_mask & (offs_k[None, :] < K - k), other=0.0)
                b = tl.load(b_ptrs, mask=b_mask & (offs_k[:, None] < K - k), other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 in fp32, not in tf32
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K * N
        c_ptrs = c_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=a_mask & b_mask)
        tile += tl.num_programs(0)


# %%
# The kernel
# ----------
#
# All programs do the same: put their share of the next chunk, then multiply their share of this round's tiles. On a
# device the stores of `put_chunk` are on the link while the multiplication below them runs.


@triton.jit
def allgather_gemm_kernel(
    a_ptr, b_ptr, c_ptr, staging_ptr, ready_ptr, done_ptr, M, N, K, first_round, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK_M: tl.constexpr, NUM_BUFFERS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rounds = tl.cdiv(M, CHUNK_M)

    put_chunk(a_ptr, staging_ptr, ready_ptr, done_ptr, M, K, 0, first_round, ctx, CHUNK_M, NUM_BUFFERS)
    r = 0
    while r < rounds:
        # Round r + 1 starts its way ...
        if r + 1 < rounds:
            put_chunk(a_ptr, staging_ptr, ready_ptr, done_ptr, M, K, r + 1, first_round, ctx, CHUNK_M, NUM_BUFFERS)

        # ... while round r is multiplied: the own chunk first, straight from A, then the peers' as they arrive.
        rows = tl.minimum(CHUNK_M, M - r * CHUNK_M)
        count = first_round + r + 1
        own = a_ptr + tl.cast(r * CHUNK_M, tl.int64) * K
        c_rows = c_ptr + (tl.cast(me, tl.int64) * M + r * CHUNK_M) * N
        multiply_chunk(own, b_ptr, c_rows, rows, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
        i = 1
        while i < world:  # not a `for`: an NPU's compiler would let the matrix cores run ahead of the wait
            src = dl.owner_first(i, me, world)
            token = dl.wait(dl.signal_at(ready_ptr, src * programs), count, ctx, "ge", programs)
            slot = (first_round + r) % NUM_BUFFERS * world + src
            chunk = dl.consume_token(staging_ptr + tl.cast(slot, tl.int64) * CHUNK_M * K, token)
            c_rows = c_ptr + (tl.cast(src, tl.int64) * M + r * CHUNK_M) * N
            multiply_chunk(chunk, b_ptr, c_rows, rows, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
            i += 1

        # This program needs the slots of round r no more. `notify` is a release: it cannot overtake the loads above. (On
        # an NPU the matrix cores work apart from the cores that notify; `fence_dot` makes these wait for those.)
        dl.fence_dot(ctx)
        for i in range(1, world):
            dl.notify(dl.signal_at(done_ptr, me * programs + pid), (me + i) % world, ctx, count)
        r += 1


# %%
# Sizes that fit the machine: tiles, chunk rows, buffers, programs. The programs of all ranks wait for one another, so a
# rank must not start more of them than its device runs at a time. An interpreter likes few programs and large tiles.


def launch_config(dtype):
    if triton_dist.backend == "cpu":
        return dict(BLOCK_M=512, BLOCK_N=512, BLOCK_K=1024, CHUNK_M=512, NUM_BUFFERS=2), 2
    if triton_dist.backend == "nvidia":
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        tile_k = 64 if dtype.itemsize == 2 else 32
        return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=tile_k, CHUNK_M=512, NUM_BUFFERS=2), programs
    return dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, CHUNK_M=512, NUM_BUFFERS=2), 20


class AllGatherGemm:
    """What the kernel needs besides A and B: allocated once, used for any number of calls."""

    def __init__(self, M, N, K, dtype, device_id):
        self.config, self.programs = launch_config(dtype)
        self.M, self.N, self.K = M, N, K
        self.rounds = triton.cdiv(M, self.config["CHUNK_M"])
        self.rounds_done = 0  # rounds of all earlier calls: the signals count on
        world = shmem.pe_count()
        # `create_tensor` is collective: all ranks ask for the same, in the same order.
        staging = (self.config["NUM_BUFFERS"], world, self.config["CHUNK_M"], K)
        self.staging = shmem.aclshmem_create_tensor(staging, dtype, device_id)
        self.ready = shmem.create_signals(world * self.programs)
        self.done = shmem.create_signals(world * self.programs)
        self.ctx = shmem.context()

    def __call__(self, a, b):
        c = torch.empty(self.M * shmem.pe_count(), self.N, dtype=a.dtype, device=a.device)
        allgather_gemm_kernel[(self.programs,)](
            a, b, c, self.staging, self.ready, self.done, self.M, self.N, self.K, self.rounds_done, self.ctx,
            **self.config, EVEN_K=self.K % self.config["BLOCK_K"] == 0,
        )  # fmt: skip
        self.rounds_done += self.rounds
        return c

    def free(self):
        for tensor in (self.staging, self.ready, self.done):
            shmem.aclshmem_free_tensor(tensor)


# %%
# Is it right?
# ------------
#
# The reference is an all-gather and a matrix product in fp32, rounded once to the dtype; the kernel accumulates in fp32
# and rounds once, too. So the two differ by the order of fp32 additions, which may push a value over a rounding boundary:
# one unit in the last place. That is 2^-10 of the value for fp16 (less than 1e-3), 2^-7 for bf16. In fp32 itself,
# sums of K terms in another order differ by a small multiple of K * 2^-24, 2.4e-4 for K = 4096; where that exceeds the
# absolute tolerance below, it takes its place.

TOLERANCE = {torch.float16: ("1e-3", "1e-3"), torch.bfloat16: ("8e-3", "8e-3"), torch.float32: ("1e-3", "1e-3")}


def golden(a, b):
    gathered = [torch.empty_like(a) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, a)
    return torch.matmul(torch.cat(gathered).float(), b.float()).to(a.dtype)


def say(line):
    sys.stdout.write(line + "\n")  # one write: `print` makes two, between which another rank's line may fall
    sys.stdout.flush()


def synchronize():
    if triton_dist.backend != "cpu":
        torch.accelerator.synchronize()


def seconds(call, iters):
    times = []
    for _ in range(iters):
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[iters // 2]


# %%
# From start to end: join the process group, set up the heap, allocate, run, compare, free, finalize.


def main():
    parser = argparse.ArgumentParser(description="Fused AllGather-GEMM; start it with torchrun.")
    for size in ("M", "N", "K"):
        parser.add_argument(f"--{size}", type=int, default=4096, help="per rank (default 4096)")
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="fp16")
    parser.add_argument("--warmup", type=int, default=0, help="calls before the one that is checked")
    parser.add_argument("--iters", type=int, default=0, help="timed calls; 0 (default): print no times")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.M, args.N, args.K) < 1 or min(args.warmup, args.iters) < 0:
        parser.error("--M, --N and --K must be at least 1, --warmup and --iters at least 0")
    if "LOCAL_RANK" not in os.environ:
        parser.exit(
            2,
            "This tutorial runs one process a rank, started by torchrun:\n"
            f"    torchrun --nproc-per-node=2 {sys.argv[0]}\n",
        )
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    M, N, K = args.M, args.N, args.K

    # The process group serves the reference and the final exchange. `shmem` meets through it, too.
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(shmem.process_group_backend())
    rank, world = dist.get_rank(), dist.get_world_size()

    shmem.set_conf_store_tls(False, "")
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.ip_port = rank, world, G_IP_PORT
    config, _ = launch_config(dtype)
    attr.local_mem_size = (config["NUM_BUFFERS"] * world * config["CHUNK_M"] * K * dtype.itemsize) + (64 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"[FAIL] Rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    say(f"[INFO] Rank {rank} of {world} initialized")

    device = shmem.device()
    torch.manual_seed(args.seed * world + rank)
    a = torch.randn(M, K).to(dtype).to(device)
    b = torch.randn(K, N).to(dtype).to(device)

    operator = AllGatherGemm(M, N, K, dtype, local_rank)
    for _ in range(args.warmup):
        operator(a, b)
    c = operator(a, b)
    synchronize()

    rtol, atol = TOLERANCE[dtype]
    if args.K * 2.0**-24 > float(atol):
        atol = f"{args.K * 2.0**-24:.1e}"
    passed = torch.allclose(golden(a, b), c, rtol=float(rtol), atol=float(atol))
    if passed:
        say(f"[PASS] Rank {rank}: C_golden and C match within tolerances (rtol={rtol}, atol={atol}).")
    else:
        say(f"[FAIL] Rank {rank}: C_golden and C differ by more than rtol={rtol}, atol={atol}.")

    if args.iters:
        ours = seconds(lambda: operator(a, b), args.iters)
        wide_a, wide_b = a.float().repeat(world, 1), b.float()
        plain = seconds(lambda: wide_a @ wide_b, args.iters)
        say(f"[TIME] Rank {rank}: kernel {ours:.4g} s, fp32 matmul of the same size {plain:.4g} s")

    # One failure is everybody's failure.
    verdict = torch.tensor([int(passed)], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    operator.free()
    shmem.aclshmem_finalize()
    dist.destroy_process_group()
    if not verdict.item():
        sys.exit(1)
    if rank == 0:
        say(f"[INFO] Test passed successfully for {world} ranks!")


if __name__ == "__main__":
    main()
