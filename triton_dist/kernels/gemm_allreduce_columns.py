"""GEMM-AllReduce by copies and library products of column blocks: the method `columns` of `gemm_allreduce`.

The method `columns` of `gemm_reduce_scatter` (see there for the order of work and for how often sums are rounded). As soon as a
piece of a rank's rows is finished, a copy engine pushes it into the gathered buffers of the peers while the next one is
multiplied. Own blocks are multiplied in two halves of their rows, where this takes no wave of tiles more: the link has results
to carry earlier, and less is left after the last product.

The last piece is put by programs, for which all multiprocessors are free then, and which need no hop from one stream to
another: 25 instead of 50 us for 8 MiB. While it travels, others bring into `out` what comes before it, piece after piece, and
then their share of the last one. (Copies between the products would delay these: the driver does some by kernels.) They are
started after the last own product, for they would keep its place on the multiprocessors; and they must leave room for those
that put, for which the peers wait.

All ranks have the same bits: each element is summed by one rank. What a rank says there at the beginning of a call, that its
buffer may be written, goes for its gathered buffer, too. The words of what has come are waited for by those programs, and taken
back behind them. `ready[s][p]`, set to the number of the call, says that program p of rank s has put its share of the last
piece; the number lies in device memory, a word a program, so that a captured graph replays right.

Programs that bring results leave no room for products. Two operators on two streams, which the ranks began in different orders,
would thus wait for each other: each rank's products for the programs of the one, these for the peer's products of the other.
So in contexts that share the device (`kernels.concurrent`) one program waits, and the others begin when all has come.
"""

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import shmem

from . import stream_costs
from .arguments import device_programs, shares_device
from .gemm_reduce_scatter_columns import GemmReduceScatterColumns, handoffs

BLOCK_M, NUM_WARPS = 32, 8  # of tiles as wide as those that blocks consist of: none lies in two
PROGRAMS, REGISTERS = 2, 56  # a multiprocessor, of each kernel; of a thread, so that those of both kernels run at the same time


