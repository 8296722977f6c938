"""Mixture of experts: dispatch and combine against an index, all_to_all_single and index path, and the link.

    torchrun --nproc-per-node=2 benchmarks/moe.py [--methods auto gather pipelined] [--layouts rows tokens]

Microseconds of a call, queued one after the other and, in brackets, under replay of a CUDA graph; `link` is the time that the
bytes which must cross need at the rate of one large copy of this run, and the percentage is that over the replay's time.
With the layout rows, a dispatch also writes a row for each slot. What that takes alone is measured in turn with it: `fill`
writes as many bytes and reads none, `select` copies the same rows from tokens that are all here, by torch.index_select.
`floor`: the longer one of link and fill.
The baseline sends as many bytes, knows the splits already, and moves no counts; for the layout tokens it leaves out its last
index, which makes rows of the tokens that have come.
"""

import argparse

import triton_dist
from measure import finish, link_rate, microseconds, say, start, synchronize
from triton_dist.kernels import create_moe_combine_context, create_moe_dispatch_context, moe_combine, moe_dispatch
from triton_dist.kernels.moe_dispatch import LAYOUTS, METHODS
from triton_dist.kernels.moe_quantization import quantize

import torch
import torch.distributed as dist

CASES = [(4096, 4096, 8, 64, False), (128, 7168, 8, 256, True)]  # tokens a rank, hidden, top k, experts, fp8 dispatch


class Baseline:
    """index -> all_to_all_single -> index, and back; for the experts' even placement."""

    def __init__(self, x, ids, experts, fp8):
        world = dist.get_world_size()
        self.x, self.fp8 = x, fp8
        owner = ids // (experts // world)
        chosen = [(owner == rank).any(1).nonzero()[:, 0] for rank in range(world)]
        self.order, self.splits = torch.cat(chosen), [len(rows) for rows in chosen]
        counts = torch.tensor(self.splits, device=x.device)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        self.received = theirs.tolist()
        # the slots of each received token that live here, by expert
        mine = torch.cat([torch.where(owner[rows] == rank, ids[rows], -1) for rank, rows in enumerate(chosen)])
        there = torch.empty(sum(self.received), ids.shape[1], dtype=mine.dtype, device=x.device)
        dist.all_to_all_single(there, mine, self.received, self.splits)
        experts_of_rows, self.source = there.view(-1).sort(stable=True)
        first = int((experts_of_rows < 0).sum())
        self.source = self.source[first:]
        self.tokens = self.source // ids.shape[1]
        self.k, self.sent_slots = ids.shape[1], (owner[self.order] == torch.repeat_interleave(
            torch.arange(world, device=x.device), counts)[:, None]).view(-1)  # fmt: skip

    def writing(self):
        """Two functions that write this rank's rows: fill, select. As many bytes as a dispatch, without ranks and counts."""
        tokens = self.x[torch.arange(sum(self.received), device=self.x.device) % len(self.x)]
        if self.fp8:
            tokens = tokens.to(torch.float8_e4m3fn).view(torch.uint8)
        rows = tokens.new_empty(len(self.tokens), self.x.shape[1])
        return [lambda: rows.fill_(1), lambda: torch.index_select(tokens, 0, self.tokens, out=rows)], rows.nbytes

    def dispatch(self, layout):
        send = self.x[self.order]
        if self.fp8:
            send = send.to(torch.float8_e4m3fn).view(torch.uint8)
        got = torch.empty(sum(self.received), send.shape[1], dtype=send.dtype, device=send.device)
        dist.all_to_all_single(got, send, self.received, self.splits)
        return got[self.tokens] if layout == "rows" else got

    def combine(self, y, weights):
        rows = torch.zeros(sum(self.received) * self.k, y.shape[1], dtype=y.dtype, device=y.device)
        rows[self.source] = y[: len(self.source)]
        k = self.k
        back = torch.empty(sum(self.splits) * k, y.shape[1], dtype=y.dtype, device=y.device)
        dist.all_to_all_single(back, rows, [n * k for n in self.splits], [n * k for n in self.received])
        out = torch.zeros(self.x.shape, dtype=torch.float32, device=y.device)
        scaled = back.view(-1, k, y.shape[1]).float() * weights[self.order][:, :, None]
        out.index_add_(0, self.order, scaled.sum(1))
        return out.to(y.dtype)


def rows_of(tokens, counts, handle, fp8):
    """The rows of a dispatch: [payload, or tokens] and, with fp8, scales."""
    n = int(counts.sum())
    rows = slice(n) if handle.index is None else handle.index[:n].long()
    return [part[rows] for part in (tokens if fp8 else [tokens])]


