"""All-reduce: the three methods of triton_dist, torch.distributed's, and the physical limit, in one run.

    torchrun --nproc-per-node=2 benchmarks/all_reduce.py [--bytes 8192 1048576] [--dtype bf16] [--iters 20] [--calls 10]

A line a message size. Times are of one call: the median over --iters samples of the slowest rank's time, a sample being
--calls calls in a row (on a GPU in one replay of a CUDA graph). The limit is what no method can be faster than: each rank
has to send 2 (W - 1) / W of the message, at the rate at which one large copy to the neighbour goes in this run. Small
messages are bound by a signal's trip instead; the barrier's time, printed first, tells how long that is. Ratios are
torch.distributed's time over ours (above 1: ours is faster) and the limit over ours (1: nothing is left to gain). On cpu
they compare an interpreter with compiled code: a smoke test.
"""

import argparse
import os
import sys
import time

import triton_dist
from triton_dist import shmem
from triton_dist.kernels.all_reduce import METHODS, all_reduce, create_all_reduce_context
from triton_dist.kernels.barrier import barrier, create_barrier_context

import torch
import torch.distributed as dist

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def say(line):
    if dist.get_rank() == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def synchronize():
    if triton_dist.backend != "cpu":
        torch.accelerator.synchronize()


def seconds(call, calls, iters):
    """Of one call, on the slowest rank."""
    call()
    synchronize()
    many = lambda: [call() for _ in range(calls)]  # noqa: E731
    if triton_dist.backend == "nvidia":
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            many()
        many = graph.replay
        many()
    times = torch.empty(iters, dtype=torch.float64)
    for i in range(iters):
        synchronize()
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        many()
        synchronize()
        times[i] = (time.perf_counter() - start) / calls
    times = times.to(shmem.device())
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.median().item()


def link_rate(nbytes, iters):
    """Bytes a second of one copy into the right neighbour's memory, all ranks at the same time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    symmetric = shmem.aclshmem_create_tensor((nbytes,), torch.uint8)
    source = torch.ones(nbytes, dtype=torch.uint8, device=shmem.device())
    there = shmem.peer_tensor(symmetric, (rank + 1) % world)
    rate = nbytes / seconds(lambda: there.copy_(source), 1, iters)
    shmem.aclshmem_free_tensor(symmetric)
    return rate


def main():
    on_cpu = triton_dist.backend == "cpu"
    sizes = [2**13, 2**18, 2**22] if on_cpu else [2**13, 2**16, 2**19, 2**20, 2**22, 2**24, 2**26]
    parser = argparse.ArgumentParser(description="All-reduce against torch.distributed; start it with torchrun.")
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes, help=f"message sizes (default {sizes})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--iters", type=int, default=5 if on_cpu else 20, help="samples")
    parser.add_argument("--calls", type=int, default=2 if on_cpu else 10, help="calls in a sample")
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    if min(args.bytes) < dtype.itemsize or min(args.iters, args.calls) < 1:
        parser.error(f"--bytes must be at least {dtype.itemsize}, --iters and --calls at least 1")
    if "LOCAL_RANK" not in os.environ:
        parser.exit(2, f"One process a rank:\n    torchrun --nproc-per-node=2 {sys.argv[0]}\n")

    dist.init_process_group(shmem.process_group_backend())
    rank, world = dist.get_rank(), dist.get_world_size()
    large = 2**24 if on_cpu else 2**28
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks = rank, world
    attr.local_mem_size = max(2 * world * max(args.bytes), 3 * max(args.bytes), large) + (16 << 20)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    device = shmem.device()

    rate = link_rate(large, args.iters)
    meeting = create_barrier_context()
    trip = seconds(lambda: barrier(meeting), args.calls, args.iters)
    meeting.free()
    say(f"{world} ranks, {args.dtype}, {triton_dist.backend}; link {rate / 1e9:.1f} GB/s, barrier {trip * 1e6:.1f} us")
    say(
        f"{'bytes':>10} {'limit us':>9} {'torch us':>9}"
        + "".join(f" {m + ' us':>12} {'x torch':>8} {'limit/':>7}" for m in METHODS)
    )
    for nbytes in args.bytes:
        n = nbytes // dtype.itemsize
        x = torch.rand(n, generator=torch.Generator().manual_seed(rank)).to(dtype).to(device)
        exact = x.float()
        dist.all_reduce(exact)
        theirs = x.clone()  # reduced in place, call after call: ends at inf, which takes no less time
        torch_s = seconds(lambda: dist.all_reduce(theirs), args.calls, args.iters)  # noqa: B023
        limit = 2 * (world - 1) / world * nbytes / rate
        line = f"{nbytes:>10} {limit * 1e6:>9.1f} {torch_s * 1e6:>9.1f}"
        for method in METHODS:
            context = create_all_reduce_context(n, dtype, method)
            out = torch.empty_like(x)
            ours = seconds(lambda: all_reduce(x, context, "sum", out), args.calls, args.iters)  # noqa: B023
            bound = torch.finfo(dtype).eps * exact.abs() + world * 2.0**-23 * exact
            if not ((out.float() - exact).abs() <= bound).all():
                raise SystemExit(f"rank {rank}: {method} of {nbytes} bytes is wrong")
            line += f" {ours * 1e6:>12.1f} {torch_s / ours:>8.2f} {limit / ours:>7.2f}"
            context.free()
        say(line)
    shmem.aclshmem_finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
