"""GEMM-ReduceScatter by copies and library products: the method `streams` of `gemm_reduce_scatter`.

torch multiplies the rows that peers own, part by part, then the own ones, straight into `out`. A copy engine pushes each part
into its owner's buffer as soon as it is there, while the next one is multiplied. Another stream adds to each finished part of
`out` what the peers have pushed meanwhile. So no product waits for a peer, and all that is left at the end is the sum of the
last part.

Partial sums travel in the operands' dtype, as torch.distributed's reduce_scatter sends them: each rank's is rounded once (with
more than two ranks the peers' sum once more), they are added in fp32, and the result is rounded. For one rounding in all use
the method `kernel`.

Buffers change hands by `shmem.Handoffs`: a part is pushed when its owner has summed the last call's. Within a call all that
peers wait for is given to the streams before the own waits. Work is given to the streams products first, because the host may
be slower than the device.
"""

import torch
import triton
import triton.language as tl

from triton_dist import shmem

from .reduce_scatter import widen
from .stream_costs import parts_of_sum, row_parts

SUM_BLOCK = 2048


@triton.jit
def sum_others_kernel(parts, slot, n, ME: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """The first n elements of slot ME = the other slots' sum in the order of ranks, in fp32, rounded once. `slot` elements
    lie between two slots."""
    lanes = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < n
    acc = tl.zeros((BLOCK,), tl.float32)
    for src in tl.static_range(WORLD):
        if src != ME:
            acc += widen(tl.load(parts + tl.cast(slot, tl.int64) * src + lanes, mask=inside))
    tl.store(parts + tl.cast(slot, tl.int64) * ME + lanes, acc.to(parts.dtype.element_ty), mask=inside)


class GemmReduceScatterStreams:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: M * N elements; and as many of its own.

    S = ceil(M / num_ranks) rows belong to a rank, fewer to the last ones; all are cut into the same parts of S.
    """

    def __init__(self, owner, M, N, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.M, self.N = M, N
        self.num_ranks, self.rank = owner.num_ranks, owner.rank
        self.shard = -(-M // self.num_ranks)
        self.arrived = owner.tensor((self.num_ranks, self.shard, N), dtype)
        self.parts = row_parts(self.shard, parts_of_sum(self.shard * N * dtype.itemsize))
        words = self.num_ranks * (len(self.parts) + 1)
        self.handoffs = shmem.Handoffs(len(self.parts), owner.team, owner.signals(words))
        self.push, self.sums = shmem.Stream(urgent=True), shmem.Stream(urgent=True)
        self.there = [shmem.peer_tensor(self.arrived, peer, owner.team)[self.rank] for peer in range(self.num_ranks)]
        self.partial = torch.empty_like(self.arrived)  # what is on its way
        self.others = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]

    def rows_of(self, owner, part):
        """(first, last) rows of a part of an owner's shard, counted in the shard: what of it the owner has."""
        has = max(min(self.shard, self.M - owner * self.shard), 0)
        first, last = self.parts[part]
        return min(first, has), min(last, has)

    def __call__(self, a, b, out, finished=lambda part: None):
        """`finished(part)` is called, on a stream of its own, when a part of `out` has been given to it."""
        if not self.others:
            torch.mm(a, b, out=out)
            return
        parts = range(len(self.parts))
        pairs = [(owner, part) for owner in self.others for part in parts]
        sent = [(*pair, *self.multiply(a, b, *pair, self.partial[pair[0]])) for pair in pairs]
        own = [self.multiply(a, b, self.rank, part, out) for part in parts]
        with self.push:
            for owner, part, first, last, mark in sent:
                self.push.follow(mark)
                if part == 0:
                    self.handoffs.claim(owner)
                self.there[owner][first:last].copy_(self.partial[owner, first:last], non_blocking=True)
                self.handoffs.publish(owner, part)
        with self.sums:
            for part, (first, last, mark) in enumerate(own):
                self.sums.follow(mark)
                for writer in self.others:
                    self.handoffs.receive(writer, part)
                torch.add(out[first:last], self.sum_of_others(first, last), out=out[first:last])
                if part + 1 == len(self.parts):
                    for writer in self.others:
                        self.handoffs.release(writer)
                finished(part)
        self.sums.join()
        self.push.join()

    def multiply(self, a, b, owner, part, out):
        """(first, last, mark): the rows of an owner's part of this rank's product, given to the current stream for `out`."""
        first, last = self.rows_of(owner, part)
        torch.mm(a[owner * self.shard + first : owner * self.shard + last], b, out=out[first:last])
        return first, last, self.push.mark()

    def sum_of_others(self, first, last):
        if self.num_ranks == 2:
            return self.arrived[1 - self.rank, first:last]
        rows = self.arrived[:, first:last]
        n = rows[0].numel()
        if n:
            sum_others_kernel[(triton.cdiv(n, SUM_BLOCK),)](
                rows, rows.stride(0), n, ME=self.rank, WORLD=self.num_ranks, BLOCK=SUM_BLOCK
            )
        return rows[self.rank]