def case(T, H, k, E, fp8, methods, layouts, rate, rank, world, device):
    graphs = triton_dist.backend == "nvidia"
    x = torch.randn(T, H, device=device).to(torch.bfloat16)
    ids = torch.rand(T, E, device=device).topk(k).indices.to(torch.int32)
    weights = torch.rand(T, k, device=device)
    out = torch.empty(T, H, dtype=torch.bfloat16, device=device)
    if fp8:
        values, scales = quantize(x)
        x_seen = values.float() * scales.repeat_interleave(128, 1)[:, :H]
    else:
        x_seen = x.float()
    expected = x_seen * weights.sum(1, keepdim=True)
    owner = ids // (E // world)
    crossing = sum(int((owner == r).any(1).sum()) for r in range(world) if r != rank) * H * (1 if fp8 else 2)
    returning = int((owner != rank).sum()) * H * 2
    base = Baseline(x, ids.long(), E, fp8)
    say(f"{T} tokens a rank, hidden {H}, top {k} of {E}{', fp8 dispatch' if fp8 else ''}:")
    first = None  # rows of the first dispatch; all others give the same
    for method, layout in ((method, layout) for method in methods for layout in layouts):
        there = create_moe_dispatch_context(
            T, H, k, E, torch.bfloat16, fp8=fp8, method=None if method == "auto" else method, layout=layout
        )
        back = create_moe_combine_context(there)
        result = there.empty()
        moe_dispatch(x, ids, there, result, check=True)
        rows = rows_of(*result, fp8)
        first = [part.clone() for part in rows] if first is None else first
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(rows, first))
        values = rows[0].float() * (rows[1].repeat_interleave(128, 1)[:, :H] if fp8 else 1)
        y = torch.zeros(there.max_rows, H, dtype=torch.bfloat16, device=device)
        y[: len(values)] = values  # experts that change nothing: combine gives x times its weights' sum
        del rows, values
        moe_combine(y, weights, result[2], back, out.fill_(float("nan")))
        synchronize()
        error = ((out.float() - expected).norm() / expected.norm()).item()
        if not (same and error < 1e-2):
            what = f"relative error {error}{'' if same else ', other rows than of the first dispatch'}"
            raise SystemExit(f"rank {rank}: dispatch and combine by {there.method}, layout {layout}, are wrong: {what}")
        calls = [
            lambda: moe_dispatch(x, ids, there, result, check=False),  # noqa: B023
            lambda: moe_combine(y, weights, result[2], back, out),  # noqa: B023
        ]
        theirs = [lambda: base.dispatch(layout), lambda: base.combine(y, weights)]  # noqa: B023
        eager = microseconds([*calls, *theirs], samples=9)
        writing, written = base.writing() if layout == "rows" else ([], 0)
        replay = microseconds([*calls, *writing], samples=9, calls=4, graph=graphs)
        for i, (name, nbytes) in enumerate(((f"dispatch {layout}", crossing), ("combine", returning))):
            say(
                f"  {name:15} {there.method:9} {eager[i]:7.1f} [{replay[i]:7.1f}] baseline {eager[2 + i]:7.1f} "
                f"({eager[2 + i] / eager[i]:.2f}x); {nbytes / 1e6:6.1f} MB cross, link {nbytes / rate:6.1f}: "
                f"{nbytes / rate / replay[i]:.0%}"
            )
        if writing:
            fill, select = replay[2:]
            floor = max(crossing / rate, fill)
            say(
                f"  {'rows':15} {written / 1e6:6.1f} MB: fill {fill:7.1f}, select {select:7.1f}; dispatch [{replay[0]:.1f}] is "
                f"{replay[0] / floor:.2f} times the floor, {replay[0] / select:.2f} times select"
            )
        del writing
        back.free()
        there.free()


def main():
    on_cpu = triton_dist.backend == "cpu"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=("auto", *METHODS), default=["auto"])
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    args = parser.parse_args()
    rank, world, device = start((64 << 20) if on_cpu else (4 << 30))
    rate = link_rate((1 << 20) if on_cpu else (256 << 20))
    say(f"{world} ranks, {triton_dist.backend}; link {rate / 1e3:.0f} GB/s; microseconds")
    for T, H, k, E, fp8 in [(8, 256, 2, 8, True)] if on_cpu else CASES:
        case(T, H, k, E, fp8, args.methods, args.layouts, rate, rank, world, device)
    finish()


if __name__ == "__main__":
    main()
