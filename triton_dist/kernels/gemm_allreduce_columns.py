"""GEMM-AllReduce by copies and library products of column blocks: the method `columns` of `gemm_allreduce`.

The method `columns` of `gemm_reduce_scatter` (see there for the order of work and for how often sums are rounded). As soon as a
piece of a rank's rows is finished, a copy engine pushes it into the gathered buffers of the peers while the next one is
multiplied. Own blocks are multiplied in two halves of their rows, where this takes no wave of tiles more: the link has results
to carry earlier, and less is left after the last product.

The last piece is put by programs, for which all multiprocessors are free then, and which need no hop from one stream to
another: 25 instead of 50 us for 8 MiB. While it travels, others bring what has come before into `out` (by copies between the
products that would delay them: the driver does some of these by kernels), and each then waits for its share of the last piece.

All ranks have the same bits: each element is summed by one rank. Handoffs as there: a rank says at the beginning of a call that
its gathered buffer may be written. `ready[s][p]`, set to the number of the call, says that program p of rank s has put its
share of the last piece; the number lies in device memory, a word a program, so that a captured graph replays right. Programs
that wait for it are started after the last own product: they would keep its place on the multiprocessors.
"""

import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist import shmem

from .arguments import device_programs
from .gemm_reduce_scatter_columns import GemmReduceScatterColumns
from .gemm_reduce_scatter_streams import handoffs

CONFIG = dict(BLOCK_M=32, BLOCK_N=256, num_warps=8)


