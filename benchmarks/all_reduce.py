"""All-reduce: the methods of triton_dist, torch.distributed's, and the physical limit, in one run.

    torchrun --nproc-per-node=2 benchmarks/all_reduce.py [--bytes 8192 1048576] [--dtype bf16] [--methods auto mesh] [--eager]

A line a message size; microseconds of one call, medians of samples taken in turn (measure.py), on a GPU of ten calls in one
replay of a CUDA graph, so without the host's time; --eager: calls queued one by one. `auto` is what the operator chooses by
the size. The limit is what no method can be faster than: each rank has to send 2 (W - 1) / W of the message, at the rate at
which one large copy to the neighbour goes in this run. Small messages are bound by a signal's trip instead. Ratios are
torch.distributed's time over ours (above 1: ours is faster). On cpu they compare an interpreter with compiled code: a smoke
test.
"""

import argparse

import triton_dist
from measure import DTYPES, finish, link_rate, microseconds, say, start, synchronize
from triton_dist.kernels.all_reduce import METHODS, all_reduce, create_all_reduce_context

import torch
import torch.distributed as dist

SIZES = [1 << 13, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24, 1 << 26, 1 << 28]


def main():
    on_cpu = triton_dist.backend == "cpu"
    sizes = [2**13, 2**18] if on_cpu else SIZES
    parser = argparse.ArgumentParser(description="All-reduce against torch.distributed; start it with torchrun.")
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes, help=f"message sizes (default {sizes})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--methods", nargs="+", choices=("auto", *METHODS), default=["auto", "mesh"])
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    if min(args.bytes) < dtype.itemsize:
        parser.error(f"--bytes must be at least {dtype.itemsize}")
    rank, world, device = start(8 * max(args.bytes) + (1 << (25 if on_cpu else 29)))
    rate = link_rate((1 << 20) if on_cpu else (256 << 20))
    how = "eager" if args.eager else "graphs"
    say(f"{world} ranks, {args.dtype}, {triton_dist.backend}, {how}; link {rate / 1e3:.1f} GB/s")
    say(f"{'bytes':>10} {'limit':>8} {'torch':>8}" + "".join(f" {m:>9} {'x torch':>8}" for m in args.methods))
    for nbytes in args.bytes:
        n = nbytes // dtype.itemsize
        x = torch.rand(n, generator=torch.Generator().manual_seed(rank)).to(dtype).to(device)
        exact = x.float()
        dist.all_reduce(exact)
        theirs = torch.zeros_like(x)  # reduced in place, call after call: zeros stay finite
        contexts, calls, chosen = [], [lambda: dist.all_reduce(theirs)], ""  # noqa: B023
        for method in args.methods:
            context = create_all_reduce_context(n, dtype, None if method == "auto" else method)
            out = torch.full_like(x, float("nan"))
            call = lambda context=context, out=out: all_reduce(x, context, "sum", out)  # noqa: B023, E731
            call()
            synchronize()
            bound = torch.finfo(dtype).eps * exact.abs() + world * 2.0**-23 * exact
            if not ((out.float() - exact).abs() <= bound).all():
                raise SystemExit(f"rank {rank}: {method} of {nbytes} bytes is wrong")
            contexts.append(context)
            if method == "auto":
                chosen = f"  auto: {(context.special(n) or context).method}"
            calls.append(call)
        many = 1 if on_cpu else (2 if nbytes > 1 << 24 else 10)
        times = microseconds(calls, samples=9, calls=many, graph=not args.eager)
        line = f"{nbytes:>10} {2 * (world - 1) / world * nbytes / rate:>8.1f} {times[0]:>8.1f}"
        say(line + "".join(f" {t:>9.1f} {times[0] / t:>8.2f}" for t in times[1:]) + chosen)
        for context in contexts:
            context.free()
    finish()


if __name__ == "__main__":
    main()
