"""GEMM-AllReduce by copies and library products: the method `streams` of `gemm_allreduce`.

The method `streams` of `gemm_reduce_scatter` (see there for the order of work and for how often sums are rounded), and as soon
as a part of a rank's rows is finished a copy engine pushes it into the gathered buffers of the peers while the next part is
multiplied. They copy it into their `out`. All ranks have the same bits: each row is summed by one rank.
"""

import torch

from triton_dist import shmem

from .gemm_reduce_scatter_streams import GemmReduceScatterStreams


class GemmAllReduceStreams:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: 2 * M * N elements; M * N of this rank's
    own."""

    def __init__(self, owner, M, N, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.scatter = scatter = GemmReduceScatterStreams(owner, M, N, dtype)
        self.gathered = owner.tensor((scatter.num_ranks, scatter.shard, N), dtype)
        words = scatter.num_ranks * (len(scatter.parts) + 1)
        self.handoffs = shmem.Handoffs(len(scatter.parts), owner.team, owner.signals(words))
        self.push, self.copies = shmem.Stream(urgent=True), shmem.Stream(urgent=True)
        self.there = [shmem.peer_tensor(self.gathered, peer, owner.team)[scatter.rank] for peer in range(scatter.num_ranks)]

    def __call__(self, a, b, out):
        scatter = self.scatter
        if not scatter.others:
            torch.mm(a, b, out=out)
            return
        shards = [out[rank * scatter.shard : (rank + 1) * scatter.shard] for rank in range(scatter.num_ranks)]
        self.copies.follow()  # `out` may be written

        def push(part):
            first, last = scatter.rows_of(scatter.rank, part)
            self.push.follow()  # the stream of the sums, which is the current one here
            with self.push:
                for reader in scatter.others:
                    if part == 0:
                        self.handoffs.claim(reader)
                    self.there[reader][first:last].copy_(shards[scatter.rank][first:last], non_blocking=True)
                    self.handoffs.publish(reader, part)

        scatter(a, b, shards[scatter.rank], push)
        with self.copies:
            for writer in scatter.others:
                for part in range(len(scatter.parts)):
                    first, last = scatter.rows_of(writer, part)
                    self.handoffs.receive(writer, part)
                    shards[writer][first:last].copy_(self.gathered[writer, first:last], non_blocking=True)
                self.handoffs.release(writer)
        self.copies.join()
        self.push.join()
