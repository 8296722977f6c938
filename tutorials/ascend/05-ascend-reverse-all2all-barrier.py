"""
Reverse all-to-all: with a barrier
==================================

The exchange of tutorial 04 once more: X of shape (S * W, H, D), all tokens and this rank's heads, becomes Y of shape
(S, H * W, D), this rank's tokens and all heads, for W ranks:

    Y at rank d  [t, s * H + h, e]  =  X at rank s  [d * S + t, h, e]

There, signals between each pair of ranks said which slot is full and which is free. Here there is one sentence in their place:
"everybody is here", a *barrier* over all programs of all ranks, once a round. The kernel becomes half as long. What it costs
is at the end of the picture below.

    torchrun --nproc-per-node=2 tutorials/ascend/05-ascend-reverse-all2all-barrier.py

It runs on NPUs, on NVIDIA GPUs, and on any machine at all through Triton's interpreter; `import triton_dist` picks.
Options: --S --H --D (per rank), --dtype, --seed, --warmup and --iters (with --iters 1 or more it also prints times).
"""

import argparse
import os
import sys
import time

import triton_dist  # before `triton`: on a machine without an accelerator it switches Triton's interpreter on
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
# As in tutorial 04, the S tokens for each peer are cut into chunks of CHUNK tokens (the last one may be shorter), round r is
# about chunk r, and peers put it into a staging buffer in the symmetric heap:
#
#     staging[2][W][CHUNK][H * D]      the slot [r % 2][s] holds chunk r from rank s
#
# All programs do the same:
#
#     put chunk 0 | barrier | put chunk 1, take chunk 0 out | barrier | put chunk 2, take chunk 1 out | barrier | ...
#                   ^ chunk 0 of everybody is everywhere      ^ chunk 1 is everywhere, chunk 0 was taken out everywhere
#
# `dl.barrier_grid` lets nobody go on before every program of every rank has come, and what anyone stored before it is
# visible to everyone after it. So after barrier r two things hold, and one barrier serves both:
#
#     - chunk r has arrived, because its puts come before barrier r on every rank;
#     - the buffer of chunk r + 1 is free: chunk r - 1, which lies in it, was taken out before barrier r on every rank.
#
# Two buffers are needed, since chunk r + 1 is put while chunk r is taken out. Two are enough, since a barrier lies between
# any two uses of a buffer. The same holds from call to call if rounds are counted on: the first round of a call must use the
# other buffer than the last round of the call before.
#
# The barrier keeps its own count in its signals (`shmem.create_signals(W + 3)`). The programs of a rank arrive at their
# program 0; these announce themselves to each other; then each opens the gate for its own. So it needs all programs
# running at a time, as every wait does.
#
# Signals or barrier?
#
#                      signals (04)                                 barrier (05)
#     who waits        a pair of ranks, for each other              everybody, for the slowest, in every round
#     drift            a rank may be NUM_BUFFERS rounds ahead       less than one round
#     messages         a rank and round: programs x 2 (W - 1)       a rank and round: W, and programs on the spot
#     latency          one way: data, then its signal               data, programs to program 0, one way, gate
#     the argument     a slot at a time, signal by signal           one sentence
#
# When all ranks are equally fast and chunks are large, the two are close. The more the ranks differ in speed, the more
# rounds there are, and the shorter a round is, the more the barrier costs: each round lasts as long as its slowest rank,
# while with signals a rank that is late in one round and early in the next costs nothing. --iters 5 shows it on your
# machine; begin with a barrier, and go to signals when they pay.


