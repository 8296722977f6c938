"""Litmus tests of the memory model, many times over: does any rank ever see a wrong word?

    torchrun --nproc-per-node=2 benchmarks/litmus.py [--iters 1000000]

Two ranks. Each test runs its iterations inside one kernel and counts the words that it should not have seen; all must be 0.

| test | what would break it |
|---|---|
| message passing | a signal that overtakes the data stored by other threads of the program |
| buffer reuse | an acknowledgement that overtakes the loads before it: the slot is overwritten while it is read |
| store buffering | a `quiet` that does not order a later load after an earlier remote store: both ranks miss each other's |
| barrier reuse | a barrier that lets a rank through on what the last call left, or before the peer's stores are visible |
| grid barrier | the same for whole grids, every program reading what every program of the peer wrote |
| put of every size | a put's first or last words late, missing or too many, for every n from 0 on |
"""

import argparse
import os
import sys
import time

import triton_dist
import triton_dist.language as dl
from triton_dist import shmem

import torch
import torch.distributed as dist
import triton
import triton.language as tl

WORDS = 1024  # of a message


@triton.jit
def message_passing(box, sig, ack, wrong, iters, ctx, WORDS: tl.constexpr):
    """Both ranks send and both check, one slot each: data, notify; wait, check, acknowledge."""
    peer = 1 - dl.rank(ctx)
    lanes = tl.arange(0, WORDS)
    bad = 0
    for i in range(1, iters + 1):
        dl.wait(ack, i - 1, ctx)
        dl.remote_store(box + lanes, lanes * 0 + i, peer, ctx)
        dl.notify(sig, peer, ctx, i)
        token = dl.wait(sig, i, ctx)
        seen = tl.load(dl.consume_token(box, token) + lanes)
        bad += tl.sum((seen != i).to(tl.int32), 0)
        dl.notify(ack, peer, ctx, i)
    tl.store(wrong, bad)


@triton.jit
def buffer_reuse(box, sig, ack, wrong, iters, ctx, WORDS: tl.constexpr):
    """Two slots by parity; a writer runs up to two messages ahead of its reader."""
    peer = 1 - dl.rank(ctx)
    lanes = tl.arange(0, WORDS)
    bad = 0
    for i in range(1, iters + 2):
        if i <= iters:
            dl.wait(ack, i - 2, ctx)
            dl.remote_store(box + i % 2 * WORDS + lanes, lanes + i, peer, ctx)
            dl.notify(sig, peer, ctx, i)
        if i > 1:
            token = dl.wait(sig, i - 1, ctx)
            seen = tl.load(dl.consume_token(box, token) + (i - 1) % 2 * WORDS + lanes)
            bad += tl.sum((seen != lanes + i - 1).to(tl.int32), 0)
            dl.notify(ack, peer, ctx, i - 1)
    tl.store(wrong, bad)


@triton.jit
def store_buffering(cell, barrier, seen, iters, ctx):
    """Each rank stores to the peer, `quiet`, then looks at what the peer stored. `seen[i]`: 1 when it saw it."""
    peer = 1 - dl.rank(ctx)
    for i in range(1, iters + 1):
        dl.barrier_all(barrier, ctx)
        dl.remote_store(cell, i, peer, ctx)
        dl.quiet(ctx)
        tl.store(seen + i - 1, (tl.load(cell, volatile=True) >= i).to(tl.int8))


@triton.jit
def barrier_reuse(box, barrier, wrong, iters, ctx, WORDS: tl.constexpr):
    peer = 1 - dl.rank(ctx)
    lanes = tl.arange(0, WORDS)
    bad = 0
    for i in range(1, iters + 1):
        dl.remote_store(box + i % 2 * WORDS + lanes, lanes * 0 + i, peer, ctx)
        dl.barrier_all(barrier, ctx)
        bad += tl.sum((tl.load(box + i % 2 * WORDS + lanes) != i).to(tl.int32), 0)
    tl.store(wrong, bad)


@triton.jit
def grid_barrier(box, barrier, wrong, iters, ctx, PADDED: tl.constexpr):
    peer = 1 - dl.rank(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, PADDED)
    bad = 0
    for i in range(1, iters + 1):
        dl.remote_store(box + i % 2 * PADDED + pid, i, peer, ctx)
        dl.barrier_grid(barrier, ctx)
        seen = tl.load(box + i % 2 * PADDED + lanes, mask=lanes < programs, other=i)
        bad += tl.sum((seen != i).to(tl.int32), 0)
    tl.store(wrong + pid, bad)


