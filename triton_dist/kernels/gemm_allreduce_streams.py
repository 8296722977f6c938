"""GEMM-AllReduce by copies and library products: the method `streams` of `gemm_allreduce`.

The method `streams` of `gemm_reduce_scatter` (see there for the order of work and for how often sums are rounded), and as soon
as a part of a rank's rows is finished a copy engine pushes it into the gathered buffers of the peers while the next part is
multiplied. They copy it into their `out`. All ranks have the same bits: each row is summed by one rank.
"""

from triton_dist import shmem

from .gemm_reduce_scatter_streams import GemmReduceScatterStreams, handoffs


class GemmAllReduceStreams:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: 2 * M * N elements; M * N of this rank's
    own."""

    def __init__(self, owner, M, N, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.scatter = scatter = GemmReduceScatterStreams(owner, M, N, dtype, results_travel=True)
        self.gathered = owner.tensor((scatter.num_ranks, scatter.shard, N), dtype)
        self.handoffs, self.push = handoffs(owner, len(scatter.slices)), shmem.Stream(urgent=True)
        self.there = [shmem.peer_tensor(self.gathered, peer, owner.team)[scatter.rank] for peer in range(scatter.num_ranks)]

    def __call__(self, a, b, out):
        scatter = self.scatter
        me, others = scatter.rank, scatter.others
        shards = [out[rank * scatter.shard : (rank + 1) * scatter.shard] for rank in range(scatter.num_ranks)]

        def push(group):
            self.push.follow()
            with self.push:
                for index in group:
                    for reader in others:
                        scatter.push_slice(index, me, self.handoffs, reader, shards[me], self.there[reader])

        scatter(a, b, shards[me], push)
        for index in range(len(scatter.slices)):
            for writer in others:
                first, last = scatter.rows_of(writer, [index])
                self.handoffs.receive(writer, index, idle=True)
                shards[writer][first:last].copy_(self.gathered[writer, first:last], non_blocking=True)
        for writer in others:
            self.handoffs.release(writer)
