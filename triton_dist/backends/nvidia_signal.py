"""The kernels behind host-side signals on NVIDIA: torch has no release and no acquire at system scope, the driver no wait with
a limit."""

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


@triton.jit(do_not_specialize=["address"])
def tell(address):
    """Sets the int32 word at `address`, of any rank, to 1: earlier work of the stream is visible to who acquires it."""
    tl.atomic_xchg(tl.cast(address, tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["first", "step", "count"])
def take(first, step, count):
    """Waits until each of `count` int32 words is 1, takes it back to 0. They are at the address `first`, `step` bytes apart."""
    for i in range(count):
        word = tl.cast(first + i * step, tl.pointer_type(tl.int32))
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        while seen != 1:
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        tl.atomic_xchg(word, 0, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["first", "step", "count"])
def take_limited(first, step, count, table):
    """`take`, for no longer than the limit in `table` (a context table)."""
    for i in range(count):
        word = tl.cast(first + i * step, tl.pointer_type(tl.int32))
        waiting, turns, start = 1, 0, tl.full((), 0, tl.int64)
        while waiting > 0:
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            waiting = (seen != 1).to(tl.int32)
            turns += 1
            if (waiting > 0) & (turns % patience.TURNS == 0):
                start, over = patience.lost(start, table)
                if over == 1:
                    patience.give_up(word, 1, seen, "eq", start, table)
                if over > 0:
                    waiting = 0
        tl.atomic_xchg(word, 0, sem="relaxed", scope="sys")
