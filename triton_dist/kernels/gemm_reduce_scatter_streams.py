"""GEMM-ReduceScatter by copies and library products: the method `streams` of `gemm_reduce_scatter`.

torch multiplies the rows that peers own, part by part, then the own ones. A copy engine pushes each part into its owner's
buffer as soon as it is there, while the next one is multiplied. The product of the own rows is added, as it is stored, to what
the peers have pushed (with more than two ranks, to the sum of that): nothing is left to be done after the last product. A part
of the own rows begins when what it is added to has come, which is in time wherever a product takes longer than its push.

The products follow one another on the current stream, each of whole waves of tiles (stream_costs.py): the vendor's kernels deal
out their tiles when they start, so products at the same time do not fill each other's last waves but delay each other.

Partial sums travel in the operands' dtype, as torch.distributed's reduce_scatter sends them: each peer's is rounded once (with
more than two ranks their sum once more), they are added in fp32, and the result is rounded. For one rounding in all use the
method `kernel`.

Buffers change hands by `shmem.Handoffs`: a part is pushed when its owner has added the last call's. Within a call all that
peers wait for is given to the streams before the own waits.
"""

import torch
import triton
import triton.language as tl

from triton_dist import shmem

from .library_product import product
from .reduce_scatter import widen
from .stream_costs import groups_of, slices_of_sum

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


def sum_of_others(parts, me):
    """What the ranks but `me` have pushed, added up, of parts [num_ranks, rows, columns], each contiguous: the other one, or
    parts[me], which is overwritten."""
    if len(parts) == 2:
        return parts[1 - me]
    n = parts[0].numel()
    if n:
        grid = (triton.cdiv(n, SUM_BLOCK),)
        sum_others_kernel[grid](parts, parts.stride(0), n, ME=me, WORLD=len(parts), BLOCK=SUM_BLOCK)
    return parts[me]


class GemmReduceScatterStreams:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: M * N elements; and as many of its own.

    S = ceil(M / num_ranks) rows belong to a rank, fewer to the last ones. All are cut into the same slices of S, which are
    multiplied and pushed one by one; products of the own rows are of one or more slices.
    """

    def __init__(self, owner, M, N, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.M, self.N = M, N
        self.num_ranks, self.rank = owner.num_ranks, owner.rank
        self.shard = -(-M // self.num_ranks)
        self.arrived = owner.tensor((self.num_ranks, self.shard, N), dtype)
        self.slices = slices_of_sum(self.shard, N, dtype.itemsize)
        self.own_groups = groups_of(len(self.slices))
        self.handoffs = handoffs(owner, len(self.slices))
        self.push, self.publishes = shmem.Stream(urgent=True), shmem.Stream(urgent=True)
        self.there = [shmem.peer_tensor(self.arrived, peer, owner.team)[self.rank] for peer in range(self.num_ranks)]
        self.partial = torch.empty_like(self.arrived)  # what is on its way
        self.others = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]

    def rows_of(self, owner, group):
        """(first, last): those rows of the slices of a group, counted in the owner's shard, that the owner has."""
        has = max(min(self.shard, self.M - owner * self.shard), 0)
        return min(self.slices[group[0]][0], has), min(self.slices[group[-1]][1], has)

    def __call__(self, a, b, out):
        if not self.others:
            torch.mm(a, b, out=out)
            return
        self.send(a, b)
        self.add_own(a, b, out)
        self.publishes.join()
        for writer in self.others:
            self.handoffs.release(writer)

    def send(self, a, b):
        """Gives the current stream the products of the rows that peers own, and other streams their pushes."""
        sent = []
        for index in range(len(self.slices)):
            for owner in self.others:
                first, last = self.rows_of(owner, [index])
                torch.mm(self.rows(a, owner, first, last), b, out=self.partial[owner, first:last])
                sent.append((index, owner, self.push.mark()))
        with self.push:
            for index, owner, mark in sent:
                self.push.follow(mark)
                self.push_slice(index, owner, self.handoffs, owner, self.partial[owner], self.there[owner])

    def rows(self, a, owner, first, last):
        """Rows of a: those numbered so in the owner's shard."""
        return a[owner * self.shard + first : owner * self.shard + last]

    def receive(self, group):
        """Makes the current stream wait until the peers have pushed the slices of a group."""
        for writer in self.others:
            self.handoffs.receive(writer, *group, idle=True)

    def add_own(self, a, b, out):
        """Gives the current stream the own rows: their products, added to what the peers have pushed."""
        for group in self.own_groups:
            self.receive(group)
            first, last = self.rows_of(self.rank, group)
            others = sum_of_others(self.arrived[:, first:last], self.rank)
            product(self.rows(a, self.rank, first, last), b, out[first:last], others)

    def push_slice(self, index, owner, handoffs, reader, here, there):
        """Gives the current stream the copy of the owner's rows of a slice, `here`, into a reader's memory. Its publishing goes
        to a stream of its own: the next copy need not wait for that."""
        first, last = self.rows_of(owner, [index])
        if index == 0:
            handoffs.claim(reader)
        there[first:last].copy_(here[first:last], non_blocking=True)
        self.publishes.follow()
        with self.publishes:
            handoffs.publish(reader, index)


def handoffs(owner, slices, empty=True):
    """Handoffs of buffers of so many slices, between all ranks of an OperatorContext's team."""
    return shmem.Handoffs(slices, owner.team, owner.signals(owner.num_ranks * (slices + 1)), empty)
