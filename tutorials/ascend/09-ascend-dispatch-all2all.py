"""
MoE dispatch: every token to its experts
========================================

In a mixture of experts a token is not multiplied with all weights, but with those of k experts out of many. A router has
chosen them: topk_ids[t] holds the k experts of token t, -1 where a choice was dropped. The experts are spread over the
ranks, so before anything is computed every token must travel to the ranks of its experts, and there all tokens of one
expert must lie side by side, because they become the rows of one matrix product.

With torch.distributed that takes a sort by expert, an all-to-all of the counts, a wait of the *host* for them (the
sizes of the next call depend on them), an all-to-all of the tokens, and another sort. Here it is one kernel, and no host
waits for anything. What you will see: an all-to-all whose sizes are known to the devices alone, a handshake that makes
buffers safe without acknowledgements, and a numbering of tokens that is the same in every run.

    torchrun --nproc-per-node=2 tutorials/ascend/09-ascend-dispatch-all2all.py

Options: --tokens (per rank) --hidden --topk --experts --drop (share of the choices that are dropped) --dtype --seed, --warmup
and --iters (with --iters 1 or more it also prints times). The way back is tutorial 10.
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
# Rank d owns the experts d * PER to (d + 1) * PER - 1, where PER = ceil(experts / world_size). A *slot* is one entry of
# topk_ids. The result on rank d has a *row* for every slot of any rank that names one of d's experts, ordered by
# expert, then by source rank, then by the token's place there.
#
# Three things lie in the symmetric heap of every rank:
#
#     counts[2][world_size][experts]      counts[parity][s][e]: how many slots of rank s name expert e
#     inbox[world_size][tokens][hidden]   inbox[s][t]: token t of rank s, if one of its experts lives here
#     origin[rows]                        which slot row i is of, as the number (s * tokens + t) * topk + slot
#
# A token with three experts on one rank has three rows there, but it travels to the inbox once, and the three rows
# are copied from it on the spot: the link is what is slow.
#
# The row of a slot is known to its sender: it is
#
#     rows of the owner's earlier experts + rows of this expert from earlier ranks + its number on this rank
#
# and the first two follow from `counts`, which every rank has of every rank. So the sender writes origin[row] at the owner.
#
#
# Signals
# -------
#
#     arrived      "A program of this rank has counted its tokens."            added to by all programs of this rank
#     counted[s]   "Rank s's counts for this call are here."                    set by one program of rank s
#     filled[s]    "A program of rank s has sent all its tokens and origins."   added to by all programs of rank s
#
# Calls are numbered 0, 1, 2 ... and in call n a rank waits for `arrived` >= (n + 1) * programs, `counted` >= n + 1, `filled` >=
# (n + 1) * programs. Nothing is ever reset.
#
# Why is no buffer overwritten early, for any number of ranks, with no signal that says "I have read it"? Because counts are
# such a signal. A rank sends the counts of call n only after its call n - 1 is over: so whoever has the counts of
# *all* ranks for call n knows that nobody reads the inbox of call n - 1 any more, and may fill it. The counts cannot protect
# themselves, so there are two buffers of them: who writes the counts of call n has finished call n - 1, and for that had
# everybody's counts of call n - 1, so everybody had finished call n - 2, whose buffer this is.


# %%
# Numbering
# ---------
#
# A program goes over its tokens in blocks and gives every slot a number among the slots of the same expert. In a block all
# slots are compared with all: as many equal ones as stand before a slot, so much is added to the expert's cursor. No
# atomics: with them the numbers would depend on who came first, and the result would differ from run to run.


@triton.jit
def count_slots(
    ids_ptr, number_ptr, cursor_ptr, first, end, topk, E,
    BLOCK_T: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """number[t, j] among this program's slots of the same expert (-1: dropped); cursor[e]: how many there are."""
    experts = tl.arange(0, E_PAD)
    tl.store(cursor_ptr + experts, tl.zeros((E_PAD,), tl.int32), mask=experts < E)
    tl.debug_barrier()  # the stores of all threads before the loads of all threads
    i = tl.arange(0, BLOCK_T * K_PAD)
    j = i - i // K_PAD * K_PAD
    start = first
    while start < end:
        t = start + i // K_PAD
        inside = (t < end) & (j < topk)
        e = tl.load(ids_ptr + t * topk + j, mask=inside, other=-1)
        kept = e >= 0
        key = tl.maximum(e, 0)
        same = (key[:, None] == key[None, :]) & kept[:, None] & kept[None, :]
        earlier = tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), 1)
        later = tl.sum((same & (i[None, :] > i[:, None])).to(tl.int32), 1)
        number = tl.load(cursor_ptr + key, mask=kept, other=0) + earlier
        tl.debug_barrier()
        tl.store(cursor_ptr + key, number + 1, mask=kept & (later == 0))  # the last of its kind moves the cursor
        tl.debug_barrier()
        tl.store(number_ptr + t * topk + j, tl.where(kept, number, -1), mask=inside)
        start += BLOCK_T


