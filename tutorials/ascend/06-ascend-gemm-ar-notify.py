"""
GEMM-AllReduce by notify and wait: the pull form
================================================

Every rank r holds A_r (M x K_r) and B_r (K_r x N), and every rank wants all of C = A_0 @ B_0 + A_1 @ B_1 + ..., as in
tutorial 03. There each rank *pushed* its tiles into its peers' memory. Here it leaves them in its own and says so, and the
peers *pull* them, with a `dl.remote_load`.

What is the difference? A push needs a place at the receiver for every sender: world_size slots for every one that a pull
needs, since all peers read the same one. In return, a pull waits for a round trip over the link, where a push is gone as
soon as it is issued. And the signals change their direction: with a pull, it is the *writer* who must learn, from every
reader, when it may write again. That is what this tutorial shows: two signals, `ready` there and `done` back, set with
`notify` and awaited with `wait`, and nothing else.

    torchrun --nproc-per-node=2 tutorials/ascend/06-ascend-gemm-ar-notify.py

Options: --M --N --K (of the whole product; K is split over the ranks, nothing need be divisible), --dtype, --seed,
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
# C is cut into tiles. Program p of a rank computes tiles p, p + programs, p + 2 * programs, ... of the rank's partial
# product. It is the same on every rank: so program p has to do with the programs p of the other ranks alone. In each rank's
# symmetric heap every program has two slots, in which it leaves its tiles in turn, in fp32 (so that the sum is rounded
# once, though C is fp16):
#
#     slots[programs][SLOTS][BLOCK_M][BLOCK_N]      written by program p of this rank, read by program p of every rank
#
# There are two kinds of signals, each an integer with 64 bytes to itself:
#
#     ready[s][p]   lives at every reader.  "Program p of rank s has so many tiles for you to pull."
#     done[d][p]    lives at the writer.    "Program p of rank d has pulled so many of your tiles."
#
# A program counts its tiles from the very first call on and never starts anew; tile i lies in slot i % SLOTS. Each signal
# has one program that sets it, to a count that only grows. So no value that an earlier call left behind can be taken for a
# later one's: there is nothing to reset, and no barrier between calls.
#
# What a program does, in the order of time:
#
#     compute 0 | store 0, ready | compute 1 | store 1, ready | pull 0, done | compute 2 | store 2, ready | pull 1, done | ...
#
# "Pull i" waits for `ready` of every rank, and comes one tile late: while a slower peer still computes its tile i, this
# rank computes its tile i + 1.
#
# Why is no slot overwritten early? Before a program stores tile i, it waits until `done` says that *every* peer has pulled
# tile i - SLOTS, the one that lies there.
#
# And why does nobody wait for ever? Look at the list above. "Store i" waits for the peers' "pull i - 2", "pull i" for their
# "store i": what is waited for always stands further left, so the rank that is furthest behind never waits. (With one slot
# "store i" would wait for "pull i - 1", which stands further right: everybody would hang.)

SLOTS = tl.constexpr(2)




@triton.jit
def partial_product(
    a_ptr, b_ptr, row, col, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """This rank's contribution to one tile of C, in fp32 registers. Ordinary Triton."""
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None].to(tl.int64) * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_k[:, None].to(tl.int64) * N + offs_n[None, :]
    a_mask = offs_m[:, None] < M
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
# One turn a tile: compute it, leave it in the slot and say so; then pull the tile of the turn before from every rank. One
# more turn at the end pulls the last.


