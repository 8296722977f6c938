"""
MoE combine: the experts' answers back to their tokens
======================================================

In a mixture of experts the tokens have travelled to the ranks of their experts (tutorial 09), each expert has computed a row
for each of its tokens, and now the rows must go home: a token of rank r wants

    out[t] = sum over its slots j of weights[t, j] * (the row that expert topk_ids[t, j] made of it)

It is the second half of the exchange, and it differs from the first: the sizes are known by now, every row has one
destination, and at the destination something is computed. What you will see: a scatter over ranks in which every line of a tile
goes to a rank of its own, a buffer that is guarded by an acknowledgement, and a sum that has the same bits in every run,
though nobody knows in which order the rows arrive.

    torchrun --nproc-per-node=2 tutorials/ascend/10-ascend-combine-all2all.py

Options: --tokens (per rank) --hidden --topk --experts --drop (share of the choices that are dropped) --dtype --seed, --warmup
and --iters (with --iters 1 or more it also prints times). Here torch.distributed brings the tokens to the experts, so that
the page is about the way back alone.
"""

import argparse
import os
import sys
import time

# %%
# `triton_dist` comes before `triton`: on a machine without an accelerator it switches Triton's interpreter on.
import triton_dist
import triton_dist.language as dl
from triton_dist import shmem

import torch
import torch.distributed as dist
import triton
import triton.language as tl

# Where the ranks meet to set up the heap. Empty: through torch.distributed, so any number of runs can share a host.
G_IP_PORT = os.environ.get("G_IP_PORT", "")


# %%
# Words and places
# ----------------
#
# A *slot* is one entry of topk_ids, -1 where a choice was dropped. y holds this rank's experts' rows, and origin[i] says
# which slot row i answers, as the number (source rank * tokens + token) * topk + slot. In the symmetric heap of every rank
# lies one buffer with a place for the answer to each of its slots:
#
#     returned[tokens][topk][hidden]
#
# So no two rows go to the same place, and nobody needs to ask where there is room. A place whose slot was dropped stays as it
# was, maybe from an earlier call: it must not be read.
#
# Could an expert's rank not weigh and add the rows of a token first, and send one row instead of several? Yes, and it saves
# bytes when experts of one token share a rank; but then the order of the sum depends on the placement of the experts, and the
# rows must travel in fp32 to lose nothing. Here the sum is made where the token lives: by slot, in fp32, rounded once.
#
#
# Signals
# -------
#
#     filled[s]   at the reader.  "A program of rank s has put all its rows into your buffer."     added to by rank s
#     read[d]     at the writer.  "A program of rank d has summed its tokens; its buffer is free." added to by rank d
#
# Calls are numbered 0, 1, 2 ...; nothing is ever reset. In call n a program
#
#     waits for read[every d] >= n * programs          all programs of all ranks are done with call n - 1
#     puts its rows, adds one to filled[me] everywhere
#     waits for filled[every s] >= (n + 1) * programs  all rows of call n are here
#     sums its tokens, adds one to read[me] everywhere
#
# In tutorial 09 nobody acknowledged anything, because a count came from everybody before anything was sent. Here there is
# nothing to ask beforehand, so the reader says when it is done. That costs little: by the time of the next call it has
# long been said.
#
# Could a fast program add to `filled` for call n + 1 while a slow one of the same rank still owes its one for call n? No: call
# n + 1 is another launch, which begins when all programs of the first have ended.


