"""The few operations in which the targets differ, chosen once by `triton_dist.backend`.

A target for a compiler (`nvidia`, `ascend`) supplies:

    NAME                        how a refusal names it (constexpr str)
    WIDE                        whether publish_* and poll take a block of signal pointers (constexpr bool)
    LIMITED                     whether waits end by a limit of time (constexpr bool), see ../../patience.py
    delta(ctx, peer)            the word of the context table for a peer: bytes, a multiple of 64
    publish_set(ptr, value, mask), publish_add(ptr, value, mask)
                                release: every store of the whole program, then the signal
    poll(ptr, mask)             reads a signal afresh; acquire; the same value for the whole program
    spin(ptr, value, cmp)       the whole poll loop, until `signal <cmp> value`; the value seen last, as poll gives it
    acquired()                  after the last poll: no thread of the program runs ahead of the acquire
    fence(), quiet()
    dot_stored()                see `fence_dot`
    store_relaxed(ptr, value, mask)
                                a relaxed atomic store at system scope of each element, of 32 or 64 bits; see `remote_store`
    atomic_add, atomic_max, atomic_min, atomic_xchg (ptr, value, mask), atomic_cas(ptr, compare, value)

For the interpreter, `interpreter.py` supplies whole bodies of the words instead: see `body`.
Where there is no interpreter and no accelerator (backend `cpu` without numpy) kernels can only be compiled; they are
compiled for `nvidia`.
"""

import triton.language as tl

from ... import backend, interpreted

if interpreted:
    from . import interpreter as _bodies
    from .interpreter import store_relaxed  # noqa: F401

    NAME = tl.constexpr("interpreter")
    WIDE = tl.constexpr(False)
    LIMITED = tl.constexpr(False)  # the engine limits them

    def dot_stored():
        """Nothing: a program runs as written."""

elif backend == "ascend":
    from .ascend import *  # noqa: F403
else:
    from .nvidia import *  # noqa: F403


def body(word):
    """The interpreter's body of the public function `word`; None when kernels are compiled."""
    return getattr(_bodies, word) if interpreted else None
