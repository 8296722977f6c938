"""The kernels behind host-side signals on NVIDIA: torch has no release and no acquire at system scope."""

import triton
import triton.language as tl


@triton.jit
def publish(signal, value, ADD: tl.constexpr):
    """Sets the signal, or adds to it: earlier work of the stream is visible to who acquires the new value."""
    if ADD:
        tl.atomic_add(signal, value, sem="release", scope="sys")
    else:
        tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit(do_not_specialize=["first", "step", "count"])
def take(first, step, count):
    """Waits until each of `count` int32 words is 1, takes it back to 0. They are at the address `first`, `step` bytes apart."""
    for i in range(count):
        word = tl.cast(first + i * step, tl.pointer_type(tl.int32))
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        while seen != 1:
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        tl.atomic_xchg(word, 0, sem="relaxed", scope="sys")