@triton.jit
def put_every_size(box, source, sig, ack, wrong, sizes, ctx, PADDED: tl.constexpr):
    """Sizes 0, 1, 2, ..; the words behind the last one must stay as they were."""
    peer = 1 - dl.rank(ctx)
    lanes = tl.arange(0, PADDED)
    bad = 0
    for n in range(0, sizes):
        tl.store(box + lanes, lanes * 0 - 1)  # own box: poisoned, then offered
        tl.store(source + lanes, lanes + n)
        dl.notify(ack, peer, ctx, n + 1)
        dl.wait(ack, n + 1, ctx)
        dl.put(box, source, n, peer, ctx)
        dl.notify(sig, peer, ctx, n + 1)
        token = dl.wait(sig, n + 1, ctx)
        seen = tl.load(dl.consume_token(box, token) + lanes)
        bad += tl.sum((seen != tl.where(lanes < n, lanes + n, -1)).to(tl.int32), 0)
        tl.debug_barrier()  # every thread has read before one poisons again
    tl.store(wrong, bad)


def main():
    on_cpu = triton_dist.backend == "cpu"
    parser = argparse.ArgumentParser(description="Litmus tests of two ranks; start it with torchrun.")
    parser.add_argument("--iters", type=int, default=300 if on_cpu else 10**6)
    parser.add_argument("--sizes", type=int, default=130 if on_cpu else 8192, help="put sizes 0 .. this - 1, in words")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        parser.exit(2, f"Two processes, a rank each:\n    torchrun --nproc-per-node=2 {sys.argv[0]}\n")
    dist.init_process_group(shmem.process_group_backend())
    rank = dist.get_rank()
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.local_mem_size = rank, 2, 16 << 20
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    device, ctx = shmem.device(), shmem.context()
    programs = 2 if on_cpu else 132
    padded = triton.next_power_of_2(max(args.sizes, WORDS))
    box = shmem.aclshmem_create_tensor((2 * padded,), torch.int32)
    source = torch.empty(padded, dtype=torch.int32, device=device)
    options = {} if on_cpu else {"num_warps": 8}
    failed = False

    def run(name, launch, count):
        nonlocal failed
        sig, ack, barrier = (shmem.create_signals(n) for n in (1, 1, 8))
        box.zero_()
        wrong = torch.full((programs,), -1, dtype=torch.int32, device=device)
        wrong[1:] = 0
        shmem.barrier_all()
        start = time.perf_counter()
        verdict = launch(sig, ack, barrier, wrong)
        shmem.barrier_all()
        seconds = time.perf_counter() - start
        bad = verdict() if verdict else wrong.sum(dtype=torch.int64).view(1)
        dist.all_reduce(bad)
        failed |= bool(bad.item() != 0)
        if rank == 0:
            each = seconds / count * 1e6
            print(f"{name:18} {count:>9} iterations {each:8.2f} us each, wrong words: {bad.item()}", flush=True)
        for tensor in (sig, ack, barrier):
            shmem.aclshmem_free_tensor(tensor)

    def buffering(sig, ack, barrier, wrong):
        seen = torch.zeros(args.iters, dtype=torch.int8, device=device)
        store_buffering[(1,)](box, barrier, seen, args.iters, ctx)

        def both_missed():
            total = seen.to(torch.int32)
            dist.all_reduce(total)
            return (total == 0).sum().view(1)

        return both_missed

    run("message passing", lambda s, a, b, w: message_passing[(1,)](box, s, a, w, args.iters, ctx, WORDS, **options) and None,
        args.iters)  # fmt: skip
    run("buffer reuse", lambda s, a, b, w: buffer_reuse[(1,)](box, s, a, w, args.iters, ctx, WORDS, **options) and None,
        args.iters)  # fmt: skip
    run("store buffering", buffering, args.iters)
    run("barrier reuse", lambda s, a, b, w: barrier_reuse[(1,)](box, b, w, args.iters, ctx, WORDS, **options) and None,
        args.iters)  # fmt: skip
    tenth = max(args.iters // 10, 1)
    run("grid barrier", lambda s, a, b, w: grid_barrier[(programs,)](box, b, w, tenth, ctx,
        triton.next_power_of_2(programs), **options) and None, tenth)  # fmt: skip
    run("put of every size", lambda s, a, b, w: put_every_size[(1,)](box, source, s, a, w, args.sizes, ctx, padded, **options)
        and None, args.sizes)  # fmt: skip
    shmem.aclshmem_finalize()
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"rank {rank}: wrong words were seen")


if __name__ == "__main__":
    main()