@triton.jit
def combine_kernel(
    y_ptr, weights_ptr, ids_ptr, out_ptr, origin_ptr, returned_ptr, filled_ptr, read_ptr,
    rows, T, H, topk, call, ctx,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    lane, h = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_H)

    # 1. Nobody needs the answers of the last call any more.
    token = dl.wait(read_ptr, call * programs, ctx, "ge", world)
    free = dl.consume_token(returned_ptr, token)

    # 2. Send the rows home. `symm_at` takes a block of pointers and a block of peers: each line of the tile has its own rank.
    start = pid * BLOCK_T
    while start < rows:
        row = start + lane
        valid = row < rows
        came = tl.load(origin_ptr + row, mask=valid, other=0)
        peer = came // (T * topk)
        slot = (came - peer * (T * topk)).to(tl.int64)
        home = dl.symm_at(free + slot * H, peer, ctx)
        y_row = y_ptr + row.to(tl.int64) * H
        for column in range(0, H, BLOCK_H):
            cols = (column + h)[None, :]
            mask = valid[:, None] & (cols < H)
            tl.store(home[:, None] + cols, tl.load(y_row[:, None] + cols, mask=mask), mask=mask)
        start += programs * BLOCK_T
    dl.notify_all(dl.signal_at(filled_ptr, me), ctx, 1, "add")

    # 3. When everybody's rows are here, sum. The loop over the slots fixes the order, whoever came first.
    token = dl.wait(filled_ptr, (call + 1) * programs, ctx, "ge", world)
    returned = dl.consume_token(returned_ptr, token)
    start = pid * BLOCK_T
    while start < T:
        t = (start + lane).to(tl.int64)
        for column in range(0, H, BLOCK_H):
            cols = (column + h)[None, :]
            inside = (t < T)[:, None] & (cols < H)
            acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
            for j in range(0, topk):
                slot = t * topk + j
                kept = tl.load(ids_ptr + slot, mask=t < T, other=-1) >= 0
                weight = tl.load(weights_ptr + slot, mask=t < T, other=0.0)
                answer = tl.load(returned + slot[:, None] * H + cols, mask=inside, other=0.0)
                acc += tl.where(kept[:, None], weight[:, None] * answer.to(tl.float32), 0.0)
            tl.store(out_ptr + t[:, None] * H + cols, acc.to(out_ptr.dtype.element_ty), mask=inside)
        start += programs * BLOCK_T

    # 4. `notify` is a release: it cannot overtake the loads above. This program needs the buffer no more.
    dl.notify_all(dl.signal_at(read_ptr, me), ctx, 1, "add")


# %%
# Sizes that fit the machine. The programs of all ranks wait for one another, so a rank must not start more of them than its
# device runs at a time. An interpreter likes few programs and large tiles.


def launch_config():
    if triton_dist.backend == "cpu":
        return dict(BLOCK_T=64, BLOCK_H=1024), 2
    if triton_dist.backend == "nvidia":
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        return dict(BLOCK_T=8, BLOCK_H=512), programs
    return dict(BLOCK_T=8, BLOCK_H=512), 20


class Combine:
    """What the kernel needs besides its operands: allocated once, used for any number of calls."""

    def __init__(self, T, H, topk, dtype):
        self.config, self.programs = launch_config()
        self.T, self.H, self.topk = T, H, topk
        self.calls = 0
        self.returned = shmem.aclshmem_create_tensor((T, topk, H), dtype)
        self.filled = shmem.create_signals(shmem.pe_count())
        self.read = shmem.create_signals(shmem.pe_count())
        self.ctx = shmem.context()

    def __call__(self, y, weights, ids, origin):
        out = torch.empty(self.T, self.H, dtype=y.dtype, device=y.device)
        combine_kernel[(self.programs,)](
            y, weights, ids, out, origin, self.returned, self.filled, self.read,
            len(y), self.T, self.H, self.topk, self.calls, self.ctx, **self.config,
        )  # fmt: skip
        self.calls += 1
        return out

    def free(self):
        for tensor in (self.returned, self.filled, self.read):
            shmem.aclshmem_free_tensor(tensor)


# %%
# The way there, and the experts
# ------------------------------
#
# By torch.distributed: sort the slots by expert, tell every rank how many rows come, send the tokens, and with each
# the number of its slot. Rank d owns the experts d * PER to (d + 1) * PER - 1, PER = ceil(experts / world_size). Rows come
# ordered by source rank and then by expert; a combine does not mind, so they stay like that.


