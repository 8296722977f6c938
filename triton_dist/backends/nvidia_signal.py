"""The kernels behind host-side signals on NVIDIA: torch has no release at system scope, the driver no wait with a limit."""

import triton
import triton.language as tl

from .. import patience


@triton.jit
def publish(signal, value, ADD: tl.constexpr):
    """Sets the signal, or adds to it: earlier work of the stream is visible to who acquires the new value."""
    if ADD:
        tl.atomic_add(signal, value, sem="release", scope="sys")
    else:
        tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def take(signal, table):
    """Waits until the signal is 1, or for the limit in `table` (a context table), and makes it 0. Acquire."""
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    waiting = (seen < 1).to(tl.int32)
    turns, start = 0, tl.full((), 0, tl.int64)
    while waiting > 0:
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
        waiting = (seen < 1).to(tl.int32)
        turns += 1
        if (waiting > 0) & (turns % patience.TURNS == 0):
            start, over = patience.lost(start, table)
            if over == 1:
                patience.give_up(signal, 1, seen, "ge", start, table)
            if over > 0:
                waiting = 0
    tl.atomic_xchg(signal, 0, sem="relaxed", scope="sys")
