"""AllGather-GEMM by copies and library products: the method `streams` of `allgather_gemm`.

A copy engine pushes this rank's shard into the gathered buffers of its peers, in the order in which they need it, while torch
multiplies the own shard; then torch multiplies each peer's shard as it arrives. No multiprocessor moves data, and the products
are the vendor's. num_ranks products can take longer than one of all rows, by the multiprocessors that their last waves of tiles
leave idle. Where that is estimated to be more (stream_costs.first_rows) the rank multiplies some whole waves of its own rows
until the others have arrived, and then all the rest at once: between two ranks, whose own rows lie at one end of the gathered
ones; or, with few rows, everything at once. That choice is its own, since the peers see only when it has read their shards.

Buffers change hands by `shmem.Handoffs`: a shard is pushed when its reader has multiplied the last call's. Within a call
every rank pushes first and waits afterwards, and what it waits for before a push are reads of the last call.
"""

import functools

import torch

from triton_dist import shmem

from .stream_costs import LATE_US, first_rows, parts_of, product_us, push_us, row_parts


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
        self.push, self.publishes, self.copies = (shmem.Stream(urgent=True) for _ in range(3))
        self.first_rows = functools.cache(lambda N: first_rows(M, N, K, dtype, self.num_ranks))
        pushes = push_us(M * K * dtype.itemsize) * (self.num_ranks - 1) + LATE_US
        self.hurry = functools.cache(lambda first, N: product_us(first, N, K, dtype) < pushes)
        peers = [shmem.peer_tensor(self.gathered, peer, owner.team) for peer in range(self.num_ranks)]
        self.there = [[peer[self.rank, first:last] for first, last in self.parts] for peer in peers]

    def __call__(self, a, b, out):
        others = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]
        first = self.first_rows(b.shape[1])
        hurry = self.hurry(first, b.shape[1])  # a push that begins late would end after the product
        if hurry:
            for reader in others:
                self.handoffs.claim(reader, idle=True)
        self.push.follow()
        with self.push:
            for reader in reversed(others):  # rank - 1 needs this shard first
                if not hurry:
                    self.handoffs.claim(reader)
                for part, (start, end) in enumerate(self.parts):
                    self.there[reader][part].copy_(a[start:end], non_blocking=True)
                    self.publishes.follow()
                    with self.publishes:
                        self.handoffs.publish(reader, part)
        if first < self.M:
            self.rest_at_once(a, b, out, others, first)
        else:
            self.one_by_one(a, b, out, others)
        for writer in others:
            self.handoffs.release(writer)
        if others:
            self.publishes.join()  # `a` has been read

    def one_by_one(self, a, b, out, others):
        """The own shard, then the peers'."""
        rows = out.split(self.M) if self.M else [out] * self.num_ranks
        torch.mm(a, b, out=rows[self.rank])
        # Parts of a shard are multiplied one by one only where the link is slower than the product.
        behind = product_us(self.M, b.shape[1], self.K, self.dtype) < push_us(self.M * self.K * self.dtype.itemsize)
        parts = range(len(self.parts))
        for writer in others:
            for piece in [[part] for part in parts] if behind else [parts]:
                first, last = self.parts[piece[0]][0], self.parts[piece[-1]][1]
                self.handoffs.receive(writer, *piece, idle=True)
                torch.mm(self.gathered[writer, first:last], b, out=rows[writer][first:last])

    def rest_at_once(self, a, b, out, others, first):
        """`first` of the own rows, at the end of all where they lie, then all others."""
        M, start, total = self.M, self.rank * self.M, self.num_ranks * self.M
        own, kept, rest = (0, first), (first, M), (first, total)
        if self.rank:
            own, kept, rest = (M - first, M), (0, M - first), (0, total - first)
        self.copies.follow()
        with self.copies:
            self.gathered[self.rank, slice(*kept)].copy_(a[slice(*kept)], non_blocking=True)
        if first:
            torch.mm(a[slice(*own)], b, out=out[start + own[0] : start + own[1]])
        for writer in others:
            self.handoffs.receive(writer, *range(len(self.parts)), idle=True)
        self.copies.join()
        torch.mm(self.gathered.view(total, self.K)[slice(*rest)], b, out=out[slice(*rest)])
