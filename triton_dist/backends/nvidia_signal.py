"""The kernel behind host-side signals on NVIDIA: torch has no release at system scope."""

import triton
import triton.language as tl


@triton.jit
def publish(signal, value, ADD: tl.constexpr):
    """Sets the signal, or adds to it: earlier work of the stream is visible to who acquires the new value."""
    if ADD:
        tl.atomic_add(signal, value, sem="release", scope="sys")
    else:
        tl.atomic_xchg(signal, value, sem="release", scope="sys")
