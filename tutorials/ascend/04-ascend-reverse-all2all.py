"""
Reverse all-to-all: producers and consumers
===========================================

After attention every rank holds all tokens, but only its own heads: X of shape (S * W, H, D), for W ranks. What comes next
wants the opposite: S tokens, all heads. So every rank sends to each rank d the tokens that d shall have, and receives for
its own tokens the heads of everybody:

    Y at rank d  [t, s * H + h, e]  =  X at rank s  [d * S + t, h, e]            Y has shape (S, H * W, D)

Seen in memory: a rank's message for d is one contiguous piece of X, but at d its rows of H * D elements must be spread:
row t of rank s goes to column s * H * D of row t. The pieces that arrive therefore first land in a staging buffer.

This tutorial splits the programs of a kernel in two groups that work at the same time: *producers* put chunks of
X into the peers' staging buffers, *consumers* take what arrives out of ours. Signals between them say when. Tutorial 05 does
the same exchange with a barrier in place of the signals, and compares.

    torchrun --nproc-per-node=2 tutorials/ascend/04-ascend-reverse-all2all.py

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
# The S tokens that a rank has for each peer are cut into *chunks* of CHUNK tokens; round r is about chunk r of every pair of
# ranks. S need not be a multiple of CHUNK: the last chunk is shorter. The staging buffer in the symmetric heap holds
# two rounds:
#
#     staging[NUM_BUFFERS][W][CHUNK][H * D]      the slot [r % NUM_BUFFERS][s] holds chunk r from rank s
#
# Signals, one for each buffer and rank, an integer with 64 bytes to itself:
#
#     ready[buffer][s]   lives at the consumer.  "Rank s has put its chunk into your slot."     added to by s's producers
#     done[buffer][d]    lives at the producer.  "Rank d has taken your chunk out of the slot."  added to by d's consumers
#
# Every producer adds one to `ready` when its share of a chunk is put, every consumer adds one to `done` when its share is
# taken out. Nobody ever resets a signal: after a buffer's n-th use `ready` stands at n * PRODUCERS and `done` at
# n * CONSUMERS. Between the two groups of one rank there is no signal at all: they only meet through the peers.
#
#     rank 0   producers   chunk 0 -> 1   chunk 1 -> 1   .......wait for done...  chunk 2 -> 1   ...
#              consumers   own chunk 0   wait for ready, chunk 0 of 1   own chunk 1   chunk 1 of 1   ...
#
# Why is no slot overwritten early? A producer writes chunk r into a slot only when `done` says that *all* consumers of that
# rank have taken chunk r - NUM_BUFFERS out of it. Why does a signal serve one buffer only? Programs drift apart: a consumer
# that is a round ahead would pay for one that is behind, and the sum would be reached too early. For one buffer it
# cannot happen: no consumer can add for the next use before that use is ready, and it is not ready before all consumers
# have added for this one.
#
# And why does nobody wait for ever? Look at the lowest round in which somebody waits. Consumers wait there for producers
# of the same round, and producers for consumers of an earlier round, which is over. So somebody can go on, provided that
# all programs of all ranks are running: the grid must not be larger than what the device runs at a time.


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
def produce(
    x_ptr, staging_ptr, ready_ptr, done_ptr, S, cols, first_round, ctx, producer,
    PRODUCERS: tl.constexpr, CONSUMERS: tl.constexpr, CHUNK: tl.constexpr, NUM_BUFFERS: tl.constexpr,
):  # fmt: skip
    """All chunks for all peers; of each chunk this producer's share."""
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    r = 0
    while r * CHUNK < S:
        rows = tl.minimum(CHUNK, S - r * CHUNK)
        buffer = (first_round + r) % NUM_BUFFERS
        uses = (first_round + r) // NUM_BUFFERS  # of this buffer, before this one
        slot = buffer * world + me
        for i in range(1, world):
            # In step i every rank serves another peer, so nobody is the target of all. First comes the one that
            # takes our chunk out first: the one whose next neighbour we are.
            peer = (me + world - i) % world
            token = dl.wait(dl.signal_at(done_ptr, buffer * world + peer), uses * CONSUMERS, ctx)
            # The wait was for the slot at the peer: consume_token says so. It costs nothing.
            dst = dl.consume_token(staging_ptr + tl.cast(slot, tl.int64) * CHUNK * cols, token)
            src = x_ptr + (tl.cast(peer, tl.int64) * S + r * CHUNK) * cols
            # Put, then add one to the peer's signal. The signal is a release: it cannot overtake the data.
            sig = dl.signal_at(ready_ptr, slot)
            dl.put_signal(dst, src, tl.cast(rows, tl.int64) * cols, sig, peer, ctx, 1, "add", producer, PRODUCERS)
        r += 1


