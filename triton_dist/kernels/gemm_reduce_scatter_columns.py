"""GEMM-ReduceScatter by copies and library products of column blocks: the method `columns` of `gemm_reduce_scatter`.

The columns of the result are cut into blocks. The library multiplies the rows that peers own, block by block, then the own
ones. A copy engine pushes each block into its owner's buffer as soon as it is there, while the next one is multiplied. An own
block is added, as it is stored, to what the peers have pushed of it, which came while the others were multiplied. Where two
halves of a block's rows take as many waves of tiles as the whole, peers get these in turn: earlier than the whole, and the own
block is one product instead of two. But not of the only block: its own product would wait for the last push.

Products use all multiprocessors but a few (stream_costs.SPARE), and blocks are such that this costs no wave of tiles. In the
free ones a program says within 3 us that a block has been pushed, and another sees it; a stream's own write or wait for a
word takes 10 us, and up to 90 while others wait. Waits stand in a stream of their own, so a product follows the last one at
once when its block has come long before.

The last columns, if a block of them alone would leave most of a wave empty, are multiplied first, for all ranks in one product;
what the peers push of them is added at the end.

Partial sums travel in the operands' dtype, as torch.distributed's reduce_scatter sends them: each peer's is rounded once (with
more than two ranks their sum once more), they are added in fp32, and the result is rounded. For one rounding in all use the
method `kernel`.

Buffers change hands by `shmem.Handoffs`. A rank says at the beginning of a call that its buffer may be written, which is off
the critical path: no peer has anything to push before its first product. Within a call all that peers wait for is given to the
streams before the own waits.
"""

import torch

from triton_dist import shmem

from .gemm_reduce_scatter_streams import handoffs, sum_of_others
from .library_product import product
from .stream_costs import columns_of_sum


class GemmReduceScatterColumns:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: M * N elements; and as many of its own.

    S = ceil(M / num_ranks) rows belong to a rank, fewer to the last ones. A buffer holds a block [S, columns] after the other.
    """

    def __init__(self, owner, M, N, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.M, self.num_ranks, self.rank = M, owner.num_ranks, owner.rank
        self.shard = -(-M // self.num_ranks)
        self.blocks, self.merged = columns_of_sum(self.shard, N, dtype.itemsize, self.num_ranks)
        self.arrived = owner.tensor((self.num_ranks, self.shard * N), dtype)
        count = sum(len(cuts) - 1 for _, _, cuts in self.blocks)
        numbers = iter(range(count))
        # of each block: (number for the handoffs, first row, last row) of what is pushed at a time
        self.pieces = [[(next(numbers), *rows) for rows in zip(cuts, cuts[1:])] for _, _, cuts in self.blocks]
        self.handoffs = handoffs(owner, count, empty=False)
        self.push, self.publishes, self.waits = (shmem.Stream(urgent=True) for _ in range(3))
        self.there = [shmem.peer_tensor(self.arrived, peer, owner.team)[self.rank] for peer in range(self.num_ranks)]
        self.partial = torch.empty_like(self.arrived)  # what is on its way
        columns = self.blocks[0][1] - self.blocks[0][0] if self.merged else 0
        self.of_all = torch.empty(M, columns, dtype=dtype, device=owner.device)  # the merged block's product
        self.others = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]

    def rows(self, owner, piece=None):
        """(first, last) of the rows that belong to a rank, or of a piece of them."""
        _, first, last = piece or (0, 0, self.shard)
        return tuple(min(owner * self.shard + row, self.M) for row in (first, last))

    def block(self, buffer, index, owner, piece=None):
        """A block's rows of `owner`, or a piece of them, in a buffer of this or another rank, or in several, [n, S * N]."""
        (first, last, _), (begin, end) = self.blocks[index], self.rows(owner, piece)
        start = self.shard * first + (begin - self.rows(owner)[0]) * (last - first)
        size = end - begin, last - first
        return buffer[..., start : start + size[0] * size[1]].unflatten(-1, size)

    def __call__(self, a, b, out):
        if not self.others:
            torch.mm(a, b, out=out)
            return
        self.waits.follow()
        self.push.follow()
        with self.waits:
            for writer in self.others:
                self.handoffs.release(writer)
        self.send(a, b)
        self.add_own(a, b, out)
        self.publishes.join()

    def send(self, a, b):
        """Gives the current stream the products of the rows that peers own, and other streams their pushes."""
        sent = []
        for index, (first, last, _) in enumerate(self.blocks):
            columns, of_all = b[:, first:last], self.merged and index == 0
            if of_all:
                product(a, columns, self.of_all, spare=True)
            for piece in self.pieces[index]:
                for owner in self.others:
                    begin, end = self.rows(owner, piece)
                    if of_all:
                        part = self.of_all[begin:end]
                    else:
                        part = self.block(self.partial[owner], index, owner, piece)
                        product(a[begin:end], columns, part, spare=True)
                    sent.append((index, piece, owner, part, self.push.mark()))
        with self.push:
            for owner in self.others:
                self.handoffs.claim(owner, idle=True)
            for index, piece, owner, part, mark in sent:
                self.push.follow(mark)
                self.block(self.there[owner], index, owner, piece).copy_(part, non_blocking=True)
                self.publishes.follow()
                with self.publishes:
                    self.handoffs.publish(owner, piece[0], idle=True)

    def add_own(self, a, b, out):
        """Gives the current stream the own rows: their products, added to what the peers have pushed."""
        begin, end = self.rows(self.rank)
        for index, (first, last, _) in enumerate(self.blocks):
            with self.waits:
                for writer in self.others:
                    self.handoffs.receive(writer, *(number for number, _, _ in self.pieces[index]), idle=True)
            if self.merged and index == 0:
                continue
            self.waits.join()
            product(a[begin:end], b[:, first:last], out[:, first:last], self.others_of(index), spare=True)
        if self.merged:  # has come, too: the waits of later blocks stand behind its own
            first, last, _ = self.blocks[0]
            torch.add(self.of_all[begin:end], self.others_of(0), out=out[:, first:last])

    def others_of(self, index):
        """What the peers have pushed of a block, added up."""
        return sum_of_others(self.block(self.arrived, index, self.rank), self.rank)
