"""All-reduce for long messages between few ranks: the method `pipelined` of `all_reduce`.

As `mesh`, everybody puts all of it to everybody and reduces all of it. But half of the programs put and the other half
reduce: reducer c takes what the peers' putters c have put, a round of PARTS blocks at a time, as soon as it is there. So the
link never waits for a reduction.

Block b belongs to pair b % pairs, whatever the size of the call. `ready[c][s]` counts the rounds of rank s's putter c, over
all calls. Two buffers take turns by the parity of the call; counts and calls lie in device memory. Why nothing is
overwritten early, for any number of ranks: a rank puts into a buffer in call e + 2 after its call e + 1 has ended, for which
every peer had put something of e + 1, after its own call e had ended and with it the reading of that buffer. In place, a
reducer also waits until this rank's putter has read `x`.
"""

import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl

from .arguments import device_programs
from .channels import ALIGN, round_up
from .launch import Launcher
from .reduce_scatter import combine, widen

BLOCK_BYTES, PARTS = 16384, 4


@triton.jit
def _reduce_block(
    out, x, slots, slot, start, count, me, OP: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Ranks 0, 1, .. in this order: this rank's x, the others' slots."""
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count  # a constant for whole blocks, which leaves their accesses wide
    own = tl.load(x + start + lanes, mask=inside)
    for src in tl.static_range(WORLD):
        value = own
        if src != me:
            value = tl.load(slots + tl.cast(slot, tl.int64) * src + start + lanes, mask=inside)
        if src == 0:
            acc = widen(value)
        else:
            acc = combine(acc, widen(value), OP)
    tl.store(out + start + lanes, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pipelined_kernel(
    x, out, staging, ready, state, n, slot, ctx,
    OP: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    me, pid = dl.rank(ctx), tl.program_id(0)
    pairs = tl.num_programs(0) // 2
    pair = pid - pid // pairs * pairs
    lanes = tl.arange(0, BLOCK)
    mine = state + pid * 2 + tl.arange(0, 1)
    FIRST: tl.constexpr = 0 if IN_PLACE else 1
    rounds = tl.max(tl.load(mine), 0)  # before this call
    call = tl.max(tl.load(mine + 1), 0) + 1
    buffer = staging + tl.cast(call % 2 * WORLD, tl.int64) * slot
    blocks = tl.cdiv(n, BLOCK)
    for first in range(pair, blocks, pairs * PARTS):
        rounds += 1
        if pid < pairs:
            for i in range(PARTS):
                start = tl.cast(first + i * pairs, tl.int64) * BLOCK
                if start + BLOCK <= n:
                    value = tl.load(x + start + lanes)
                    for step in tl.static_range(1, WORLD):
                        to = buffer + tl.cast(me, tl.int64) * slot + start + lanes
                        dl.remote_store(to, value, dl.owner_first(step, me, WORLD), ctx)
                elif start < n:
                    inside = start + lanes < n
                    value = tl.load(x + start + lanes, mask=inside)
                    for step in tl.static_range(1, WORLD):
                        to = buffer + tl.cast(me, tl.int64) * slot + start + lanes
                        dl.remote_store(to, value, dl.owner_first(step, me, WORLD), ctx, mask=inside)
            for step in tl.static_range(FIRST, WORLD):
                dl.notify(dl.signal_at(ready, pair * WORLD + me), dl.owner_first(step, me, WORLD), ctx, rounds)
        else:
            for step in tl.static_range(FIRST, WORLD):
                token = dl.wait(dl.signal_at(ready, pair * WORLD + dl.owner_first(step, me, WORLD)), rounds, ctx)
                buffer = dl.consume_token(buffer, token)
            for i in range(PARTS):
                start = tl.cast(first + i * pairs, tl.int64) * BLOCK
                if start + BLOCK <= n:
                    _reduce_block(out, x, buffer, slot, start, BLOCK, me, OP, WORLD, BLOCK)
                elif start < n:
                    _reduce_block(out, x, buffer, slot, start, n - start, me, OP, WORLD, BLOCK)
    tl.debug_barrier()  # every thread has read the old state
    tl.store(mine, rounds)
    tl.store(mine + 1, call)


class AllReducePipelined:
    """Buffers of a context. Symmetric memory: 2 * num_ranks * max_elements elements, a signal for each pair and rank."""

    method = "pipelined"

    def __init__(self, owner, max_elements, programs=None, block=None):
        """`owner`: the OperatorContext that the memory belongs to."""
        self.launch = Launcher(pipelined_kernel)
        self.world, self.table = owner.num_ranks, owner.table
        self.slot = max(round_up(max_elements), ALIGN)
        self.block = block or (256 if triton_dist.backend == "cpu" else BLOCK_BYTES // owner.dtype.itemsize)
        pairs = max((programs or device_programs()) // 2, 1)
        if programs is None and pairs > 1:  # so that the blocks of messages of usual sizes are dealt out evenly
            pairs = 1 << pairs.bit_length() - 1
        self.pairs = min(pairs, triton.cdiv(self.slot, self.block))
        self.staging = owner.tensor((2, self.world, self.slot), owner.dtype)
        self.ready = owner.signals(self.pairs * self.world)
        self.state = owner.local(2 * self.pairs, 2)

    def __call__(self, x, out, op):
        constants = dict(OP=op, WORLD=self.world, BLOCK=self.block, PARTS=PARTS, IN_PLACE=x.data_ptr() == out.data_ptr())
        arguments = (x, out, self.staging, self.ready, self.state, x.numel(), self.slot, self.table)
        self.launch((2 * self.pairs, 1, 1), arguments, constants, num_warps=16)
