"""Signals: `notify` publishes, `wait` acquires, and the words between memory and signal.

A signal is an int32 or int64 cell with 64 bytes to itself (`shmem.create_signals`). Count in epochs that only grow and
wait with `ge`: a value left by the last call then never satisfies a wait, and a fast peer may overshoot.
"""

import triton
import triton.language as tl

from .. import context, patience
from . import target
from .comparison import pending
from .device_function import device_function
from .rma import num_ranks, put, symm_at

_SIGNAL_BITS = tl.constexpr(context.SIGNAL_BYTES * 8)
_SET, _GE = tl.constexpr("set"), tl.constexpr("ge")  # Triton 3.6 takes no plain str as a default
_LIMITED = target.LIMITED  # a global of its own, so that it is part of the key of what is cached
_LANES = tl.constexpr(32)  # signals handled at a time where the target is WIDE


@triton.jit
def _require_signal(sig, WORD: tl.constexpr):
    DTYPE: tl.constexpr = sig.dtype.element_ty.name
    tl.static_assert(
        DTYPE == "int32" or DTYPE == "int64",
        f"dl.{WORD}: a signal is an int32 or int64 cell, not {DTYPE} (target {target.NAME})",
    )


@device_function(target.body("signal_at"))
def signal_at(sig, i):
    """Pointer to the `i`-th signal of `shmem.create_signals(n)`: `sig + i * (64 // itemsize)`.

    Args:
        sig: pointer to int32 or int64, the first signal.
        i: index, integer scalar or block of indices.
    """
    _require_signal(sig, "signal_at")
    BITS: tl.constexpr = sig.dtype.element_ty.primitive_bitwidth
    return sig + i * (_SIGNAL_BITS // BITS)


@device_function(target.body("notify"))
def notify(sig, peer, ctx, value=1, op: tl.constexpr = _SET):
    """Sets, or adds to, the copy of a signal at `peer`: once, by the whole program.

    Args:
        sig: pointer to an int32 or int64 signal in this rank's symmetric heap.
        peer, ctx: see `symm_at`; the peer may be this rank.
        value: integer scalar, converted to the signal's dtype.
        op: "set" or "add". Do not mix the two on one signal. With several writers use "add": a set may overwrite
            another before anyone saw it.

    Ordering: release at system scope. Every store, put and atomic that any thread of this program issued before it, to
    any rank, is visible to whoever waits for this signal; so is all that this program had waited for before.
    Targets: all; "add" on int64 is refused by `ascend`, which has no 64-bit atomics.
    """
    _require_signal(sig, "notify")
    tl.static_assert(op == "set" or op == "add", f'dl.notify: op is "set" or "add", not "{op}"')
    if op == "set":
        target.publish_set(symm_at(sig, peer, ctx), value)
    else:
        target.publish_add(symm_at(sig, peer, ctx), value)


@device_function()
def notify_all(sig, ctx, value=1, op: tl.constexpr = _SET):
    """`notify` to every rank of the team, this one included; in one round trip where the target can.

    Args and ordering: as `notify`.
    """
    if target.WIDE:
        _require_signal(sig, "notify_all")
        tl.static_assert(op == "set" or op == "add", f'dl.notify_all: op is "set" or "add", not "{op}"')
        world = num_ranks(ctx)
        for first in range(0, world, _LANES):
            peers = first + tl.arange(0, _LANES)
            signals = symm_at(sig, tl.minimum(peers, world - 1), ctx)
            if op == "set":
                target.publish_set(signals, value, peers < world)
            else:
                target.publish_add(signals, value, peers < world)
    else:
        for peer in range(0, num_ranks(ctx)):
            notify(sig, peer, ctx, value, op)


@device_function(target.body("wait"))
def wait(sig, value, ctx, cmp: tl.constexpr = _GE, n=1):
    """Blocks this program until this rank's signal compares true.

    Args:
        sig: pointer to an int32 or int64 signal of this rank.
        value: integer scalar that the signal's dtype can hold: the wait ends when `signal <cmp> value`.
        ctx: context table.
        cmp: "ge", "gt", "eq", "ne", "le" or "lt". With "eq" a peer that signals twice can be missed.
        n: number of consecutive signals (64 bytes apart) to wait for, all with the same value; at least 1.

    Returns: the token, the value seen in the last of the signals, of the signal's dtype. See `consume_token`.

    Ordering: acquire at system scope for the whole program: what was stored before the `notify` that ended the wait is
    seen by every later load of every thread, TMA loads included.
    A grid in which programs wait for one another must be resident as a whole (no larger than the machine, or a
    cooperative launch).
    Ascend: inside an `if`, assign the token, even if it is not used; Triton 3.2 miscompiles the bare call.
    """
    _require_signal(sig, "wait")
    if isinstance(n, tl.tensor):
        token = _wait_many(sig, value, ctx, cmp, n)
    else:
        if n == 1:
            if _LIMITED:
                token = _wait_limited(sig, value, ctx, cmp)
            else:
                token = target.spin(sig, value, cmp)
        else:
            token = _wait_many(sig, value, ctx, cmp, n)
    target.acquired()
    return token


@triton.jit
def _wait_limited(sig, value, ctx, cmp: tl.constexpr):
    token = target.spin(sig, value, cmp, patience.TURNS)
    waiting = pending(token, value, cmp).to(tl.int32)
    start = tl.full((), 0, tl.int64)
    while waiting > 0:
        start, over = patience.lost(start, ctx)
        if over == 1:
            patience.give_up(sig, value, token, cmp, start, ctx)
        if over > 0:
            waiting = 0
        else:
            token = target.spin(sig, value, cmp, patience.TURNS)
            waiting = pending(token, value, cmp).to(tl.int32)
    return token


@triton.jit
def _wait_many(sig, value, ctx, cmp: tl.constexpr, n):
    token = tl.full((), 0, sig.dtype.element_ty)
    if _LIMITED:
        turns, start = 0, tl.full((), 0, tl.int64)
    if target.WIDE:
        lanes = tl.arange(0, _LANES)
        for first in range(0, n, _LANES):
            ours = lanes < n - first
            signals = signal_at(sig, tl.minimum(first + lanes, n - 1))
            waiting = 1
            while waiting > 0:  # carries scalars alone: Triton 3.6 fails on a block carried round a while
                seen = target.poll(signals, ours)
                waiting = tl.sum((ours & pending(seen, value, cmp)).to(tl.int32), 0)
                token = tl.sum(tl.where(first + lanes == n - 1, seen, 0), 0)
                if _LIMITED:
                    turns += 1
                    if (waiting > 0) & (turns % patience.TURNS == 0):
                        start, over = patience.lost(start, ctx)
                        if over == 1:  # the first signal that has not come
                            late = tl.min(tl.where(ours & pending(seen, value, cmp), lanes, _LANES - 1), 0)
                            found = tl.sum(tl.where(lanes == late, seen, 0), 0)
                            patience.give_up(signal_at(sig, first + late), value, found, cmp, start, ctx)
                        if over > 0:
                            waiting = 0
    else:
        for i in range(0, n):
            token = target.poll(signal_at(sig, i))
            while pending(token, value, cmp):
                token = target.poll(signal_at(sig, i))
    return token


@device_function(target.body("test"))
def test(sig, value, ctx, cmp: tl.constexpr = _GE):
    """Whether this rank's signal compares true now: `wait` without blocking.

    Args: as `wait`.

    Returns: int1 scalar, the same for the whole program. Ordering: when it is true, as `wait`; when false, none.
    """
    _require_signal(sig, "test")
    seen = target.poll(sig)
    target.acquired()
    return pending(seen, value, cmp) == 0


@device_function(target.body("consume_token"))
def consume_token(x, token):
    """Returns `x`, tied to the wait that returned `token`: says which wait makes `x` valid.

    Args:
        x: pointer, block of pointers or value.
        token: what `wait` returned.

    `wait` already orders every later access, so this costs nothing and changes nothing: it is for who reads the kernel.
    """
    return x


@device_function(target.body("put_signal"))
def put_signal(
    dst, src, n, sig, peer, ctx, value=1, op: tl.constexpr = _SET, pid=0, num_pids=1, BLOCK: tl.constexpr = 1024
):
    """`put`, then `notify`: the peer that waits for the signal finds the data.

    Args:
        dst, src, n, peer, ctx, pid, num_pids, BLOCK: see `put`.
        sig, value, op: see `notify`. Every calling program notifies after its own part, so when the copy is split over
            num_pids programs use op="add" and let the peer wait for num_pids times the value.

    Ordering: as `notify`.
    """
    put(dst, src, n, peer, ctx, pid, num_pids, BLOCK)
    notify(sig, peer, ctx, value, op)


@device_function(target.body("fence"))
def fence(ctx):
    """Orders memory: every store of this program before it is visible, on any rank, before any store after it."""
    target.fence()


@device_function()
def fence_dot(ctx):
    """Orders what this program computed with `tl.dot` and stored before its next `notify`.

    Call it between the two in a kernel that must also run on `ascend`, where matrix and vector units are separate cores
    that run separate halves of the program, and the notify belongs to the vector half. Loop over tiles with `while`
    there (a persistent `for` loses the synchronisation), also round a `wait` before a product, and use op="set": the vector
    half runs on two cores, and an add would count twice. Elsewhere it does nothing.
    """
    target.dot_stored()


@device_function(target.body("quiet"))
def quiet(ctx):
    """Completes: when it returns, every put, store and atomic that this program issued is visible at its peer."""
    target.quiet()