@triton.jit
def consume(
    x_ptr, y_ptr, staging_ptr, ready_ptr, done_ptr, S, cols, first_round, ctx, consumer,
    PRODUCERS: tl.constexpr, CONSUMERS: tl.constexpr, CHUNK: tl.constexpr, NUM_BUFFERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All chunks from all ranks to their columns of Y; of each chunk this consumer's share."""
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    y_stride = world * cols
    r = 0
    while r * CHUNK < S:
        rows = tl.minimum(CHUNK, S - r * CHUNK)
        buffer = (first_round + r) % NUM_BUFFERS
        uses = (first_round + r) // NUM_BUFFERS
        y_rows = y_ptr + tl.cast(r * CHUNK, tl.int64) * y_stride
        # The own chunk comes first and straight from X: no wait, while the peers' are on their way.
        own = x_ptr + (tl.cast(me, tl.int64) * S + r * CHUNK) * cols
        copy_tokens(y_rows + me * cols, own, rows, cols, y_stride, cols, consumer, CONSUMERS, BLOCK_M, BLOCK_N)
        for i in range(1, world):
            src = dl.owner_first(i, me, world)
            slot = buffer * world + src
            token = dl.wait(dl.signal_at(ready_ptr, slot), (uses + 1) * PRODUCERS, ctx)
            chunk = dl.consume_token(staging_ptr + tl.cast(slot, tl.int64) * CHUNK * cols, token)
            copy_tokens(y_rows + src * cols, chunk, rows, cols, y_stride, cols, consumer, CONSUMERS, BLOCK_M, BLOCK_N)
            # Rank s may write this slot again, as far as this consumer is concerned. `notify` is a release for loads as
            # well: it cannot overtake the copy above.
            dl.notify(dl.signal_at(done_ptr, buffer * world + me), src, ctx, 1, "add")
        r += 1


# %%
# The kernel
# ----------
#
# One launch, two roles. Which program plays which is settled by its number.


@triton.jit
def reverse_all_to_all_kernel(
    x_ptr, y_ptr, staging_ptr, ready_ptr, done_ptr, S, cols, first_round, ctx,
    PRODUCERS: tl.constexpr, CONSUMERS: tl.constexpr, CHUNK: tl.constexpr, NUM_BUFFERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < PRODUCERS:
        produce(x_ptr, staging_ptr, ready_ptr, done_ptr, S, cols, first_round, ctx, pid,
                PRODUCERS, CONSUMERS, CHUNK, NUM_BUFFERS)  # fmt: skip
    else:
        consume(x_ptr, y_ptr, staging_ptr, ready_ptr, done_ptr, S, cols, first_round, ctx, pid - PRODUCERS,
                PRODUCERS, CONSUMERS, CHUNK, NUM_BUFFERS, BLOCK_M, BLOCK_N)  # fmt: skip


# %%
# Sizes that fit the machine. Producers are bound by the link and consumers by memory; half and half is a fair start. An
# interpreter likes few programs and large tiles.


def launch_config():
    if triton_dist.backend == "cpu":
        return dict(PRODUCERS=1, CONSUMERS=1, CHUNK=512, NUM_BUFFERS=2, BLOCK_M=512, BLOCK_N=1024)
    half = 10
    if triton_dist.backend == "nvidia":
        half = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // 2
    return dict(PRODUCERS=half, CONSUMERS=half, CHUNK=512, NUM_BUFFERS=2, BLOCK_M=64, BLOCK_N=128)


def staging_bytes(S, H, D, dtype, world):
    config = launch_config()
    return config["NUM_BUFFERS"] * world * config["CHUNK"] * H * D * dtype.itemsize


class ReverseAllToAll:
    """What the kernel needs besides X: allocated once, used for any number of calls."""

    def __init__(self, S, H, D, dtype):
        self.config = launch_config()
        self.S, self.H, self.D = S, H, D
        self.rounds = triton.cdiv(S, self.config["CHUNK"])
        self.rounds_done = 0  # rounds of all earlier calls: the signals count on
        world, buffers = shmem.pe_count(), self.config["NUM_BUFFERS"]
        # `create_tensor` is collective: all ranks ask for the same, in the same order.
        self.staging = shmem.aclshmem_create_tensor((buffers, world, self.config["CHUNK"], H * D), dtype)
        self.ready = shmem.create_signals(buffers * world)
        self.done = shmem.create_signals(buffers * world)
        self.ctx = shmem.context()

    def __call__(self, x):
        y = torch.empty(self.S, self.H * shmem.pe_count(), self.D, dtype=x.dtype, device=x.device)
        reverse_all_to_all_kernel[(self.config["PRODUCERS"] + self.config["CONSUMERS"],)](
            x, y, self.staging, self.ready, self.done, self.S, self.H * self.D, self.rounds_done, self.ctx, **self.config
        )
        self.rounds_done += self.rounds
        return y

    def free(self):
        for tensor in (self.staging, self.ready, self.done):
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
    parser = argparse.ArgumentParser(description="Reverse all-to-all by producers and consumers; start it with torchrun.")
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

    operator = ReverseAllToAll(S, H, D, dtype)
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
