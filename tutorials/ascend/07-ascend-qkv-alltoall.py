"""
QKV all-to-all for attention
============================

A long sequence is spread over W ranks: each has S tokens. It computes Q, K and V of its tokens, for all heads. Attention,
however, looks at all tokens at once, one head at a time. So before attention the ranks exchange: from some tokens, all heads
to all tokens, some heads.

    q (S, Hq, D)  ->  (S * W, Hq / W, D)      Q at rank d [s * S + t, h, e]  =  q at rank s [t, d * Hq / W + h, e]
    k (S, Hkv, D) ->  (S * W, Hkv / W, D)     and v likewise

Three exchanges of the kind of tutorial 08. Three calls would cost three launches and three trips. But what a rank needs from a
peer for a token is all of it, the query, key and value heads, and it goes the same way at the same time. This kernel sends the
three side by side in one row and announces them with one signal.

*Grouped queries.* Many models have fewer key heads than query heads: query head h uses key head h // (Hq / Hkv). As
long as Hkv is a multiple of W nothing changes. When Hkv is less than W, a key head has query heads on several ranks, and
each of these needs it: it is replicated, W / Hkv times. Rank d then gets key head d // (W / Hkv). With the default
--Hq 8 --Hkv 2, try 2 ranks (one key head each) and 4 ranks (two ranks share one).

    torchrun --nproc-per-node=2 tutorials/ascend/07-ascend-qkv-alltoall.py

It runs on NPUs, on NVIDIA GPUs, and on any machine at all through Triton's interpreter; `import triton_dist` picks.
Options: --S (per rank), --Hq --Hkv (in all) --D, --dtype, --seed, --warmup and --iters (with --iters 1 or more it also prints
times).
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
# The tokens are cut into *chunks* of CHUNK; round r is about chunk r of every rank (the last one may be shorter). In the
# symmetric heap lies a staging buffer for two rounds. A row of it is a token: its heads for this rank, of q, of k, of v:
#
#     staging[2][W][CHUNK][ q q q q | k | v ]      the slot [r % 2][s] holds chunk r from rank s
#
# and two arrays of signals, one for each buffer and rank:
#
#     ready[buffer][s]   lives at the reader.  "Rank s has put its chunk, all three parts."    added to by rank s
#     done[buffer][d]    lives at the writer.  "Rank d has taken your chunk out."              added to by rank d
#
# All programs do the same: put their share of chunk r + 1 for every peer, then take their share of chunk r of every rank out.
# Each adds one for each of these, so after a buffer's n-th use a signal stands at n * programs. Nobody ever resets it.
#
# Why is no slot overwritten early? It is written in round r only when `done` says that all programs of its reader have
# taken round r - 2 out of it. Why is one signal for each buffer needed? A program that is a round ahead would otherwise pay for
# one that is behind. Why does nobody wait for ever? What a program waits for before its put of round r + 1 is at most round
# r - 1 of its peers, and what it waits for after it is their put of round r, which they do before they wait for ours.
#
# Why one signal for three parts? A signal is a release: it comes after *all* stores of its program. Three signals would cost
# three trips and say no more.


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
def copy_parts(
    q_out_ptr, k_out_ptr, v_out_ptr, to, q, k, v, rows, q_cols, kv_cols, q_step, kv_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The three parts of `rows` tokens to rows `to`, `to` + 1, ... of the three results; this program's share."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    copy_tokens(q_out_ptr + to * q_cols, q, rows, q_cols, q_cols, q_step, pid, programs, BLOCK_M, BLOCK_N)
    copy_tokens(k_out_ptr + to * kv_cols, k, rows, kv_cols, kv_cols, kv_step, pid, programs, BLOCK_M, BLOCK_N)
    copy_tokens(v_out_ptr + to * kv_cols, v, rows, kv_cols, kv_cols, kv_step, pid, programs, BLOCK_M, BLOCK_N)


@triton.jit
def put_chunk(
    q_ptr, k_ptr, v_ptr, staging_ptr, ready_ptr, done_ptr, S, q_cols, kv_cols, q_stride, kv_stride, copies,
    r, first_round, ctx, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """This program's share of chunk r to every peer. q_cols and kv_cols: elements of a token's heads for one rank."""
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.minimum(CHUNK, S - r * CHUNK)
    first = tl.cast(r * CHUNK, tl.int64)
    buffer = (first_round + r) % 2
    uses = (first_round + r) // 2  # of this buffer, before this one
    slot = buffer * world + me
    row = q_cols + 2 * kv_cols
    for i in range(1, world):
        # The peer that takes our chunk out first is served first: it is the one whose next neighbour we are.
        peer = (me + world - i) % world
        token = dl.wait(dl.signal_at(done_ptr, buffer * world + peer), uses * programs, ctx)
        free = dl.consume_token(staging_ptr + tl.cast(slot, tl.int64) * CHUNK * row, token)
        # `copies` ranks get the same key heads: 1 unless there are fewer key heads than ranks.
        q = q_ptr + first * q_stride + peer * q_cols
        kv = first * kv_stride + peer // copies * kv_cols
        dl.put_2d(free, q, rows, q_cols, row, q_stride, peer, ctx, pid, programs, BLOCK_M, BLOCK_N)
        dl.put_2d(free + q_cols, k_ptr + kv, rows, kv_cols, row, kv_stride, peer, ctx, pid, programs, BLOCK_M, BLOCK_N)
        dl.put_2d(free + q_cols + kv_cols, v_ptr + kv, rows, kv_cols, row, kv_stride,
                  peer, ctx, pid, programs, BLOCK_M, BLOCK_N)  # fmt: skip
        dl.notify(dl.signal_at(ready_ptr, slot), peer, ctx, 1, "add")


# %%
# The kernel
# ----------


@triton.jit
def qkv_all_to_all_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, staging_ptr, ready_ptr, done_ptr,
    S, q_cols, kv_cols, q_stride, kv_stride, copies, first_round, ctx,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    programs = tl.num_programs(0)
    row = q_cols + 2 * kv_cols

    put_chunk(q_ptr, k_ptr, v_ptr, staging_ptr, ready_ptr, done_ptr, S, q_cols, kv_cols, q_stride, kv_stride, copies,
              0, first_round, ctx, CHUNK, BLOCK_M, BLOCK_N)  # fmt: skip
    r = 0
    while r * CHUNK < S:
        # Round r + 1 starts its way ...
        if (r + 1) * CHUNK < S:
            put_chunk(q_ptr, k_ptr, v_ptr, staging_ptr, ready_ptr, done_ptr, S, q_cols, kv_cols, q_stride, kv_stride, copies,
                      r + 1, first_round, ctx, CHUNK, BLOCK_M, BLOCK_N)  # fmt: skip

        # ... while round r is taken out: the own chunk first, straight from q, k and v, then the peers' as they arrive.
        rows = tl.minimum(CHUNK, S - r * CHUNK)
        first = tl.cast(r * CHUNK, tl.int64)
        buffer = (first_round + r) % 2
        uses = (first_round + r) // 2
        kv = first * kv_stride + me // copies * kv_cols
        copy_parts(q_out_ptr, k_out_ptr, v_out_ptr, tl.cast(me, tl.int64) * S + first,
                   q_ptr + first * q_stride + me * q_cols, k_ptr + kv, v_ptr + kv,
                   rows, q_cols, kv_cols, q_stride, kv_stride, BLOCK_M, BLOCK_N)  # fmt: skip
        for i in range(1, world):
            src = dl.owner_first(i, me, world)
            slot = buffer * world + src
            token = dl.wait(dl.signal_at(ready_ptr, slot), (uses + 1) * programs, ctx)
            q = dl.consume_token(staging_ptr + tl.cast(slot, tl.int64) * CHUNK * row, token)
            copy_parts(q_out_ptr, k_out_ptr, v_out_ptr, tl.cast(src, tl.int64) * S + first,
                       q, q + q_cols, q + q_cols + kv_cols, rows, q_cols, kv_cols, row, row, BLOCK_M, BLOCK_N)  # fmt: skip
            # This program needs the slot no more. `notify` cannot overtake the loads above.
            dl.notify(dl.signal_at(done_ptr, buffer * world + me), src, ctx, 1, "add")
        r += 1


# %%
# Sizes that fit the machine. Programs of different ranks wait for one another, so a rank must not start more of them than its
# device runs at a time. An interpreter likes few programs and large tiles.


def launch_config():
    if triton_dist.backend == "cpu":
        return dict(CHUNK=512, BLOCK_M=512, BLOCK_N=512), 2
    programs = 20
    if triton_dist.backend == "nvidia":
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return dict(CHUNK=448, BLOCK_M=16, BLOCK_N=128), programs


def heads_per_rank(Hq, Hkv, world):
    return Hq // world, max(Hkv // world, 1)


def staging_bytes(Hq, Hkv, D, dtype, world):
    q_heads, kv_heads = heads_per_rank(Hq, Hkv, world)
    return 2 * world * launch_config()[0]["CHUNK"] * (q_heads + 2 * kv_heads) * D * dtype.itemsize


class QkvAllToAll:
    """What the kernel needs besides q, k and v: allocated once, used for any number of calls."""

    def __init__(self, S, Hq, Hkv, D, dtype):
        self.config, self.programs = launch_config()
        self.S, self.D = S, D
        world = shmem.pe_count()
        self.q_heads, self.kv_heads = heads_per_rank(Hq, Hkv, world)
        self.copies = max(world // Hkv, 1)
        self.rounds = triton.cdiv(S, self.config["CHUNK"])
        self.rounds_done = 0  # rounds of all earlier calls: the signals count on
        # `create_tensor` is collective: all ranks ask for the same, in the same order.
        row = (self.q_heads + 2 * self.kv_heads) * D
        self.staging = shmem.aclshmem_create_tensor((2, world, self.config["CHUNK"], row), dtype)
        self.ready = shmem.create_signals(2 * world)
        self.done = shmem.create_signals(2 * world)
        self.ctx = shmem.context()

    def __call__(self, q, k, v):
        tokens = self.S * shmem.pe_count()
        heads = (self.q_heads, self.kv_heads, self.kv_heads)
        outs = [torch.empty(tokens, n, self.D, dtype=q.dtype, device=q.device) for n in heads]
        qkv_all_to_all_kernel[(self.programs,)](
            q, k, v, *outs, self.staging, self.ready, self.done, self.S, self.q_heads * self.D, self.kv_heads * self.D,
            q.stride(0), k.stride(0), self.copies, self.rounds_done, self.ctx, **self.config,
        )  # fmt: skip
        self.rounds_done += self.rounds
        return outs

    def free(self):
        for tensor in (self.staging, self.ready, self.done):
            shmem.aclshmem_free_tensor(tensor)


# %%
# Is it right?
# ------------
#
# Nothing is computed, only moved, so the results must be equal to the last bit: the tolerances are zero. The reference
# gathers everything and keeps the own heads: for each of its query heads the key head that belongs to it, found here by
# the definition h // (Hq / Hkv), not by the rule above.


def golden(q, k, v):
    rank, world = dist.get_rank(), dist.get_world_size()
    Hq, Hkv = q.shape[1], k.shape[1]
    q_heads = list(range(rank * Hq // world, (rank + 1) * Hq // world))
    kv_heads = sorted({h // (Hq // Hkv) for h in q_heads})
    results = []
    for x, heads in ((q, q_heads), (k, kv_heads), (v, kv_heads)):
        gathered = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(world)]
        dist.all_gather(gathered, x.contiguous())
        results.append(torch.cat([shard[:, heads] for shard in gathered]))
    return results


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
    parser = argparse.ArgumentParser(description="QKV all-to-all for attention; start it with torchrun.")
    parser.add_argument("--S", type=int, default=2047, help="tokens of each rank (default 2047)")
    parser.add_argument("--Hq", type=int, default=8, help="query heads in all (default 8)")
    parser.add_argument("--Hkv", type=int, default=2, help="key heads in all (default 2)")
    parser.add_argument("--D", type=int, default=128, help="elements of a head (default 128)")
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="bf16")
    parser.add_argument("--warmup", type=int, default=0, help="calls before the one that is checked")
    parser.add_argument("--iters", type=int, default=0, help="timed calls; 0 (default): print no times")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    S, Hq, Hkv, D = args.S, args.Hq, args.Hkv, args.D
    if min(S, Hq, Hkv, D) < 1 or min(args.warmup, args.iters) < 0:
        parser.error("--S, --Hq, --Hkv and --D must be at least 1, --warmup and --iters at least 0")
    if "LOCAL_RANK" not in os.environ:
        parser.exit(
            2,
            "This tutorial runs one process a rank, started by torchrun:\n"
            f"    torchrun --nproc-per-node=2 {sys.argv[0]}\n",
        )
    world = int(os.environ["WORLD_SIZE"])
    if Hq % world or Hq % Hkv:
        parser.error(f"--Hq is {Hq}: give a multiple of the {world} ranks and of --Hkv {Hkv}")
    if Hkv % world and world % Hkv:
        parser.error(f"--Hkv is {Hkv}: give a multiple or a divisor of the {world} ranks")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]

    # The process group serves the reference and the final exchange. `shmem` meets through it, too.
    dist.init_process_group(shmem.process_group_backend())
    rank = dist.get_rank()

    shmem.set_conf_store_tls(False, "")
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.ip_port = rank, world, G_IP_PORT
    attr.local_mem_size = staging_bytes(Hq, Hkv, D, dtype, world) + (64 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"[FAIL] Rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    say(f"[INFO] Rank {rank} of {world} initialized")

    # A projection makes q, k and v of a token side by side; the kernel takes them as they lie.
    device = shmem.device()
    torch.manual_seed(args.seed * world + rank)
    projected = torch.randn(S, Hq + 2 * Hkv, D).to(dtype).to(device)
    q, k, v = torch.split(projected, [Hq, Hkv, Hkv], dim=1)

    operator = QkvAllToAll(S, Hq, Hkv, D, dtype)
    for _ in range(args.warmup):
        operator(q, k, v)
    results = operator(q, k, v)
    synchronize()

    passed = all([torch.equal(x, y) for x, y in zip(golden(q, k, v), results)])
    if passed:
        say(f"[PASS] Rank {rank}: QKV_golden and QKV match within tolerances (rtol=0, atol=0).")
    else:
        say(f"[FAIL] Rank {rank}: QKV_golden and QKV differ by more than rtol=0, atol=0.")

    if args.iters:
        ours = seconds(lambda: operator(q, k, v), args.iters)
        plain = seconds(lambda: golden(q, k, v), args.iters)
        say(f"[TIME] Rank {rank}: kernel {ours:.4g} s, torch's all_gather and slices {plain:.4g} s")

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
