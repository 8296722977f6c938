"""GEMM-AllReduce by copies and library products of column blocks: the method `columns` of `gemm_allreduce`.

The method `columns` of `gemm_reduce_scatter` (see there for the order of work and for how often sums are rounded). As soon as a
part of a rank's rows is finished, a copy engine pushes it into the gathered buffers of the peers while the next one is
multiplied, and there another copy engine brings it into `out`. Own blocks are multiplied in two halves of their rows, where
this takes no wave of tiles more: the link has results to carry earlier, and less is left after the last product. All ranks have
the same bits: each element is summed by one rank.

Pushes of results stand in two streams in turn, for in one a copy begins 8 us after the last. Handoffs as there: a rank says at
the beginning of a call that its gathered buffer may be written.
"""

from triton_dist import shmem

from .gemm_reduce_scatter_columns import GemmReduceScatterColumns
from .gemm_reduce_scatter_streams import handoffs


class GemmAllReduceColumns:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: 2 * M * N elements; M * N of this rank's
    own. A gathered buffer holds a block [S, columns] after the other, as there: between blocks whose rows are equally far
    apart the driver copies by a kernel, not by a copy engine."""

    def __init__(self, owner, M, N, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.scatter = scatter = GemmReduceScatterColumns(owner, M, N, dtype, results_travel=True)
        self.gathered = owner.tensor((scatter.num_ranks, scatter.shard * N), dtype)
        self.there = [shmem.peer_tensor(self.gathered, peer, owner.team)[scatter.rank] for peer in range(scatter.num_ranks)]
        # (block, piece of it) in about the order in which they are finished: what is added beside products comes early
        early = [index for index, (_, _, cuts) in enumerate(scatter.blocks) if not cuts and scatter.beside]
        order = early + [index for index in range(len(scatter.blocks)) if index not in early]
        self.pieces = [(index, piece) for index in order for piece in scatter.own[index]]
        self.pushes = [scatter.push, *(shmem.Stream(urgent=True) for _ in self.pieces[1:2])]
        self.handoffs = handoffs(owner, len(self.pieces), empty=False)

    def __call__(self, a, b, out):
        scatter, handoffs = self.scatter, self.handoffs
        if not scatter.others:
            scatter(a, b, out)
            return
        scatter.waits.follow()
        with scatter.waits:
            for writer in scatter.others:
                handoffs.release(writer)
        finished = {}
        first, last = scatter.rows(scatter.rank)
        scatter(a, b, out[first:last], lambda number: finished.update({number: scatter.push.mark()}))
        self.send(out, finished)
        with scatter.waits:
            for index, piece in self.pieces:
                for writer in scatter.others:
                    handoffs.receive(writer, piece[0], idle=True)
                    shmem.copy(self.part(out, index, writer, piece), scatter.block(self.gathered[writer], index, writer, piece))
        scatter.publishes.join()
        scatter.waits.join()

    def send(self, out, finished):
        """Gives streams the pushes of this rank's results; finished[number]: the mark of that piece."""
        scatter = self.scatter
        with scatter.push:
            for reader in scatter.others:
                self.handoffs.claim(reader, idle=True)
            for other in self.pushes[1:]:
                other.follow()
        for turn, (index, piece) in enumerate(self.pieces):
            push = self.pushes[turn % len(self.pushes)]
            push.follow(finished[piece[0]])
            with push:
                for reader in scatter.others:
                    there = scatter.block(self.there[reader], index, scatter.rank, piece)
                    shmem.copy(there, self.part(out, index, scatter.rank, piece))
                    scatter.publishes.follow()
                    with scatter.publishes:
                        self.handoffs.publish(reader, piece[0], idle=True)

    def part(self, out, index, owner, piece):
        """A piece of a block of the owner's rows in the result."""
        (begin, end), (first, last, _) = self.scatter.rows(owner, piece), self.scatter.blocks[index]
        return out[begin:end, first:last]