@triton.jit
def gemm_allreduce_kernel(
    a_ptr, b_ptr, c_ptr, slots_ptr, ready_ptr, done_ptr, M, N, K, calls, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    # In its slot a tile lies without gaps, BLOCK_M x BLOCK_N, whatever N is: no masks, and wide loads over the link.
    in_slot = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    slots = slots_ptr + tl.cast(pid * SLOTS, tl.int64) * BLOCK_M * BLOCK_N

    i = calls * tl.cdiv(tl.maximum(tiles - pid, 0), programs)  # this program's tiles in all earlier calls
    tile = pid
    while tile < tiles + programs:
        if tile < tiles:
            row = (tile // tiles_n) * BLOCK_M
            col = (tile % tiles_n) * BLOCK_N
            acc = partial_product(a_ptr, b_ptr, row, col, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
            # All peers have pulled what lies in the slot ...
            slot = slots + (i % SLOTS) * (BLOCK_M * BLOCK_N)
            for step in range(1, world):
                reader = dl.owner_first(step, me, world)
                token = dl.wait(dl.signal_at(done_ptr, reader * programs + pid), i - SLOTS + 1, ctx)
                slot = dl.consume_token(slot, token)
            # ... so the new tile may go there. `notify_all` is a release: whoever sees the count finds the tile. (On an NPU
            # the matrix cores work apart from the cores that notify; `fence_dot` makes these wait for those.)
            tl.store(slot + in_slot, acc)
            dl.fence_dot(ctx)
            dl.notify_all(dl.signal_at(ready_ptr, me * programs + pid), ctx, i + 1)

        if tile >= programs:
            # The tile before, number i - 1, from every rank, this one included. In the order of ranks, not of arrival: so
            # all ranks get the same bits, and every run does.
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for source in range(0, world):
                token = dl.wait(dl.signal_at(ready_ptr, source * programs + pid), i, ctx)
                there = dl.consume_token(slots + ((i - 1) % SLOTS) * (BLOCK_M * BLOCK_N), token)
                total += dl.remote_load(there + in_slot, source, ctx)
            # A notify orders the loads before it, too: a peer that sees this count may write the slot.
            for step in range(1, world):
                dl.notify(dl.signal_at(done_ptr, me * programs + pid), dl.owner_first(step, me, world), ctx, i)
            offs_m = ((tile - programs) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
            offs_n = ((tile - programs) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
            c_ptrs = c_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
            tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=inside)
        tile += programs
        i += 1


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


class GemmAllReduce:
    """What the kernel needs besides A and B: allocated once, used for any number of calls."""

    def __init__(self, M, N, dtype, device_id):
        self.config, self.programs = launch_config(dtype)
        self.M, self.N = M, N
        self.calls = 0  # earlier calls: the tiles and signals count on
        world = shmem.pe_count()
        # `create_tensor` is collective: all ranks ask for the same, in the same order.
        slots = (self.programs, SLOTS.value, self.config["BLOCK_M"], self.config["BLOCK_N"])
        self.slots = shmem.aclshmem_create_tensor(slots, torch.float32, device_id)
        self.ready = shmem.create_signals(world * self.programs)
        self.done = shmem.create_signals(world * self.programs)
        self.ctx = shmem.context()

    def __call__(self, a, b):
        c = torch.empty(self.M, self.N, dtype=a.dtype, device=a.device)
        K = a.shape[1]
        gemm_allreduce_kernel[(self.programs,)](
            a, b, c, self.slots, self.ready, self.done, self.M, self.N, K, self.calls, self.ctx,
            **self.config, EVEN_K=K % self.config["BLOCK_K"] == 0,
        )  # fmt: skip
        self.calls += 1
        return c

    def free(self):
        for tensor in (self.slots, self.ready, self.done):
            shmem.aclshmem_free_tensor(tensor)


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
    return total.to(a.dtype)


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
    parser = argparse.ArgumentParser(description="Fused GEMM-AllReduce by notify and wait; start it with torchrun.")
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
    config, programs = launch_config(dtype)
    tile_bytes = 4 * config["BLOCK_M"] * config["BLOCK_N"]
    attr.local_mem_size = programs * SLOTS.value * tile_bytes + (64 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"[FAIL] Rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    say(f"[INFO] Rank {rank} of {world} initialized")

    device = shmem.device()
    torch.manual_seed(args.seed * world + rank)
    share = triton.cdiv(args.K, world)
    K = max(min(share, args.K - rank * share), 0)  # this rank's part; the last ranks may have less, or nothing
    a = torch.randn(M, K).to(dtype).to(device)
    b = torch.randn(K, N).to(dtype).to(device)

    operator = GemmAllReduce(M, N, dtype, local_rank)
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
