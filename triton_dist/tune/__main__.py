"""The command: torchrun --nproc-per-node=2 -m triton_dist.tune OPERATOR ... [--shapes M,N,K ...] [--dtype bf16] [--output FILE]

Prints each candidate's time, the chosen one with a star, and in brackets its ratio to torch.distributed's way (above 1: it is
faster). What is measured goes to the user's cache, or with --output to that file alone."""

import argparse
import os
import sys
import time

import triton_dist
from triton_dist import shmem
from triton_dist.errors import TuningError
from triton_dist.tuning import tables

import torch
import torch.distributed as dist

from . import OPERATORS, tune
from .shapes import defaults

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAP_BYTES = {"cpu": 64 << 20}


def numbers(text):
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers with commas") from None


def arguments(argv):
    sizes = "; ".join(f"{name}: {','.join(one.sizes)}" for name, one in OPERATORS.items())
    parser = argparse.ArgumentParser(
        prog="python -m triton_dist.tune",
        description="Times an operator's methods and configurations on all ranks alike and keeps the result. Start it with "
        "torchrun, a process a rank.",
    )
    parser.add_argument("operators", nargs="+", choices=list(OPERATORS), metavar="operator", help=", ".join(OPERATORS))
    parser.add_argument("--shapes", nargs="+", type=numbers, help=f"sizes ({sizes}); default: the benchmarks' and a grid")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--output", help="a file of measured times to write to, in place of the cache; what it has is kept")
    parser.add_argument("--ways", nargs="+", choices=("graph", "queued"), help="default: both on nvidia, else queued")
    parser.add_argument("--samples", type=int, default=9, help="of which the median counts (default 9)")
    parser.add_argument("--heap-bytes", type=int, default=HEAP_BYTES.get(triton_dist.backend, 8 << 30), help="symmetric memory")
    parser.add_argument("--again", action="store_true", help="measure even what the cache has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no shape after so long")
    args = parser.parse_args(argv)
    for operator in args.operators:
        for shape in args.shapes or []:
            if len(shape) != len(OPERATORS[operator].sizes):
                parser.error(f"--shapes {shape}: {operator} takes {','.join(OPERATORS[operator].sizes)}")
    if "LOCAL_RANK" not in os.environ:
        parser.error("one process a rank: torchrun --nproc-per-node=2 -m triton_dist.tune ...")
    return args


def main(argv=None):
    args = arguments(argv)
    dist.init_process_group(shmem.process_group_backend())
    rank = dist.get_rank()
    attr = shmem.InitAttr(my_rank=rank, n_ranks=dist.get_world_size(), local_mem_size=args.heap_bytes)
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    start, done, failed, ratios = time.monotonic(), 0, 0, {}
    for operator, dtype, shape in jobs(args):
        spent = max(shmem.gather("tune: seconds", time.monotonic() - start))
        if spent > args.seconds:
            break
        try:
            found = tune(
                operator, shape, DTYPES[dtype], ways=args.ways, samples=args.samples,
                cached=args.output is None, again=args.again,
            )  # fmt: skip
        except TuningError as error:
            failed += 1
            say(rank, f"{operator} {shape} {dtype}: {error}")
            continue
        done += 1
        say(rank, f"{operator} {found}")
        if rank == 0 and args.output:
            tables.merge(args.output, [found.entry])
        best = next(one.microseconds for one in found.timings if one.candidate == found.best)
        for way, us in (found.baseline or {}).items():
            ratios.setdefault((operator, way), []).append(us / max(best[way], 1e-3))
    say(rank, f"{done} shapes in {time.monotonic() - start:.1f} s")
    for (operator, way), some in ratios.items():
        say(rank, f"{operator}, {way}: {len(some)} shapes, {min(some):.2f}x to {max(some):.2f}x of torch.distributed's way")
    shmem.aclshmem_finalize()
    dist.destroy_process_group()
    return 1 if failed else 0


def jobs(args):
    """(operator, dtype, shape) of all there is to measure: the first shapes of all operators, then the second ones, ..."""
    on_cpu = triton_dist.backend == "cpu"
    listed = [
        (place, operator, dtype, shape)
        for operator in args.operators
        for dtype in args.dtype
        for place, shape in enumerate(args.shapes or defaults(operator, on_cpu))
    ]
    return [job for _, *job in sorted(listed, key=lambda job: job[0])]


def say(rank, text):
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