@triton.jit
def sum_lines(lines, n, E, E_PAD: tl.constexpr):
    """The sum of the first n lines of a matrix [.., E]."""
    experts = tl.arange(0, E_PAD)
    total = tl.zeros((E_PAD,), tl.int32)
    for line in range(0, n):
        total += tl.load(lines + line * E + experts, mask=experts < E, other=0)
    return total


# %%
# The kernel
# ----------


@triton.jit
def dispatch_kernel(
    x_ptr, ids_ptr, out_ptr, out_counts_ptr, out_origin_ptr, inbox_ptr, counts_ptr, origin_ptr,
    arrived_ptr, counted_ptr, filled_ptr, number_ptr, partial_ptr, base_ptr,
    T, H, topk, E, PER, call, ctx,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    me = dl.rank(ctx)
    world = dl.num_ranks(ctx)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    experts = tl.arange(0, E_PAD)
    known = experts < E

    # 1. Every program counts a share of the tokens. partial[pid][e]: its slots of expert e.
    share = tl.cdiv(T, programs)
    first = tl.minimum(pid * share, T)
    end = tl.minimum(first + share, T)
    count_slots(ids_ptr, number_ptr, partial_ptr + pid * E, first, end, topk, E, BLOCK_T, K_PAD, E_PAD)
    dl.notify(arrived_ptr, me, ctx, 1, "add")

    # 2. The sum over the programs goes to all ranks, each served by one program.
    matrix = counts_ptr + (call - call // 2 * 2) * world * E
    peer = pid
    while peer < world:
        token = dl.wait(arrived_ptr, (call + 1) * programs, ctx)
        line = sum_lines(dl.consume_token(partial_ptr, token), programs, E, E_PAD)
        dl.remote_store(matrix + me * E + experts, line, peer, ctx, known)
        dl.notify(dl.signal_at(counted_ptr, me), peer, ctx, call + 1)
        peer += programs

    # 3. With all counts here, every program knows where its slots go: base[pid][e] is the row of its first slot of expert e.
    token = dl.wait(counted_ptr, call + 1, ctx, "ge", world)
    matrix = dl.consume_token(matrix, token)
    total = sum_lines(matrix, world, E, E_PAD)
    base = tl.cumsum(total, 0) - total  # all earlier experts; those of other ranks are taken away again below
    for d in range(0, world):
        ours = (experts >= d * PER) & (experts < (d + 1) * PER)
        base -= tl.where(ours, tl.sum(tl.where(experts < d * PER, total, 0), 0), 0)
    base += sum_lines(matrix, me, E, E_PAD) + sum_lines(partial_ptr, pid, E, E_PAD)
    tl.store(base_ptr + pid * E + experts, base, mask=known)
    tl.debug_barrier()
    mine = known & (experts >= me * PER) & (experts < (me + 1) * PER)
    rows = tl.sum(tl.where(mine, total, 0), 0)
    if pid == 0:
        tl.store(out_counts_ptr + tl.where(mine, experts - me * PER, 0), total, mask=mine)

    # 4. Send. A tile of tokens goes to a peer in one masked store: the lines without an expert there stay where they are.
    # (`goes` is in the index, too, because of an NPU's compiler: a tile without gaps and a mask that is no range become a
    # load of the whole tile, a choice, and a store of the whole tile, lines of other programs included.)
    lane, j, h = tl.arange(0, BLOCK_T), tl.arange(0, K_PAD), tl.arange(0, BLOCK_H)
    start = first
    while start < end:
        t = start + lane
        inside = (t < end)[:, None] & (j < topk)[None, :]
        slot = t[:, None] * topk + j[None, :]
        number = tl.load(number_ptr + slot, mask=inside, other=-1)
        kept = number >= 0
        e = tl.maximum(tl.load(ids_ptr + slot, mask=inside, other=0), 0)
        row = tl.where(kept, number + tl.load(base_ptr + pid * E + e, mask=kept, other=0), 0)
        from_row = t.to(tl.int64)[:, None] * H
        tokens = (t < end)[:, None]
        for i in range(1, world + 1):
            peer = dl.owner_first(i, me, world)  # the next rank first, the own one last
            here = kept & (e // PER == peer)
            goes = tl.sum(here.to(tl.int32), 1) > 0
            to_row = tl.where(goes, tl.cast(me * T, tl.int64) + t, 0)[:, None] * H
            dl.remote_store(origin_ptr + row, me * T * topk + slot, peer, ctx, here)
            for column in range(0, H, BLOCK_H):
                cols = (column + h)[None, :]
                tile = tl.load(x_ptr + from_row + cols, mask=tokens & (cols < H))
                dl.remote_store(inbox_ptr + to_row + cols, tile, peer, ctx, goes[:, None] & (cols < H))
        start += BLOCK_T
    dl.notify_all(dl.signal_at(filled_ptr, me), ctx, 1, "add")

    # 5. Everybody has sent: gather the rows of this rank's experts from the inbox.
    token = dl.wait(filled_ptr, (call + 1) * programs, ctx, "ge", world)
    inbox = dl.consume_token(inbox_ptr, token)
    start = pid * BLOCK_T
    while start < rows:
        row = start + lane
        valid = row < rows
        came = tl.load(origin_ptr + row, mask=valid, other=0)
        tl.store(out_origin_ptr + row, came, mask=valid)  # tutorial 10 wants to know
        from_row = (came // topk).to(tl.int64)[:, None] * H
        to_row = row.to(tl.int64)[:, None] * H
        for column in range(0, H, BLOCK_H):
            cols = (column + h)[None, :]
            mask = valid[:, None] & (cols < H)
            tl.store(out_ptr + to_row + cols, tl.load(inbox + from_row + cols, mask=mask), mask=mask)
        start += programs * BLOCK_T


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


# %%
# The host does not know how many rows come. So the result has room for the worst case, and `counts`, on the device,
# tells how many are valid: who computes the experts next reads it there.


class Dispatch:
    """What the kernel needs besides tokens and ids: allocated once, used for any number of calls."""

    def __init__(self, T, H, topk, E, dtype):
        self.config, self.programs = launch_config()
        self.T, self.H, self.topk, self.E, self.world = T, H, topk, E, shmem.pe_count()
        self.per = triton.cdiv(E, self.world)
        self.rows = self.world * T * topk
        self.calls = 0
        self.inbox = shmem.aclshmem_create_tensor((self.world, T, H), dtype)
        self.counts = shmem.aclshmem_create_tensor((2, self.world, E), torch.int32)
        self.origin = shmem.aclshmem_create_tensor((self.rows,), torch.int32)
        self.arrived = shmem.create_signals(1)
        self.counted = shmem.create_signals(self.world)
        self.filled = shmem.create_signals(self.world)
        new = dict(dtype=torch.int32, device=self.inbox.device)
        self.number = torch.empty(T, topk, **new)
        self.partial, self.base = torch.empty(self.programs, E, **new), torch.empty(self.programs, E, **new)
        self.ctx = shmem.context()

    def __call__(self, x, ids):
        out = torch.empty(self.rows, self.H, dtype=x.dtype, device=x.device)
        counts = torch.zeros(self.per, dtype=torch.int32, device=x.device)
        origin = torch.empty(self.rows, dtype=torch.int32, device=x.device)
        dispatch_kernel[(self.programs,)](
            x, ids, out, counts, origin, self.inbox, self.counts, self.origin, self.arrived, self.counted, self.filled,
            self.number, self.partial, self.base, self.T, self.H, self.topk, self.E, self.per, self.calls, self.ctx,
            **self.config, K_PAD=triton.next_power_of_2(self.topk), E_PAD=triton.next_power_of_2(self.E),
        )  # fmt: skip
        self.calls += 1
        return out, counts, origin

    def free(self):
        for tensor in (self.inbox, self.counts, self.origin, self.arrived, self.counted, self.filled):
            shmem.aclshmem_free_tensor(tensor)


# %%
# Is it right?
# ------------
#
# The reference does what is usual: sort, all-to-all of counts, all-to-all of rows, sort. A dispatch moves bits and computes
# nothing, so the two must agree exactly: both tolerances are 0.

TOLERANCE = ("0", "0")


def golden(x, ids, E):
    world = dist.get_world_size()
    per, topk = -(-E // world), ids.shape[1]
    flat = ids.flatten()
    order = torch.argsort(torch.where(flat < 0, E, flat), stable=True)[: int((flat >= 0).sum())]
    sent = torch.bincount(flat[order], minlength=per * world).view(world, per)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    rows = x.new_empty(int(received.sum()), x.shape[1])
    dist.all_to_all_single(rows, x[order // topk], received.sum(1).tolist(), sent.sum(1).tolist())
    # Rows come by source and then by expert; we want them by expert and then by source.
    expert = torch.arange(per, device=x.device).repeat(world).repeat_interleave(received.flatten())
    return rows[torch.argsort(expert, stable=True)], received.sum(0).to(torch.int32)


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
    parser = argparse.ArgumentParser(description="MoE dispatch in one kernel; start it with torchrun.")
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
    attr.local_mem_size = world * T * (H * dtype.itemsize + topk * 4) + (64 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"[FAIL] Rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    say(f"[INFO] Rank {rank} of {world} initialized")

    device = shmem.device()
    torch.manual_seed(args.seed * world + rank)
    x = torch.randn(T, H).to(dtype).to(device)
    ids = torch.rand(T, E).topk(topk).indices
    ids = torch.where(torch.rand(T, topk) < args.drop, -1, ids).to(torch.int32).to(device)

    operator = Dispatch(T, H, topk, E, dtype)
    for _ in range(args.warmup):
        operator(x, ids)
    out, counts, _ = operator(x, ids)
    synchronize()

    rtol, atol = TOLERANCE
    right, right_counts = golden(x, ids, E)
    passed = torch.equal(counts, right_counts) and torch.equal(out[: len(right)], right)
    if passed:
        say(f"[PASS] Rank {rank}: tokens_golden and tokens match within tolerances (rtol={rtol}, atol={atol}).")
    else:
        say(f"[FAIL] Rank {rank}: tokens_golden and tokens differ by more than rtol={rtol}, atol={atol}.")

    if args.iters:
        ours = seconds(lambda: operator(x, ids), args.iters)
        plain = seconds(lambda: golden(x, ids, E), args.iters)
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
