"""AllGather-GEMM, GEMM-ReduceScatter and GEMM-AllReduce against torch's product and collective, torch's fused op, the limit.

    torchrun --nproc-per-node=2 benchmarks/fused_gemms.py [--ops rs ar] [--dtype bf16] [--methods tma columns] [--grid]

A line a shape: microseconds of the product, of product and collective in sequence (the baseline), of torch's fused op, and of
each method of ours with its ratio: baseline over ours, above 1 is faster. `limit` is the baseline over the longer one of
product and transfer: what perfect overlap with the vendor's own product would give. Everything in a line is measured in turn
in the same samples (measure.py). Times of calls queued one after the other; in brackets under replay of a CUDA graph.
--grid: many shapes, ours by the method that the operator itself chooses against the baseline.
Shapes: ag M, N, K of each rank; rs and ar: M rows in all, N, K of each rank.
"""

import argparse

import triton_dist
from measure import DTYPES, finish, link_rate, microseconds, say, start, synchronize
from triton_dist.kernels import (
    allgather_gemm,
    create_allgather_gemm_context,
    create_gemm_allreduce_context,
    create_gemm_reduce_scatter_context,
    gemm_allreduce,
    gemm_reduce_scatter,
)
from triton_dist.tune import OPERATORS as TUNED
from triton_dist.tune.shapes import LARGE, grid
from triton_dist.tune.tunable import all_gather_single, reduce_scatter_single

import torch
import torch.distributed as dist

OPERATORS = {"ag": "allgather_gemm", "rs": "gemm_reduce_scatter", "ar": "gemm_allreduce"}
METHODS = {
    "ag": ["streams", "sequence"],
    "rs": ["tma", "columns", "sequence"],
    "ar": ["tma", "columns", "sequence"],
}


class Operator:
    def __init__(self, op, M, N, K, dtype, device):
        world, self.op, self.shape, self.dtype = dist.get_world_size(), op, (M, N, K), dtype
        self.a, self.b = (torch.randn(shape, device=device).to(dtype) for shape in ((M, K), (K, N)))
        rows = M * world if op == "ag" else M
        self.product = torch.empty(rows, N, dtype=dtype, device=device)
        self.gathered = torch.empty(M * world, K, dtype=dtype, device=device) if op == "ag" else None
        padded = -(-M // world) * world
        self.partial = torch.zeros(padded, N, dtype=dtype, device=device)
        self.rows = padded // world
        self.scattered = torch.empty(self.rows, N, dtype=dtype, device=device)
        self.bytes = (world - 1) * (M * K if op == "ag" else self.rows * N * (2 if op == "ar" else 1)) * dtype.itemsize

    def gemm(self):
        if self.op == "ag":
            torch.mm(self.gathered, self.b, out=self.product)
        else:
            torch.mm(self.a, self.b, out=self.partial[: self.shape[0]])

    def baseline(self):
        if self.op == "ag":
            all_gather_single(self.gathered, self.a)
            self.gemm()
        else:
            self.gemm()
            if self.op == "rs":
                reduce_scatter_single(self.scattered, self.partial)
            else:
                dist.all_reduce(self.partial)

    def expected(self):
        self.baseline()
        return {"ag": self.product, "rs": self.scattered, "ar": self.partial[: self.shape[0]]}[self.op].clone()

    def ours(self, method):
        """(context, call, out)"""
        M, N, K = self.shape
        if self.op == "ag":
            context = create_allgather_gemm_context(M, K, self.dtype, method=method)
            out = torch.empty_like(self.product)
            return context, lambda: allgather_gemm(self.a, self.b, context, out), out
        make = create_gemm_reduce_scatter_context if self.op == "rs" else create_gemm_allreduce_context
        context = make(M, N, self.dtype, method=method)
        out = torch.empty(context.rows if self.op == "rs" else M, N, dtype=self.dtype, device=self.a.device)
        run = gemm_reduce_scatter if self.op == "rs" else gemm_allreduce
        return context, lambda: run(self.a, self.b, context, out), out

    def torch_fused(self):
        """torch's fused op, or None."""
        name = dist.group.WORLD.group_name
        ops = torch.ops.symm_mem
        if self.op == "ag":
            return lambda: ops.fused_all_gather_matmul(self.a, [self.b], gather_dim=0, group_name=name)
        if self.op == "rs":
            return lambda: ops.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, name)
        return None


