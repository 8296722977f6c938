"""GEMM-ReduceScatter by copies and library products of column blocks: the method `columns` of `gemm_reduce_scatter`.

The columns of the result are cut into blocks. The library multiplies the rows that peers own, block by block, then the own
ones. A copy engine pushes each block into its owner's buffer as soon as it is there, while the next one is multiplied. An own
block is added, as it is stored, to what the peers have pushed of it, which came while the others were multiplied.

Products use all multiprocessors but a few (stream_costs.SPARE), and blocks are such that this costs no wave of tiles. In the
free ones a program says within 3 us that a block has been pushed, and another sees it; a stream's own write or wait for a
word takes 10 us, and up to 90 while others wait. Waits stand in a stream of their own, so a product follows the last one at
once when its block has come long before. Pushes stand in two streams in turn: in one, a copy begins 6 to 11 us after the last,
in two after 3.

The last columns, if a block of them alone would leave most of a wave empty, are multiplied for all ranks in one product, after
the blocks that peers own and before the own ones: while it runs, the last of these arrive. What the peers push of it is added
in the free multiprocessors, beside the own products. Those few programs begin when the push of the same product has ended,
hence in the midst of the next one. Beginning with it they would sit where its clusters belong, pairs of multiprocessors, and
some of its tiles would wait for them: a product of 90 us took 131.

Where there is no such rest, a block that is not the only one is twice as wide if two halves of its rows take as many waves of
tiles as the whole. Peers get these in turn: earlier than the whole, and the own block is one product instead of two.

Partial sums travel in the operands' dtype, as torch.distributed's reduce_scatter sends them: each peer's is rounded once (with
more than two ranks their sum once more), they are added in fp32, and the result is rounded. For one rounding in all use the
method `kernel`.

Buffers change hands by `shmem.Handoffs`. A rank says at the beginning of a call that its buffer may be written, which is off
the critical path: no peer has anything to push before its first product. Within a call all that peers wait for is given to the
streams before the own waits.
"""

import contextlib
import itertools

import torch
import triton
import triton.language as tl

from triton_dist import shmem

from .library_product import product
from .reduce_scatter import widen
from .stream_costs import SPARE, added_beside, columns_of_sum, halves

SUM_BLOCK = 2048
ADD = dict(BLOCK_M=64, BLOCK_N=256, num_warps=16)  # 64 KiB on their way in each of few programs