@triton.jit
def _tile(tile, row, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows [BLOCK_M, 1], columns [1, BLOCK_N]) of a tile of the rows from `row` on and columns first .. last - 1."""
    tiles_n = tl.cdiv(last - first, BLOCK_N)
    r = row + tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.multiple_of(first + tile % tiles_n * BLOCK_N, BLOCK_N) + tl.arange(0, BLOCK_N)
    return r[:, None], c[None, :]


@triton.jit
def _tiles(row, end, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.cdiv(tl.maximum(end - row, 0), BLOCK_M) * tl.cdiv(last - first, BLOCK_N)


@triton.jit
def put_last_kernel(
    out, gathered, ready, calls, M, N, shard, row, first, last, stride_out, ctx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The rows from `row` on of this rank's shard, columns first .. last - 1, from `out` into the peers' gathered buffers."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(calls + pid + tl.arange(0, 1)), 0)  # calls before this one
    end = tl.minimum(shard, M - me * shard)
    tile = pid
    while tile < _tiles(row, end, first, last, BLOCK_M, BLOCK_N):
        r, c = _tile(tile, row, first, last, BLOCK_M, BLOCK_N)
        inside = (r < end) & (c < N)
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
def gather_kernel(
    out, gathered, words, ready, calls, pieces, count, parts, M, N, shard, stride_out, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The peers' shards into `out`, as they come. pieces [count, 4] int32: first row, last, first column, last; the last piece
    is that of `put_last_kernel`, for the others `words`, those of Handoffs of so many parts, are waited for."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(calls + pid + tl.arange(0, 1)), 0)  # calls before this one
    piece = 0
    while piece < count:
        said = pieces + piece * 4 + tl.arange(0, 1)
        row, end = tl.max(tl.load(said), 0), tl.max(tl.load(said + 1), 0)
        first, last = tl.max(tl.load(said + 2), 0), tl.max(tl.load(said + 3), 0)
        for i in range(1, world):
            source = dl.owner_first(i, me, world)
            if piece < count - 1:
                token = dl.wait(dl.signal_at(words, source * parts + piece), 1, ctx)
                came = dl.consume_token(gathered, token)
            else:
                token = dl.wait(dl.signal_at(ready, source * programs + pid), past + 1, ctx)
                came = dl.consume_token(gathered, token)
            has = tl.minimum(end, M - source * shard)
            tile = pid
            while tile < _tiles(row, has, first, last, BLOCK_M, BLOCK_N):
                r, c = _tile(tile, row, first, last, BLOCK_M, BLOCK_N)
                inside = (r < has) & (c < N)
                at = tl.cast(source * shard + r, tl.int64)
                tl.store(out + at * stride_out + c, tl.load(came + at * N + c, mask=inside), mask=inside)
                tile += programs
        piece += 1
    tl.debug_barrier()  # every thread has read the old count
    tl.store(calls + pid + tl.arange(0, 1), past + 1)


@triton.jit
def await_kernel(words, ready, calls, count, parts, programs, ctx):
    """Waits, in one program, for all that so many programs of `gather_kernel` would wait for."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    past = tl.max(tl.load(calls + tl.arange(0, 1)), 0)  # calls before this one
    for i in range(1, world):
        source = dl.owner_first(i, me, world)
        if count > 1:
            dl.wait(dl.signal_at(words, source * parts), 1, ctx, n=count - 1)
        dl.wait(dl.signal_at(ready, source * programs), past + 1, ctx, n=programs)


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
        self.pieces = [(index, piece) for index in order for piece in scatter.own[index]]
        bounds = [(*piece[1:], *scatter.blocks[index][:2]) for index, piece in self.pieces]
        self.bounds = torch.tensor(bounds, dtype=torch.int32, device=owner.device)
        self.pushed = range(len(self.pieces) - 1)  # all but the last one
        self.parts = max(len(self.pushed), 1)
        self.handoffs = handoffs(owner, self.parts, empty=False)
        self.puts = shmem.Stream(urgent=True)
        self.programs, self.beside_others = PROGRAMS * device_programs(), shares_device()
        self.ready = owner.signals(scatter.num_ranks * self.programs)
        self.calls = owner.local(2, self.programs)

    def __call__(self, a, b, out):
        scatter = self.scatter
        first, last = scatter.rows(scatter.rank)
        if not scatter.others:
            scatter(a, b, out)
            return
        finished = {}
        claimed = scatter(a, b, out[first:last], lambda number: finished.update({number: scatter.waits.mark()}))
        made = [finished[piece[0]] for _, piece in self.pieces]
        self.send(out, claimed, made)
        scatter.waits.follow(made[-1])
        with scatter.waits:
            self.bring(out)
            for writer in scatter.others if self.pushed else ():
                self.handoffs.receive(writer, *self.pushed, idle=True)
        for stream in (scatter.publishes, self.puts, scatter.waits):
            stream.join()

    def send(self, out, claimed, made):
        """Gives streams the pushes of this rank's results. made: the marks of the pieces."""
        scatter = self.scatter
        for number in self.pushed:
            (index, piece), push = self.pieces[number], scatter.pushes[number % 2]
            push.follow(claimed)
            push.follow(made[number])
            (begin, end), (first, last, _), start = scatter.rows(scatter.rank, piece), scatter.blocks[index], piece[1]
            for reader in scatter.others:
                with push:
                    there = self.there[reader][start : start + end - begin, first:last]
                    shmem.copy(there, out[begin:end, first:last])
                # Beside programs that put, one that tells would wait until what they have stored has come.
                scatter.publish(push, self.handoffs, reader, number, idle=number < self.pushed[-1])
        self.puts.follow(claimed)
        self.puts.follow(made[-1])
        with self.puts:
            index, (_, row, _) = self.pieces[-1]
            sizes = scatter.M, self.N, scatter.shard, row, *scatter.blocks[index][:2], out.stride(0), self.table
            put_last_kernel[(self.programs,)](out, self.gathered, self.ready, self.calls[0], *sizes, **tiles())

    def bring(self, out):
        """Gives the current stream the peers' results, into `out`."""
        words, count = (self.handoffs.signals, self.ready, self.calls[1]), (len(self.pieces), self.parts)
        if self.beside_others:
            await_kernel[(1,)](*words, *count, self.programs, self.table, num_warps=1)
        sizes = self.scatter.M, self.N, self.scatter.shard, out.stride(0), self.table
        gather_kernel[(self.programs,)](
            out, self.gathered, *words, self.bounds, *count, *sizes, **tiles()
        )


def tiles():
    """Constexprs and launch options of both kernels."""
    config = dict(BLOCK_M=BLOCK_M, BLOCK_N=stream_costs.TILE_N, num_warps=NUM_WARPS)
    return config if triton_dist.backend == "cpu" else dict(config, maxnreg=REGISTERS)