def dispatch(x, ids, E):
    """(rows, their experts, their origins, rows sent to each rank, rows received from each rank, the slots sent)"""
    rank, world = dist.get_rank(), dist.get_world_size()
    per, topk = -(-E // world), ids.shape[1]
    flat = ids.flatten()
    slots = torch.argsort(torch.where(flat < 0, E, flat), stable=True)[: int((flat >= 0).sum())]
    counts = torch.bincount(flat[slots], minlength=per * world).view(world, per)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    sent, came = counts.sum(1).tolist(), received.sum(1).tolist()
    rows = x.new_empty(sum(came), x.shape[1])
    dist.all_to_all_single(rows, x[slots // topk], came, sent)
    origin = slots.new_empty(sum(came))
    dist.all_to_all_single(origin, rank * flat.numel() + slots, came, sent)
    expert = torch.arange(per, device=x.device).repeat(world).repeat_interleave(received.flatten()) + rank * per
    return rows, expert, origin.to(torch.int32), sent, came, slots


def experts(rows, expert):
    """Stands for the two matrix products of a real expert: something that differs from expert to expert."""
    return (torch.tanh(rows.float()) * (1 + expert[:, None] / 8)).to(rows.dtype)


# %%
# Is it right?
# ------------
#
# The reference sends the rows back by an all-to-all and adds them up by slot in fp32. The kernel does the same additions in the
# same order; but a device may make one operation of a product and a sum, with one rounding less. So the sums differ by a
# small multiple of 2^-24 of their terms, which may push a value over a rounding boundary of the dtype: one unit in the last
# place, 2^-10 of the value for fp16 (less than 1e-3), 2^-7 for bf16. In fp32 itself it is topk * 2^-24 of the terms, and
# 1e-5 leaves room.

TOLERANCE = {torch.float16: ("1e-3", "1e-3"), torch.bfloat16: ("8e-3", "8e-3"), torch.float32: ("1e-5", "1e-5")}


def golden(y, weights, sent, came, slots):
    back = y.new_empty(sum(sent), y.shape[1])
    dist.all_to_all_single(back, y, sent, came)
    T, topk = weights.shape
    out = torch.zeros(T, y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(topk):
        chosen = (slots % topk == j).nonzero()[:, 0]
        t = slots[chosen] // topk
        out[t] += weights[t, j, None] * back[chosen].float()
    return out.to(y.dtype)


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
    parser = argparse.ArgumentParser(description="MoE combine in one kernel; start it with torchrun.")
    for size, default in dict(tokens=1024, hidden=7168, topk=8, experts=64).items():
        parser.add_argument(f"--{size}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--drop", type=float, default=0.02, help="share of the choices that are dropped (default 0.02)")
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="bf16")
    parser.add_argument("--warmup", type=int, default=0, help="calls before the one that is checked")
    parser.add_argument("--iters", type=int, default=0, help="timed calls; 0 (default): print no times")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    T, H, topk, E = args.tokens, args.hidden, args.topk, args.experts
    if min(T, H, topk, E) < 1 or min(args.warmup, args.iters) < 0:
        parser.error("--tokens, --hidden, --topk and --experts must be at least 1, --warmup and --iters at least 0")
    if topk > E:
        parser.error(f"--topk {topk} is more than --experts {E}: a token goes to an expert once")
    if not 0 <= args.drop <= 1:
        parser.error(f"--drop is {args.drop}: give a share of 0 to 1")
    if "LOCAL_RANK" not in os.environ:
        parser.exit(
            2,
            "This tutorial runs one process a rank, started by torchrun:\n"
            f"    torchrun --nproc-per-node=2 {sys.argv[0]}\n",
        )
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]

    # The process group serves the reference and the final exchange. `shmem` meets through it, too.
    dist.init_process_group(shmem.process_group_backend())
    rank, world = dist.get_rank(), dist.get_world_size()

    shmem.set_conf_store_tls(False, "")
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.ip_port = rank, world, G_IP_PORT
    attr.local_mem_size = T * topk * H * dtype.itemsize + (64 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"[FAIL] Rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    say(f"[INFO] Rank {rank} of {world} initialized")

    device = shmem.device()
    torch.manual_seed(args.seed * world + rank)
    x = torch.randn(T, H).to(dtype).to(device)
    ids = torch.rand(T, E).topk(topk).indices
    ids = torch.where(torch.rand(T, topk) < args.drop, -1, ids).to(torch.int32).to(device)

    weights = torch.rand(T, topk)
    weights = (weights / weights.sum(1, keepdim=True)).to(device)  # as a router's: they add up to 1

    rows, expert, origin, sent, came, slots = dispatch(x, ids, E)
    y = experts(rows, expert)

    operator = Combine(T, H, topk, dtype)
    for _ in range(args.warmup):
        operator(y, weights, ids, origin)
    out = operator(y, weights, ids, origin)
    synchronize()

    rtol, atol = TOLERANCE[dtype]
    passed = torch.allclose(golden(y, weights, sent, came, slots), out, rtol=float(rtol), atol=float(atol))
    if passed:
        say(f"[PASS] Rank {rank}: out_golden and out match within tolerances (rtol={rtol}, atol={atol}).")
    else:
        say(f"[FAIL] Rank {rank}: out_golden and out differ by more than rtol={rtol}, atol={atol}.")

    if args.iters:
        ours = seconds(lambda: operator(y, weights, ids, origin), args.iters)
        plain = seconds(lambda: golden(y, weights, sent, came, slots), args.iters)
        say(f"[TIME] Rank {rank}: kernel {ours:.4g} s, torch.distributed {plain:.4g} s")

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