@triton.jit
def copy_tokens(
    dst_ptr, src_ptr, rows, cols, dst_stride, src_stride, worker, workers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dst[:rows, :cols] = src[:rows, :cols] in this rank's memory; tiles worker, worker + workers, ... Ordinary Triton."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    tile = worker
    while tile < tl.cdiv(rows, BLOCK_M) * tiles_n:
        m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        inside = (m < rows) & (n < cols)
        values = tl.load(src_ptr + m.to(tl.int64) * src_stride + n, mask=inside)
        tl.store(dst_ptr + m.to(tl.int64) * dst_stride + n, values, mask=inside)
        tile += workers


@triton.jit
def put_chunk(x_ptr, staging_ptr, S, cols, r, first_round, ctx, CHUNK: tl.constexpr):
    """This program's share of chunk r for every peer."""
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    rows = tl.minimum(CHUNK, S - r * CHUNK)
    slot = (first_round + r) % 2 * world + me
    dst = staging_ptr + tl.cast(slot, tl.int64) * CHUNK * cols
    for i in range(1, world):
        peer = dl.owner_first(i, me, world)  # in step i every rank serves another peer
        src = x_ptr + (tl.cast(peer, tl.int64) * S + r * CHUNK) * cols
        dl.put(dst, src, tl.cast(rows, tl.int64) * cols, peer, ctx, tl.program_id(0), tl.num_programs(0))


@triton.jit
def take_chunk(
    x_ptr, y_ptr, staging_ptr, S, cols, r, first_round, ctx,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """This program's share of chunk r of every rank to its columns of Y."""
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    rows = tl.minimum(CHUNK, S - r * CHUNK)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    y_rows = y_ptr + tl.cast(r * CHUNK, tl.int64) * world * cols
    own = x_ptr + (tl.cast(me, tl.int64) * S + r * CHUNK) * cols  # it never left X
    copy_tokens(y_rows + me * cols, own, rows, cols, world * cols, cols, pid, programs, BLOCK_M, BLOCK_N)
    for i in range(1, world):
        src = dl.owner_first(i, me, world)
        slot = (first_round + r) % 2 * world + src
        chunk = staging_ptr + tl.cast(slot, tl.int64) * CHUNK * cols
        copy_tokens(y_rows + src * cols, chunk, rows, cols, world * cols, cols, pid, programs, BLOCK_M, BLOCK_N)


# %%
# The kernel
# ----------
#
# After each barrier the next chunk starts its way, and while it travels the present one is taken out.


@triton.jit
def reverse_all_to_all_barrier_kernel(
    x_ptr, y_ptr, staging_ptr, barrier_ptr, S, cols, first_round, ctx,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    put_chunk(x_ptr, staging_ptr, S, cols, 0, first_round, ctx, CHUNK)
    r = 0
    while r * CHUNK < S:
        dl.barrier_grid(barrier_ptr, ctx)
        if (r + 1) * CHUNK < S:
            put_chunk(x_ptr, staging_ptr, S, cols, r + 1, first_round, ctx, CHUNK)
        take_chunk(x_ptr, y_ptr, staging_ptr, S, cols, r, first_round, ctx, CHUNK, BLOCK_M, BLOCK_N)
        r += 1


# %%
# Sizes that fit the machine. No more programs than the device runs at a time: the barrier waits for all of them. An
# interpreter likes few programs and large tiles.


def launch_config():
    if triton_dist.backend == "cpu":
        return dict(CHUNK=512, BLOCK_M=512, BLOCK_N=1024), 2
    programs = 20
    if triton_dist.backend == "nvidia":
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return dict(CHUNK=512, BLOCK_M=64, BLOCK_N=128), programs


def staging_bytes(S, H, D, dtype, world):
    return 2 * world * launch_config()[0]["CHUNK"] * H * D * dtype.itemsize


class ReverseAllToAllBarrier:
    """What the kernel needs besides X: allocated once, used for any number of calls."""

    def __init__(self, S, H, D, dtype):
        self.config, self.programs = launch_config()
        self.S, self.H, self.D = S, H, D
        self.rounds = triton.cdiv(S, self.config["CHUNK"])
        self.rounds_done = 0  # rounds of all earlier calls: the buffers go on taking turns
        world = shmem.pe_count()
        # `create_tensor` is collective: all ranks ask for the same, in the same order.
        self.staging = shmem.aclshmem_create_tensor((2, world, self.config["CHUNK"], H * D), dtype)
        self.barrier = shmem.create_signals(world + 3)
        self.ctx = shmem.context()

    def __call__(self, x):
        y = torch.empty(self.S, self.H * shmem.pe_count(), self.D, dtype=x.dtype, device=x.device)
        reverse_all_to_all_barrier_kernel[(self.programs,)](
            x, y, self.staging, self.barrier, self.S, self.H * self.D, self.rounds_done, self.ctx, **self.config
        )
        self.rounds_done += self.rounds
        return y

    def free(self):
        for tensor in (self.staging, self.barrier):
            shmem.aclshmem_free_tensor(tensor)


# %%
# Is it right?
# ------------
#
# Nothing is computed, only moved, so the result must be equal to the last bit: the tolerances are zero. The reference is
# torch's all-to-all, which exchanges contiguous pieces: piece d of X (rows d * S .. d * S + S - 1) goes to rank d. What
# arrives is [source rank, token, head], and a permutation makes [token, source rank, head] of it. That permutation is
# what the kernel saves: a pass over the whole result that can only begin when everything is there.


def golden(x, S, H, D):
    world = dist.get_world_size()
    theirs = torch.empty_like(x)
    dist.all_to_all_single(theirs, x)
    return theirs.view(world, S, H, D).permute(1, 0, 2, 3).reshape(S, world * H, D)


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
    parser = argparse.ArgumentParser(description="Reverse all-to-all with a barrier; start it with torchrun.")
    parser.add_argument("--S", type=int, default=2047, help="tokens of each rank (default 2047)")
    parser.add_argument("--H", type=int, default=8, help="heads of each rank (default 8)")
    parser.add_argument("--D", type=int, default=128, help="elements of a head (default 128)")
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="bf16")
    parser.add_argument("--warmup", type=int, default=0, help="calls before the one that is checked")
    parser.add_argument("--iters", type=int, default=0, help="timed calls; 0 (default): print no times")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.S, args.H, args.D) < 1 or min(args.warmup, args.iters) < 0:
        parser.error("--S, --H and --D must be at least 1, --warmup and --iters at least 0")
    if "LOCAL_RANK" not in os.environ:
        parser.exit(
            2,
            "This tutorial runs one process a rank, started by torchrun:\n"
            f"    torchrun --nproc-per-node=2 {sys.argv[0]}\n",
        )
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    S, H, D = args.S, args.H, args.D

    # The process group serves the reference and the final exchange. `shmem` meets through it, too.
    dist.init_process_group(shmem.process_group_backend())
    rank, world = dist.get_rank(), dist.get_world_size()

    shmem.set_conf_store_tls(False, "")
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.ip_port = rank, world, G_IP_PORT
    attr.local_mem_size = staging_bytes(S, H, D, dtype, world) + (64 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"[FAIL] Rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    say(f"[INFO] Rank {rank} of {world} initialized")

    device = shmem.device()
    torch.manual_seed(args.seed * world + rank)
    x = torch.randn(S * world, H, D).to(dtype).to(device)

    operator = ReverseAllToAllBarrier(S, H, D, dtype)
    for _ in range(args.warmup):
        operator(x)
    y = operator(x)
    synchronize()

    passed = torch.equal(golden(x, S, H, D), y)
    if passed:
        say(f"[PASS] Rank {rank}: Y_golden and Y match within tolerances (rtol=0, atol=0).")
    else:
        say(f"[FAIL] Rank {rank}: Y_golden and Y differ by more than rtol=0, atol=0.")

    if args.iters:
        ours = seconds(lambda: operator(x), args.iters)
        plain = seconds(lambda: golden(x, S, H, D), args.iters)
        say(f"[TIME] Rank {rank}: kernel {ours:.4g} s, torch's all_to_all_single and permutation {plain:.4g} s")

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
