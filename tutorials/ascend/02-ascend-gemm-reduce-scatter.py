"""
GEMM-ReduceScatter in one kernel
================================

A large K is split over the ranks: rank r holds a slice A_r (M x K_r) and B_r (K_r x N), and the product that everybody is
after is C = A_0 @ B_0 + A_1 @ B_1 + ... Each rank wants its own rows of C, M / world_size of them. The usual way is two
steps: multiply, which gives a whole M x N *partial product* on every rank, then reduce-scatter, which adds them up. While
the first step runs the links idle; while the second runs, the compute units do.

This tutorial does both in one kernel. A tile that belongs to a peer is sent there as soon as it is computed, while the
next one is being computed. The trick is the order: *the peers' tiles first, the own tiles last*. When a rank has computed
its own tiles and wants to add up, its peers' contributions have long been on their way.

Tutorial 01 explains the symmetric heap, puts and signals; here tiles go from registers straight into a peer's memory.

    torchrun --nproc-per-node=2 tutorials/ascend/02-ascend-gemm-reduce-scatter.py

Options: --M --N --K (of the whole product; K is split over the ranks, M and K need not be divisible), --dtype, --seed,
--warmup and --iters (with --iters 1 or more it also prints times).
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
# C is cut into world_size *shards* of ceil(M / world_size) rows; shard d belongs to rank d, the *owner*. (The last shard
# is shorter where M is not divisible; a shard may even be empty.) A shard is cut into tiles. Each rank has a *staging
# buffer* in the symmetric heap, where all ranks store their partial products of its tiles, in fp32:
#
#     staging[world_size][tiles of a shard][BLOCK_M][BLOCK_N]     [s][t] holds rank s's partial product of tile t
#
# Why fp32, though C is fp16? Because the sum shall be rounded once. Adding up rounded numbers would cost accuracy with
# every rank.
#
# In a picture, for two ranks with four tiles each (d/t: tile t of owner d):
#
#     rank 0   1/0 -> | 1/1 -> | 1/2 -> | 1/3 -> | 0/0 | 0/1 | 0/2 | 0/3 | sum 0/0 | sum 0/1 | sum 0/2 | sum 0/3
#     rank 1   0/0 -> | 0/1 -> | 0/2 -> | 0/3 -> | 1/0 | 1/1 | 1/2 | 1/3 | sum 1/0 | sum 1/1 | sum 1/2 | sum 1/3
#              peers' tiles: compute and send      own tiles: compute      wait, add up, round, store
#
# The own partial product of an own tile goes into staging, too, so that all tiles are treated alike.
#
# With more ranks, rank r serves the owners r + 1, r + 2, ... and round: at any time each owner is served by another rank.
#
# Who waits for whom? The tiles of an owner are dealt out over the programs of a rank in the same way on every rank. So
# tile t of owner d is computed by the same program number p everywhere: program p adds up what the programs p of its
# peers have sent, and waits for them alone. That makes the signals simple. There are two kinds, each an integer with 64
# bytes to itself that *one* program sets and another one waits for:
#
#     ready[s][p]   lives at the owner.   "Program p of rank s has stored so many of your tiles."
#     done[d][p]    lives at the sender.  "Program p of rank d has finished so many calls: its slots are free."
#
# The numbers only grow, over tiles and over calls, and nobody resets them. So `ready >= n` can never be satisfied by what
# an earlier call left behind.
#
# Why is no slot overwritten early? Before a program stores a tile of call e, it waits until `done` says that program p of
# the owner has finished call e - 1, and with it all its reading. Is that wait needed? Yes: a rank whose own shard is empty
# waits for nobody's tiles; nothing else would keep it from running many calls ahead.
#
# And why does nobody wait for ever? While a program serves its peers, it waits for their *earlier* call only. It waits for
# tiles of *this* call only after it has sent everything that it owes to others.


@triton.jit
def partial_product(
    a_ptr, b_ptr, row, last_row, col, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """This rank's contribution to one tile of C, in fp32 registers. Ordinary Triton."""
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None].to(tl.int64) * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_k[:, None].to(tl.int64) * N + offs_n[None, :]
    a_mask = offs_m[:, None] < last_row
    b_mask = offs_n[None, :] < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=a_mask & (offs_k[None, :] < K - k), other=0.0)
            b = tl.load(b_ptrs, mask=b_mask & (offs_k[:, None] < K - k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 is multiplied in fp32, not in tf32
        a_ptrs += BLOCK_K
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * N
    return acc


# %%
# The kernel
# ----------
#
# First all partial products: one loop over owners, one over this program's tiles of the owner. Then the sums.


@triton.jit
def gemm_reduce_scatter_kernel(
    a_ptr, b_ptr, c_ptr, staging_ptr, ready_ptr, done_ptr, M, N, K, calls, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    shard = tl.cdiv(M, world)
    tiles_n = tl.cdiv(N, BLOCK_N)
    slots = tl.cdiv(shard, BLOCK_M) * tiles_n
    # In its slot a tile lies without gaps, BLOCK_M x BLOCK_N, whatever N is: no masks, and wide stores over the link.
    in_slot = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    step = 1
    while step <= world:
        owner = dl.owner_first(step, me, world)  # the rank after this one first, this rank itself last
        first_row = owner * shard
        last_row = tl.minimum(first_row + shard, M)
        tiles = tl.cdiv(tl.maximum(last_row - first_row, 0), BLOCK_M) * tiles_n
        # Tile t of this owner is for program (owner * slots + t) % programs, on every rank.
        tile = (pid + programs - (owner * slots) % programs) % programs
        # What `ready` of this program and owner stood at when this call began.
        count = calls * tl.cdiv(tl.maximum(tiles - tile, 0), programs)
        while tile < tiles:
            row = first_row + (tile // tiles_n) * BLOCK_M
            col = (tile % tiles_n) * BLOCK_N
            acc = partial_product(a_ptr, b_ptr, row, last_row, col, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
            count += 1
            # Into the owner's slot for us, as soon as the owner needs its old contents no more.
            token = dl.wait(dl.signal_at(done_ptr, owner * programs + pid), calls, ctx)
            slot = staging_ptr + tl.cast(me * slots + tile, tl.int64) * BLOCK_M * BLOCK_N
            dl.remote_store(dl.consume_token(slot, token) + in_slot, acc, owner, ctx)
            # `notify` is a release: whoever sees the count sees the tile. (On an NPU the matrix cores work apart from the
            # cores that notify; `fence_dot` makes these wait for those.)
            dl.fence_dot(ctx)
            dl.notify(dl.signal_at(ready_ptr, me * programs + pid), owner, ctx, count)
            tile += programs
        step += 1

    # The sums of this program's own tiles: the same tiles, in the same order, as the peers have sent them.
    rows = tl.maximum(tl.minimum(shard, M - me * shard), 0)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    tile = (pid + programs - (me * slots) % programs) % programs
    count = calls * tl.cdiv(tl.maximum(tiles - tile, 0), programs)
    while tile < tiles:
        count += 1
        # Everybody's part, in the order of ranks, not of arrival, so that every run gives the same bits.
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for source in range(0, world):
            token = dl.wait(dl.signal_at(ready_ptr, source * programs + pid), count, ctx)
            slot = staging_ptr + tl.cast(source * slots + tile, tl.int64) * BLOCK_M * BLOCK_N
            total += tl.load(dl.consume_token(slot, token) + in_slot)
        offs_m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (offs_m[:, None] < rows) & (offs_n[None, :] < N)
        c_ptrs = c_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
        tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=inside)
        tile += programs

    # This program has read all its slots: everybody may write them in the next call. (The release orders loads, too.)
    dl.notify_all(dl.signal_at(done_ptr, me * programs + pid), ctx, calls + 1)


# %%
# Sizes that fit the machine: tiles and programs. The programs of all ranks wait for one another, so a rank must not start
# more of them than its device runs at a time. An interpreter likes few programs and large tiles.


def launch_config(dtype):
    if triton_dist.backend == "cpu":
        return dict(BLOCK_M=512, BLOCK_N=512, BLOCK_K=1024), 2
    if triton_dist.backend == "nvidia":
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64 if dtype.itemsize == 2 else 32, num_warps=8), programs
    return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64), 20


def tiles_of_a_shard(M, N, world, config):
    return triton.cdiv(triton.cdiv(M, world), config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])


class GemmReduceScatter:
    """What the kernel needs besides A and B: allocated once, used for any number of calls."""

    def __init__(self, M, N, dtype, device_id):
        self.config, self.programs = launch_config(dtype)
        self.M, self.N = M, N
        self.calls = 0  # earlier calls: the signals count on
        world = shmem.pe_count()
        self.rows = len(range(M)[shard_of(shmem.my_pe(), M, world)])
        # `create_tensor` is collective: all ranks ask for the same, in the same order.
        slots = tiles_of_a_shard(M, N, world, self.config)
        staging = (world, slots, self.config["BLOCK_M"], self.config["BLOCK_N"])
        self.staging = shmem.aclshmem_create_tensor(staging, torch.float32, device_id)
        self.ready = shmem.create_signals(world * self.programs)
        self.done = shmem.create_signals(world * self.programs)
        self.ctx = shmem.context()

    def __call__(self, a, b):
        c = torch.empty(self.rows, self.N, dtype=a.dtype, device=a.device)
        K = a.shape[1]
        gemm_reduce_scatter_kernel[(self.programs,)](
            a, b, c, self.staging, self.ready, self.done, self.M, self.N, K, self.calls, self.ctx,
            **self.config, EVEN_K=K % self.config["BLOCK_K"] == 0,
        )  # fmt: skip
        self.calls += 1
        return c

    def free(self):
        for tensor in (self.staging, self.ready, self.done):
            shmem.aclshmem_free_tensor(tensor)


def shard_of(rank, size, world):
    """The indices of 0 .. size - 1 that belong to a rank."""
    shard = triton.cdiv(size, world)
    return slice(min(rank * shard, size), min((rank + 1) * shard, size))


# %%
# Is it right?
# ------------
#
# The reference multiplies in fp32, adds over all ranks in fp32 and rounds once to the dtype; the kernel does, too. So the
# two differ by the order of fp32 additions, which may push a value over a rounding boundary: one unit in the last place.
# That is 2^-10 of the value for fp16 (less than 1e-3), 2^-7 for bf16. In fp32 itself, sums of K terms in another order
# differ by a small multiple of sqrt(K) * 2^-24 of the size of the sum, which is about sqrt(K) for these inputs: a small
# multiple of K * 2^-24, 2.4e-4 for K = 4096; where that exceeds the absolute tolerance below, it takes its place.

TOLERANCE = {torch.float16: ("1e-3", "1e-3"), torch.bfloat16: ("8e-3", "8e-3"), torch.float32: ("1e-3", "1e-3")}


def golden(a, b):
    total = torch.matmul(a.float(), b.float())
    dist.all_reduce(total)
    return total[shard_of(dist.get_rank(), a.shape[0], dist.get_world_size())].to(a.dtype)


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
    parser = argparse.ArgumentParser(description="Fused GEMM-ReduceScatter; start it with torchrun.")
    for size, text in (("M", "rows of the sum"), ("N", "columns"), ("K", "inner size, split over the ranks")):
        parser.add_argument(f"--{size}", type=int, default=4096, help=f"{text} (default 4096)")
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
    M, N = args.M, args.N

    # The process group serves the reference and the final exchange. `shmem` meets through it, too.
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(shmem.process_group_backend())
    rank, world = dist.get_rank(), dist.get_world_size()

    shmem.set_conf_store_tls(False, "")
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.ip_port = rank, world, G_IP_PORT
    config, _ = launch_config(dtype)
    tile_bytes = 4 * config["BLOCK_M"] * config["BLOCK_N"]
    attr.local_mem_size = world * tiles_of_a_shard(M, N, world, config) * tile_bytes + (64 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"[FAIL] Rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    say(f"[INFO] Rank {rank} of {world} initialized")

    device = shmem.device()
    torch.manual_seed(args.seed * world + rank)
    K = len(range(args.K)[shard_of(rank, args.K, world)])  # this rank's part; the last ranks may have less, or nothing
    a = torch.randn(M, K).to(dtype).to(device)
    b = torch.randn(K, N).to(dtype).to(device)

    operator = GemmReduceScatter(M, N, dtype, local_rank)
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
        plain = seconds(lambda: golden(a, b), args.iters)
        say(f"[TIME] Rank {rank}: kernel {ours:.4g} s, fp32 matmul and all-reduce by torch {plain:.4g} s")

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
