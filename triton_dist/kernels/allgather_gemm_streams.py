"""AllGather-GEMM by copies and library products: the method `streams` of `allgather_gemm`.

A copy engine pushes this rank's shard into the gathered buffers of its peers, in the order in which they need it, while torch
multiplies the own shard; then torch multiplies each peer's shard as it arrives. No multiprocessor moves data, and the products
are the vendor's. Where a product of all rows at once is cheaper than num_ranks products of M rows (few rows, or a last wave
of tiles that leaves most of the device idle) the rank waits for everything and multiplies once; that choice is its own, since
the peers see only when it has read its shards.

Buffers change hands by `shmem.Handoffs`: a shard is pushed when its reader has multiplied the last call's. Within a call
every rank pushes first and waits afterwards, and what it waits for before a push are reads of the last call.
"""

import torch

from triton_dist import shmem

from .stream_costs import parts_of, product_us, push_us, row_parts


class AllGatherGemmStreams:
    """Buffers and streams of a context for shards [M, K] of `dtype`. Symmetric memory: num_ranks * M * K elements."""

    def __init__(self, owner, M, K, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.M, self.K, self.dtype = M, K, dtype
        self.num_ranks, self.rank = owner.num_ranks, owner.rank
        self.gathered = owner.tensor((self.num_ranks, M, K), dtype)
        self.parts = row_parts(M, parts_of(M * K * dtype.itemsize))
        words = self.num_ranks * (len(self.parts) + 1)
        self.handoffs = shmem.Handoffs(len(self.parts), owner.team, owner.signals(words))
        self.push, self.arrivals = shmem.Stream(urgent=True), shmem.Stream()
        peers = [shmem.peer_tensor(self.gathered, peer, owner.team) for peer in range(self.num_ranks)]
        self.there = [[peer[self.rank, first:last] for first, last in self.parts] for peer in peers]

    def __call__(self, a, b, out):
        others = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]
        self.push.follow()
        with self.push:
            for reader in reversed(others):  # rank - 1 needs this shard first
                self.handoffs.claim(reader)
                for part, (first, last) in enumerate(self.parts):
                    self.there[reader][part].copy_(a[first:last], non_blocking=True)
                    self.handoffs.publish(reader, part)
        if self.at_once(b.shape[1]):
            self.gathered[self.rank].copy_(a, non_blocking=True)
            for writer in others:
                for part in range(len(self.parts)):
                    self.handoffs.receive(writer, part)
            torch.mm(self.gathered.view(-1, self.K), b, out=out)
            for writer in others:
                self.handoffs.release(writer)
        else:
            self.one_by_one(a, b, out, others)
        self.push.join()  # `a` has been read

    def one_by_one(self, a, b, out, others):
        """The peers' shards on a stream of their own, so that their first tiles fill the last wave of the own shard's."""
        self.arrivals.follow()
        rows = out.split(self.M) if self.M else [out] * self.num_ranks
        torch.mm(a, b, out=rows[self.rank])
        # Parts of a shard are multiplied one by one only where the link is slower than the product.
        behind = product_us(self.M, b.shape[1], self.K, self.dtype) < push_us(self.M * self.K * self.dtype.itemsize)
        with self.arrivals:
            for writer in others:
                shard = self.gathered[writer]
                for part, (first, last) in enumerate(self.parts):
                    self.handoffs.receive(writer, part)
                    if behind:
                        torch.mm(shard[first:last], b, out=rows[writer][first:last])
                if not behind:
                    torch.mm(shard, b, out=rows[writer])
                self.handoffs.release(writer)
        self.arrivals.join()

    def at_once(self, N):
        """Whether one product of all rows, after everything has come, is estimated to be faster."""
        push, world = push_us(self.M * self.K * self.dtype.itemsize), self.num_ranks
        shard = product_us(self.M, N, self.K, self.dtype)
        split = shard + (world - 1) * max(shard, push)
        return push * (world - 1) + product_us(world * self.M, N, self.K, self.dtype) < split
