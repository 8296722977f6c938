"""Poll loops that end by a limit of time: what they do now and then while nothing comes.

Only where a target is LIMITED: nvidia, when TRITON_DIST_WAIT_TIMEOUT was set as the process began. Otherwise nothing of this
is compiled, and a poll loop is the poll and its comparison.

A program cannot raise. The first that waits too long stops the clock of its device. Whoever finds the clock stopped does not
wait any longer, in this launch or a later one: kernels end, with wrong results, streams and captured graphs run dry. Those
that were waiting write down who they are and what they waited for, and the host raises from that (backends/nvidia_waits.py).

The clock is one word of device memory, which all who wait move on. Through it the threads of a program agree on the time,
which each of them would read for itself a little later than the others.
"""

import triton
import triton.language as tl

from . import context

TURNS = tl.constexpr(32)  # of a poll loop, about 0.6 us each, from one look at the clock to the next

_LIMIT = tl.constexpr(context.WAIT_LIMIT)
_CLOCK = tl.constexpr(context.WAIT_CLOCK)
_RECORDS = tl.constexpr(context.WAIT_RECORDS)
_KEPT = tl.constexpr(context.WAIT_RECORDS_KEPT)
_WORDS = tl.constexpr(context.WAIT_RECORD_WORDS)
_STOPPED = tl.constexpr((1 << 63) - 1)
_COMPARES = tl.constexpr(context.COMPARES)


@triton.jit
def _time():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _clock(ctx):
    """The word that all who wait move on, in nanoseconds; the next one counts those that gave up."""
    return tl.load(ctx + _CLOCK).to(tl.pointer_type(tl.int64))


@triton.jit
def lost(start, ctx):
    """(start, over): for every TURNS turns of a poll loop; first with start = 0 (int64), then with what it returned.

    over: 0 wait on; 1 give up, with `give_up`: this program has waited too long, or was waiting when another had; 2 stop at
    once, others gave up before. The same for all threads."""
    clock = _clock(ctx)
    tl.atomic_max(clock, _time(), sem="relaxed", scope="gpu")
    now = tl.atomic_max(clock, 0, sem="relaxed", scope="gpu")
    over = 0
    if now == _STOPPED:
        over = 2
        if start != 0:
            over = 1
    elif start == 0:
        start = now
    elif now - start > tl.load(ctx + _LIMIT):
        over = 1
    return start, over


@triton.jit
def give_up(signal, wanted, seen, COMPARE: tl.constexpr, start, ctx):
    """Writes down what this program waited for since `start`, and stops the clock.

    Args:
        signal: pointer to the word that did not come.
        wanted, seen: integer scalars; COMPARE: how they should have compared, "ge" and so on.
    """
    clock = _clock(ctx)
    waited = _time() - start
    place = tl.atomic_add(clock + 1, 1, sem="relaxed", scope="gpu")
    tl.atomic_xchg(clock, _STOPPED, sem="relaxed", scope="gpu")
    if place < _KEPT:
        record = tl.load(ctx + _RECORDS).to(tl.pointer_type(tl.int64)) + place * _WORDS
        tl.store(record + 1, signal.to(tl.int64))
        tl.store(record + 2, tl.cast(wanted, tl.int64))
        tl.store(record + 3, tl.cast(seen, tl.int64))
        for i in tl.static_range(len(_COMPARES)):
            if COMPARE == _COMPARES[i]:
                tl.store(record + 4, i)
        tl.store(record + 5, waited)
        for axis in tl.static_range(3):
            tl.store(record + 6 + axis, tl.program_id(axis).to(tl.int64))
            tl.store(record + 9 + axis, tl.num_programs(axis).to(tl.int64))
        # One thread stores scalars, so its fence orders them.
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(record, 1)