@triton.jit
def add_others_kernel(
    own, parts, slot, out, M, N, stride_out, ME: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out [M, N], rows `stride_out` apart, = own plus the slots of the other ranks, in their order, in fp32, rounded once. own,
    slots: contiguous; `slot` elements lie between two slots."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    while tile < tl.cdiv(M, BLOCK_M) * tiles_n:
        row = (tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        column = (tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        inside = (row < M) & (column < N)
        at = tl.cast(row, tl.int64) * N + column
        acc = widen(tl.load(own + at, mask=inside))
        for src in tl.static_range(WORLD):
            if src != ME:
                acc += widen(tl.load(parts + tl.cast(slot, tl.int64) * src + at, mask=inside))
        tl.store(out + tl.cast(row, tl.int64) * stride_out + column, acc.to(out.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)


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


def handoffs(owner, slices, empty=True):
    """Handoffs of buffers of so many slices, between all ranks of an OperatorContext's team."""
    return shmem.Handoffs(slices, owner.team, owner.signals(owner.num_ranks * (slices + 1)), empty)


def _numbered(bounds):
    """[[(number, first, last)]] of what lies between the bounds in each list, numbered throughout."""
    numbers = itertools.count()
    return [[(next(numbers), *pair) for pair in itertools.pairwise(some)] for some in bounds]


class GemmReduceScatterColumns:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: M * N elements; and as many of its own.

    S = ceil(M / num_ranks) rows belong to a rank, fewer to the last ones. A buffer holds a block [S, columns] after the other.
    """

    def __init__(self, owner, M, N, dtype, results_travel=False):
        """`owner`: the OperatorContext that the memory belongs to. results_travel: a part of the own rows is of use."""
        self.M, self.num_ranks, self.rank = M, owner.num_ranks, owner.rank
        self.shard = -(-M // self.num_ranks)
        self.blocks = columns_of_sum(self.shard, N, dtype.itemsize, self.num_ranks)
        self.arrived = owner.tensor((self.num_ranks, self.shard * N), dtype)
        whole = 0, self.shard
        # of each block: [(number, first row, last row)] of what is pushed, and of which own rows are finished, at a time
        self.pieces = _numbered([cuts or whole for _, _, cuts in self.blocks])
        halved = halves if results_travel else lambda rows, columns: whole
        self.own = _numbered([halved(self.shard, last - first) if cuts else whole for first, last, cuts in self.blocks])
        self.handoffs = handoffs(owner, sum(map(len, self.pieces)), empty=False)
        self.publishes, self.waits, self.adds, *self.pushes = (shmem.Stream(urgent=True) for _ in range(5))
        self.there = [shmem.peer_tensor(self.arrived, peer, owner.team)[self.rank] for peer in range(self.num_ranks)]
        self.partial = torch.empty_like(self.arrived)  # what is on its way
        columns = sum(last - first for first, last, cuts in self.blocks if not cuts)
        self.beside = added_beside(self.blocks, self.num_ranks)
        self.of_all = torch.empty(M, columns, dtype=dtype, device=owner.device)  # the product for all ranks
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

    def __call__(self, a, b, out, finished=lambda number: None):
        """`finished(number)` is called when the current stream has been given that one of the pieces `own`. Returns the mark of
        what says that all peers have begun this call, hence ended the last one."""
        if not self.others:
            torch.mm(a, b, out=out)
            return
        self.waits.follow()
        self.pushes[0].follow()
        with self.waits:
            for writer in self.others:
                self.handoffs.release(writer)
        claimed, of_all = self.send(a, b)
        self.add_own(a, b, out, of_all, finished)
        self.publishes.join()
        return claimed

    def send(self, a, b):
        """Gives the current stream the products of the rows that peers own, and other streams their pushes. Returns the marks
        of the claims and of the last push of what was multiplied for all ranks at once; None without that."""
        sent, of_all = [], None
        for index, (first, last, cuts) in enumerate(self.blocks):
            columns = b[:, first:last]
            if not cuts:
                product(a, columns, self.of_all, spare=True)
                made = self.waits.mark()
            for piece in self.pieces[index]:
                for owner in self.others:
                    begin, end = self.rows(owner, piece)
                    if cuts:
                        part = self.block(self.partial[owner], index, owner, piece)
                        product(a[begin:end], columns, part, spare=True)
                        made = self.waits.mark()
                    else:
                        part = self.of_all[begin:end]
                    sent.append((index, piece, owner, part, made))
        with self.pushes[0]:
            for owner in self.others:
                self.handoffs.claim(owner, idle=True)
            claimed = self.waits.mark()
        for turn, (index, piece, owner, part, made) in enumerate(sent):
            push = self.pushes[turn % 2]
            push.follow(claimed)
            push.follow(made)
            with push:
                self.block(self.there[owner], index, owner, piece).copy_(part, non_blocking=True)
                if not self.blocks[index][2]:
                    of_all = self.waits.mark()
            self.publish(push, self.handoffs, owner, piece[0])
        return claimed, of_all

    def publish(self, push, handoffs, reader, number, idle=True):
        """Once a copy that was given to `push` is done. In a stream of its own: the next copy need not wait for that."""
        with push:
            self.publishes.follow()
        with self.publishes:
            handoffs.publish(reader, number, idle)

    def add_own(self, a, b, out, of_all, finished):
        """Gives the current stream the own rows: their products, added to what the peers have pushed."""
        start = self.rows(self.rank)[0]
        for index, (first, last, cuts) in enumerate(self.blocks):
            with self.waits:
                for writer in self.others:
                    self.handoffs.receive(writer, *(number for number, _, _ in self.pieces[index]), idle=True)
            parts, columns = self.block(self.arrived, index, self.rank), out[:, first:last]
            if cuts or not self.beside:
                self.waits.join()
            if cuts:
                others = sum_of_others(parts, self.rank)
                for piece in self.own[index]:
                    begin, end = self.rows(self.rank, piece)
                    rows = slice(begin - start, end - start)
                    product(a[begin:end], b[:, first:last], columns[rows], others[rows], spare=True)
                    finished(piece[0])
                continue
            if self.beside:
                self.adds.follow(of_all)  # in the midst of a product
                with self.waits:
                    self.adds.follow()
            with self.adds if self.beside else contextlib.nullcontext():
                self.add(parts, columns)
                finished(self.own[index][0][0])
            if self.beside:
                self.adds.join()

    def add(self, parts, out):
        """out = the own rows of the product for all ranks, added to what the peers have pushed of it."""
        begin, end = self.rows(self.rank)
        tiles = triton.cdiv(end - begin, ADD["BLOCK_M"]) * triton.cdiv(out.shape[1], ADD["BLOCK_N"])
        if tiles:
            add_others_kernel[(min(tiles, SPARE) if self.beside else tiles,)](
                self.of_all[begin:end], parts, parts.stride(0), out, *out.shape, out.stride(0), ME=self.rank,
                WORLD=self.num_ranks, **ADD,
            )  # fmt: skip