def check(op, method, out, expected, K):
    expected = expected[: out.shape[0]].float()
    error = (out.float() - expected).norm() / expected.norm().clamp_min(1e-30) if out.numel() else torch.zeros(())
    if not error < 1e-2:  # NaN, too
        raise SystemExit(f"rank {dist.get_rank()}: {op} by {method} is wrong: relative error {error.item()}")


def measure(op, shape, dtype, device, methods, rate, graphs, fused):
    one = Operator(op, *shape, dtype, device)
    expected = one.expected()
    found, things, names = [], [one.gemm, one.baseline], []
    for method in methods:
        context, call, out = one.ours(method)
        out.fill_(float("nan"))
        call()
        synchronize()
        check(op, method, out, expected, shape[2])
        found.append(context)
        things.append(call)
        names.append(method or context.method)
    if fused and (theirs := one.torch_fused()):
        try:
            theirs()
            things.append(theirs)
            names.append("torch fused")
        except Exception as error:  # not every build of torch has it
            say(f"    torch's fused op: {type(error).__name__}: {str(error)[:100]}")
    small = shape[0] * shape[1] < 1 << 23
    times = microseconds(things, samples=25 if small else 15)
    replays = microseconds(things[: 2 + len(methods)], graph=True, calls=4 if small else 2, samples=9) if graphs else None
    gemm, base = times[:2]
    transfer = one.bytes / rate
    line = f"{op} {'x'.join(map(str, shape)):>16} gemm {gemm:7.0f} link {transfer:6.0f} seq {base:7.0f}"
    line += f" limit {base / max(gemm, transfer):4.2f}x |"
    for i, name in enumerate(names):
        line += f" {name} {times[2 + i]:.0f} {base / times[2 + i]:.2f}x"
        if replays and i < len(methods):
            line += f" [{replays[2 + i]:.0f} {replays[1] / replays[2 + i]:.2f}x]"
    say(line + (f" [seq {replays[1]:.0f}]" if replays else ""))
    for context in found:
        context.free()
    best = base / times[2]
    return min(best, replays[1] / replays[2]) if replays else best


def main():
    on_cpu = triton_dist.backend == "cpu"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--dtype", choices=["fp16", "bf16"], default="bf16")
    parser.add_argument("--methods", nargs="+", default=None, help=f"of all --ops; default: {METHODS}")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--fused", action="store_true", help="torch's fused ops, too")
    args = parser.parse_args()
    for op in args.ops:
        possible = TUNED[OPERATORS[op]].methods
        if unknown := sorted({*(args.methods or ())} - {*possible}):
            parser.error(f"{op} has no method {', '.join(unknown)}: give --methods of {', '.join(possible)}")
    _, world, device = start((64 << 20) if on_cpu else (8 << 30))
    rate = link_rate((1 << 20) if on_cpu else (256 << 20))
    say(f"{world} ranks, {args.dtype}, {triton_dist.backend}; link {rate / 1e3:.0f} GB/s; microseconds")
    worst = {}
    for op in args.ops:
        shapes = [(64, 48, 32)] if on_cpu else (grid if args.grid else LARGE.get)(OPERATORS[op])
        for shape in shapes:
            methods = [None] if args.grid else (args.methods or METHODS[op])
            ratio = measure(
                op, shape, DTYPES[args.dtype], device, methods, rate, not (args.no_graphs or on_cpu), args.fused and not on_cpu
            )
            worst[op] = min(ratio, worst.get(op, ratio))
    if args.grid:
        say("worst ratios: " + ", ".join(f"{op} {ratio:.2f}x" for op, ratio in worst.items()))
    finish()


if __name__ == "__main__":
    main()