@triton.jit
def put_last_kernel(
    out, gathered, ready, calls, M, N, shard, row, first, last, stride_out, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The rows from `row` on of this rank's shard, columns first .. last - 1, from `out` into the peers' gathered buffers."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(calls + pid + tl.arange(0, 1)), 0)  # calls before this one
    rows = tl.minimum(shard, M - me * shard)
    tiles_n = tl.cdiv(last - first, BLOCK_N)
    tile = pid
    while tile < tl.cdiv(tl.maximum(rows - row, 0), BLOCK_M) * tiles_n:
        r = (row + tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        c = (first + tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        inside = (r < rows) & (c < last)
        at = tl.cast(me * shard + r, tl.int64)
        x = tl.load(out + at * stride_out + c, mask=inside)
        for i in range(1, world):
            dl.remote_store(gathered + at * N + c, x, dl.owner_first(i, me, world), ctx, inside)
        tile += programs
    for i in range(1, world):
        dl.notify(dl.signal_at(ready, me * programs + pid), dl.owner_first(i, me, world), ctx, past + 1)
    tl.debug_barrier()  # every thread has read the old count
    tl.store(calls + pid + tl.arange(0, 1), past + 1)


@triton.jit
def _copy_tiles(
    out, gathered, start, N, row, rows, first, last, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """This program's tiles of rows row .. rows - 1 of the shard that starts at `start`, columns first .. last - 1."""
    tiles_n = tl.cdiv(last - first, BLOCK_N)
    tile = tl.program_id(0)
    while tile < tl.cdiv(tl.maximum(rows - row, 0), BLOCK_M) * tiles_n:
        r = (row + tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        c = (first + tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        inside = (r < rows) & (c < last)
        at = tl.cast(start + r, tl.int64)
        tl.store(out + at * stride_out + c, tl.load(gathered + at * N + c, mask=inside), mask=inside)
        tile += tl.num_programs(0)


@triton.jit
def gather_kernel(
    out, gathered, ready, calls, M, N, shard, row, first, last, stride_out, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The peers' shards into `out`: all but their last piece, which has come, and then that one."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(calls + pid + tl.arange(0, 1)), 0)  # calls before this one
    for i in range(1, world):
        start = dl.owner_first(i, me, world) * shard
        rows = tl.minimum(shard, M - start)
        _copy_tiles(out, gathered, start, N, 0, rows, 0, first, stride_out, BLOCK_M, BLOCK_N)
        _copy_tiles(out, gathered, start, N, 0, rows, last, N, stride_out, BLOCK_M, BLOCK_N)
        _copy_tiles(out, gathered, start, N, 0, tl.minimum(row, rows), first, last, stride_out, BLOCK_M, BLOCK_N)
    for i in range(1, world):
        source = dl.owner_first(i, me, world)
        token = dl.wait(dl.signal_at(ready, source * programs + pid), past + 1, ctx)
        came, rows = dl.consume_token(gathered, token), tl.minimum(shard, M - source * shard)
        _copy_tiles(out, came, source * shard, N, row, rows, first, last, stride_out, BLOCK_M, BLOCK_N)
    tl.debug_barrier()  # every thread has read the old count
    tl.store(calls + pid + tl.arange(0, 1), past + 1)


class GemmAllReduceColumns:
    """Buffers and streams of a context for [M, N] sums of `dtype`. Symmetric memory: 2 * M * N elements and signals; M * N of
    this rank's own."""

    def __init__(self, owner, M, N, dtype):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.N, self.table = N, owner.table
        self.scatter = scatter = GemmReduceScatterColumns(owner, M, N, dtype, results_travel=True)
        self.gathered = owner.tensor((scatter.num_ranks, scatter.shard, N), dtype)
        self.there = [shmem.peer_tensor(self.gathered, peer, owner.team)[scatter.rank] for peer in range(scatter.num_ranks)]
        # (block, piece of it) in about the order in which they are finished: what is added beside products comes early
        early = [index for index, (_, _, cuts) in enumerate(scatter.blocks) if not cuts and scatter.beside]
        order = early + [index for index in range(len(scatter.blocks)) if index not in early]
        *self.pieces, self.last = [(index, piece) for index in order for piece in scatter.own[index]]
        self.handoffs = handoffs(owner, len(self.pieces) + 1, empty=False)
        self.puts = shmem.Stream(urgent=True)
        self.programs = device_programs()
        self.ready = owner.signals(scatter.num_ranks * self.programs)
        self.calls = owner.local(2, self.programs)

    def __call__(self, a, b, out):
        scatter = self.scatter
        first, last = scatter.rows(scatter.rank)
        if not scatter.others:
            scatter(a, b, out)
            return
        scatter.waits.follow()
        with scatter.waits:
            for writer in scatter.others:
                self.handoffs.release(writer)
        scatter.pushes[0].follow()
        with scatter.pushes[0]:
            for reader in scatter.others:
                self.handoffs.claim(reader, idle=True)
            claimed = scatter.waits.mark()
        finished = {}
        scatter(a, b, out[first:last], lambda number: finished.update({number: scatter.waits.mark()}))
        self.send(out, claimed, finished)
        with scatter.waits:
            for writer in scatter.others if self.pieces else ():
                self.handoffs.receive(writer, *(piece[0] for _, piece in self.pieces), idle=True)
        scatter.waits.follow(finished[self.last[1][0]])
        with scatter.waits:
            self.launch(gather_kernel, out, self.calls[1])
        for stream in (scatter.publishes, self.puts, scatter.waits):
            stream.join()

    def send(self, out, claimed, finished):
        """Gives streams the pushes of this rank's results; finished[number]: the mark of that piece."""
        scatter = self.scatter
        for turn, (index, piece) in enumerate(self.pieces):
            push = scatter.pushes[turn % 2]
            push.follow(claimed)
            push.follow(finished[piece[0]])
            (begin, end), (first, last, _), start = scatter.rows(scatter.rank, piece), scatter.blocks[index], piece[1]
            for reader in scatter.others:
                with push:
                    there = self.there[reader][start : start + end - begin, first:last]
                    shmem.copy(there, out[begin:end, first:last])
                scatter.publish(push, self.handoffs, reader, piece[0])
        self.puts.follow(claimed)
        self.puts.follow(finished[self.last[1][0]])
        with self.puts:
            self.launch(put_last_kernel, out, self.calls[0])

    def launch(self, kernel, out, calls):
        index, (_, row, _) = self.last
        columns = self.scatter.blocks[index][:2]
        sizes = self.scatter.M, self.N, self.scatter.shard, row, *columns, out.stride(0)
        kernel[(self.programs,)](out, self.gathered, self.ready, calls, *sizes, self.table, **CONFIG)
