"""
Transpose all-to-all: a slot for every block
============================================

Before attention every rank holds S tokens with all heads: X of shape (S, H * W, D), for W ranks. Attention wants all
tokens of a few heads. So rank s sends to each rank d the H heads that d shall have, and every rank gets the tokens of
everybody, in rank order:

    Y at rank d  [s * S + t, h, e]  =  X at rank s  [t, d * H + h, e]            Y has shape (S * W, H, D)

It undoes the exchange of tutorials 04 and 05. In memory it is the other way round, too: what a rank sends to d is spread over
X, H * D elements of each row of H * W * D; what arrives is one contiguous piece of Y.

Those tutorials had two buffers that were used many times in a call, and so somebody had to say when a buffer is free.
This one has a slot for every block of the whole exchange. A slot is used once in a call, every block has a signal of its own,
and nothing is ever acknowledged. It takes more memory, and the least waiting there can be: a block is taken out as soon as it
is there, whatever the others do.

    torchrun --nproc-per-node=2 tutorials/ascend/08-ascend-transpose-all2all.py

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
# A *block* is one head of BLOCK_S tokens: BLOCK_S x D elements (the last block along the tokens may have fewer). What
# one rank has for another are cdiv(S, BLOCK_S) * H blocks. In the symmetric heap:
#
#     staging[2][W][blocks][BLOCK_S][D]      the slot [call % 2][s][b] holds block b from rank s
#     arrived[W][blocks]                     signals: "block b from rank s is there", set by rank s to the call's number
#
# The blocks are dealt out over the programs. One program puts a block and sets its signal; one program at the other end
# waits for the signal and takes the block out. Since a signal has one writer only, it is *set*, not added to; and since it is
# set to the number of the call, 1, 2, 3, ..., a value left from the last call is less than what this call waits for.
#
# Why are two copies of the slots enough, one for even and one for odd calls, with no word from the reader? A rank in call c
# overwrites what it had put in call c - 2. When it begins call c, its call c - 1 is complete. So it has seen a block of call
# c - 1 from every peer. A peer sends that from its own call c - 1, which it began when its call c - 2 was complete; and then
# it had taken all blocks of call c - 2 out. The argument is about two ranks at a time, so it holds for any number of ranks.
# It needs every pair of ranks to exchange at least one block in every call. One copy would not be enough: a
# peer that has sent its blocks of call c - 1 may not yet have taken ours out.
#
# And why does nobody wait for ever? A program first puts all its blocks, which waits for nothing. Only then it waits.
#
#     program p of rank 0    put its blocks for 1, 2, ..   | own blocks, X to Y | wait for block, take it out | wait ..
#     program p of rank 1    put its blocks for 2, 3, ..   | own blocks, X to Y | wait for block, take it out | wait ..


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
def transpose_all_to_all_kernel(
    x_ptr, y_ptr, staging_ptr, arrived_ptr, S, H, D, call, ctx,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = tl.cdiv(S, BLOCK_S) * H  # between two ranks; block b is head b % H of tokens b // H * BLOCK_S, ...
    x_stride = H * world * D  # from one token to the next
    y_stride = H * D
    half = call % 2 * world  # which half of the slots

    # The own blocks are the last W-th of what a program does here: they are on no link, and nobody waits for them.
    task = pid
    while task < blocks * world:
        peer = dl.owner_first(task // blocks + 1, me, world)  # the next neighbour first, this rank last
        b = task % blocks
        first = b // H * BLOCK_S
        head = b % H
        rows = tl.minimum(BLOCK_S, S - first)
        src = x_ptr + tl.cast(first, tl.int64) * x_stride + (peer * H + head) * D
        if peer != me:
            dst = staging_ptr + (tl.cast(half + me, tl.int64) * blocks + b) * BLOCK_S * D
            dl.put_2d(dst, src, rows, D, D, x_stride, peer, ctx, 0, 1, BLOCK_M, BLOCK_N)
            # A release: the block is there before the signal is.
            dl.notify(dl.signal_at(arrived_ptr, me * blocks + b), peer, ctx, call)
        else:
            dst = y_ptr + (tl.cast(me, tl.int64) * S + first) * y_stride + head * D
            copy_tokens(dst, src, rows, D, y_stride, x_stride, 0, 1, BLOCK_M, BLOCK_N)
        task += programs

    # Take out: the neighbour that serves this rank first comes first.
    task = pid
    while task < blocks * (world - 1):
        src = (me + world - 1 - task // blocks) % world
        b = task % blocks
        first = b // H * BLOCK_S
        rows = tl.minimum(BLOCK_S, S - first)
        token = dl.wait(dl.signal_at(arrived_ptr, src * blocks + b), call, ctx)
        slot = dl.consume_token(staging_ptr + (tl.cast(half + src, tl.int64) * blocks + b) * BLOCK_S * D, token)
        dst = y_ptr + (tl.cast(src, tl.int64) * S + first) * y_stride + b % H * D
        copy_tokens(dst, slot, rows, D, y_stride, D, 0, 1, BLOCK_M, BLOCK_N)
        task += programs


# %%
# Sizes that fit the machine. Programs of different ranks wait for one another, so a rank must not start more of them than its
# device runs at a time. An interpreter likes few programs and large blocks.


def launch_config():
    if triton_dist.backend == "cpu":
        return dict(BLOCK_S=512, BLOCK_M=512, BLOCK_N=128), 2
    programs = 20
    if triton_dist.backend == "nvidia":
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return dict(BLOCK_S=128, BLOCK_M=64, BLOCK_N=128), programs


def block_count(S, H):
    return triton.cdiv(S, launch_config()[0]["BLOCK_S"]) * H


def staging_bytes(S, H, D, dtype, world):
    slots = 2 * world * block_count(S, H)
    return slots * (launch_config()[0]["BLOCK_S"] * D * dtype.itemsize + 64)


class TransposeAllToAll:
    """What the kernel needs besides X: allocated once, used for any number of calls."""

    def __init__(self, S, H, D, dtype):
        self.config, self.programs = launch_config()
        self.S, self.H, self.D = S, H, D
        self.calls = 0
        world, blocks = shmem.pe_count(), block_count(S, H)
        # `create_tensor` is collective: all ranks ask for the same, in the same order.
        self.staging = shmem.aclshmem_create_tensor((2, world, blocks, self.config["BLOCK_S"], D), dtype)
        self.arrived = shmem.create_signals(world * blocks)
        self.ctx = shmem.context()

    def __call__(self, x):
        y = torch.empty(self.S * shmem.pe_count(), self.H, self.D, dtype=x.dtype, device=x.device)
        self.calls += 1
        transpose_all_to_all_kernel[(self.programs,)](
            x, y, self.staging, self.arrived, self.S, self.H, self.D, self.calls, self.ctx, **self.config
        )
        return y

    def free(self):
        for tensor in (self.staging, self.arrived):
            shmem.aclshmem_free_tensor(tensor)


# %%
# Is it right?
# ------------
#
# Nothing is computed, only moved, so the result must be equal to the last bit: the tolerances are zero. The reference is
# torch's all-to-all, which exchanges contiguous pieces. So a permutation first makes [destination rank, token, head] of
# [token, destination rank, head]; what arrives, [source rank, token, head], is Y. That permutation is what the kernel
# saves: a pass over all of X before anything can be sent.


def golden(x, S, H, D):
    world = dist.get_world_size()
    pieces = x.view(S, world, H, D).permute(1, 0, 2, 3).contiguous()
    theirs = torch.empty_like(pieces)
    dist.all_to_all_single(theirs, pieces)
    return theirs.view(S * world, H, D)


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
    parser = argparse.ArgumentParser(description="Transpose all-to-all, a slot for every block; start it with torchrun.")
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
    x = torch.randn(S, H * world, D).to(dtype).to(device)

    operator = TransposeAllToAll(S, H, D, dtype)
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
