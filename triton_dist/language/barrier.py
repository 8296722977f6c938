"""Barriers between the ranks of a team, in plain words of the language.

Each is safe in a loop and leaves its signals ready for the next call and the next launch: nothing is reset by the host.
Every rank of the team must make the same calls in the same order on the same signals. The epochs count calls: int32
signals serve 2**31 - 1 of them, int64 signals never end.

Ordering, for all: what any participating program stored before its call is visible to every participating program
after its call, on every rank.
"""

import triton
import triton.language as tl

from .device_function import device_function
from .rma import num_ranks, rank
from .signal import notify, notify_all, signal_at, wait

# Tokens are assigned though not used: inside an `if`, Triton 3.2 (Ascend) miscompiles a bare call that returns a value.


@triton.jit
def _read(sig):
    # A block of one: Ascend would read a scalar through a cache that nothing refreshes.
    return tl.max(tl.load(sig + tl.arange(0, 1)), 0)


@triton.jit
def _next_epoch(sig):
    cell = sig + tl.arange(0, 1)
    epoch = tl.load(cell) + 1
    tl.debug_barrier()  # every thread has read the old epoch
    tl.store(cell, epoch)
    return tl.max(epoch, 0)


@device_function()
def barrier_all(sig, ctx):
    """Waits until one program of every rank has called it. Call it from ONE program of each rank.

    Args:
        sig: `shmem.create_signals(num_ranks + 1)`. Signal r holds the epoch that rank r announced here, signal
            num_ranks this rank's own epoch.
        ctx: context table.
    """
    world = num_ranks(ctx)
    epoch = _next_epoch(signal_at(sig, world))
    notify_all(signal_at(sig, rank(ctx)), ctx, epoch)
    _ = wait(sig, epoch, ctx, "ge", world)


@device_function()
def barrier_clear(sig, ctx):
    """Waits until one program of every rank has called it; needs one signal, which it leaves as it found it.

    Args:
        sig: `shmem.create_signals(1)`, zero before the first call.
        ctx: context table.

    Every rank adds a credit to every rank, waits for num_ranks credits and takes them away. A fast rank may have added
    its credit for the next call before a slow rank's for this one arrives; the sum is right all the same, since the
    credits of k calls can only be there when every rank has begun its k-th call.
    """
    world = num_ranks(ctx)
    notify_all(sig, ctx, 1, "add")
    _ = wait(sig, world, ctx, "ge")
    notify(sig, rank(ctx), ctx, -world, "add")


@device_function()
def barrier_grid(sig, ctx):
    """Waits until every program of every rank's grid has called it. The grids must be resident as a whole.

    Args:
        sig: `shmem.create_signals(num_ranks + 3)`: as for `barrier_all`, then this rank's arrivals, then its gate (the
            epoch that its programs may pass).
        ctx: context table.

    The programs of a rank arrive at its program 0, which meets the other ranks and then opens the gate. Grids may
    differ in size between ranks and between launches.
    """
    world = num_ranks(ctx)
    me = rank(ctx)
    arrivals = signal_at(sig, world + 1)
    gate = signal_at(sig, world + 2)
    epoch = _read(gate) + 1
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        others = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1
        _ = wait(arrivals, others, ctx, "ge")
        notify(arrivals, me, ctx, -others, "add")
        barrier_all(sig, ctx)
        notify(gate, me, ctx, epoch)
    else:
        notify(arrivals, me, ctx, 1, "add")
        _ = wait(gate, epoch, ctx, "ge")
