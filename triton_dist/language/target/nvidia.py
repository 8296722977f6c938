"""NVIDIA GPUs: a barrier, then one release at system scope; an acquire at system scope, then a barrier.

In PTX's memory model a release by one thread covers the stores of the whole program only if a barrier orders them
before it, and an acquire by one thread covers the loads of the whole program only if a barrier orders them after it.
TMA reads and writes memory through another path (the async proxy), which neither covers: see `tma_stores_done` and
`proxy_fence`. Both are part of every publish and every wait, because what they cost is small beside the trip to the
peer, and a forgotten one is wrong data that shows up rarely.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from ... import context, limits
from ..comparison import pending
from .nvidia_store import store_relaxed

__all__ = [
    "NAME", "WIDE", "LIMITED", "delta", "publish_set", "publish_add", "poll", "spin", "acquired", "fence", "quiet",
    "dot_stored", "store_relaxed",
    "atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas",
]  # fmt: skip

NAME = tl.constexpr("nvidia")
WIDE = tl.constexpr(True)
LIMITED = tl.constexpr(limits.KERNEL_WAITS_LIMITED)

_DELTAS = tl.constexpr(context.DELTAS)
_MOST_RANKS = tl.constexpr(context.MOST_RANKS)


@triton.jit
def delta(ctx, peer):
    """The word of the context table for `peer`. No kernel sees it change: the load has no side effect, so that one load serves
    all accesses to a peer, and it moves out of loops and before waits, whose acquire would have emptied the cache. So it may
    be done where the program would not have come: hence a peer that is none must not fault (context.MOST_RANKS)."""
    word = ctx + _DELTAS + (peer & (_MOST_RANKS - 1))
    found = tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [word], dtype=tl.int64, is_pure=True, pack=1)
    return found // 64 * 64  # what it is anyway; a hint would not survive here


@triton.jit
def _asm(CODE: tl.constexpr):
    tl.inline_asm_elementwise(CODE + "; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def proxy_fence():
    """Orders the async proxy after what this program has acquired: a TMA load issued later reads what a peer published.

    `wait`, `test`, `quiet` and the atomics contain it. A kernel needs it only after an acquire that it wrote itself.
    Nothing before compute capability 9.0, which has no TMA.
    """
    # No driver (cross-compiling): assume TMA. Too much is an error of ptxas, too little would be silence.
    if (not tl.target_info.is_cuda()) or tl.target_info.cuda_capability_geq(9, 0):
        _asm("fence.proxy.async.global")


@triton.jit
def tma_stores_done():
    """Waits until the TMA stores of the calling threads have reached memory, not only left shared memory.

    Triton 3.6 itself waits for the latter alone. `notify` and all that releases contain it. Nothing before compute
    capability 9.0.
    """
    if (not tl.target_info.is_cuda()) or tl.target_info.cuda_capability_geq(9, 0):
        _asm("cp.async.bulk.wait_group 0")


@triton.jit
def _before_release():
    tma_stores_done()
    tl.debug_barrier()


@triton.jit
def acquired():
    tl.debug_barrier()
    proxy_fence()


@triton.jit
def publish_set(ptr, value, mask=None):
    # A read-modify-write, not a store: it continues the release sequence of earlier publishers to the same signal.
    _before_release()
    tl.atomic_xchg(ptr, value, mask=mask, sem="release", scope="sys")


@triton.jit
def publish_add(ptr, value, mask=None):
    _before_release()
    tl.atomic_add(ptr, value, mask=mask, sem="release", scope="sys")


@triton.jit
def poll(ptr, mask=None):
    # A scalar atomic is done by one thread and its result handed to all, so a loop is uniform over the program.
    # Acquire in every turn, rather than relaxed turns and one acquire at the end: the final one would be another trip
    # to memory (or a fence by every thread), on the path that matters, the turn that succeeds.
    return tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def spin(ptr, value, cmp: tl.constexpr, TURNS: tl.constexpr = 0):
    """Polls the signal until `signal <cmp> value`; with TURNS for so many turns at most. The value seen last, the same for the
    whole program.

    One warp spins, in step, the others go on to the barrier in `acquired`. A loop of `poll` would hand every value to all
    threads by way of shared memory, two barriers a turn. Here the maximum does that once, and where the value is not used, it
    is not computed either. The warp is chosen by a block with an element a thread, so that it is one of the program's,
    whatever its number.
    """
    _ = pending(value, value, cmp)  # refuses what is no comparison
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = "s32" if BITS == 32 else "s64"
    REGISTER: tl.constexpr = "r" if BITS == 32 else "l"
    UNLESS: tl.constexpr = "le" if cmp == "gt" else ("ne" if cmp == "eq" else ("eq" if cmp == "ne" else "gt"))
    AGAIN: tl.constexpr = "lt" if cmp == "ge" else ("ge" if cmp == "lt" else UNLESS)
    LEAST: tl.constexpr = "-2147483648" if BITS == 32 else "-9223372036854775808"
    COUNTER: tl.constexpr = f".reg .u32 turns;\nmov.u32 turns, {TURNS};\n" if TURNS else ""
    COUNT: tl.constexpr = "sub.u32 turns, turns, 1;\nsetp.ne.and.u32 again, turns, 0, again;\n" if TURNS else ""
    CODE: tl.constexpr = (
        "{\n.reg .pred other, again;\n" + COUNTER + ".reg ." + WORD + " seen;\nmov." + WORD + " seen, " + LEAST + ";\n"
        "setp.ge.s32 other, $2, 32;\n@other bra done${:uid};\n"
        "turn${:uid}:\nld.acquire.sys.global." + WORD + " seen, [$1];\n"
        "setp." + AGAIN + "." + WORD + " again, seen, $3;\n" + COUNT + "@again bra turn${:uid};\n"
        "done${:uid}:\nmov." + WORD + " $0, seen;\n}"
    )
    thread = tl.arange(0, 32 * num_warps())
    wanted = tl.cast(value, ptr.dtype.element_ty)
    seen = tl.inline_asm_elementwise(
        CODE, "=" + REGISTER + ",l,r," + REGISTER, [ptr, thread, wanted], dtype=ptr.dtype.element_ty, is_pure=False, pack=1
    )
    return tl.max(seen, 0)


@triton.jit
def fence():
    # Barrier first: a thread's fence is cumulative over what the barrier ordered before it, so the stores of all
    # threads come before the later stores of each.
    _before_release()
    _asm("fence.acq_rel.sys")
    proxy_fence()  # for a TMA store after it


@triton.jit
def dot_stored():
    pass


@triton.jit
def quiet():
    _before_release()
    _asm("fence.sc.sys")
    acquired()


@triton.jit
def atomic_add(ptr, value, mask=None):
    _before_release()
    old = tl.atomic_add(ptr, value, mask=mask, sem="acq_rel", scope="sys")
    acquired()
    return old


@triton.jit
def atomic_max(ptr, value, mask=None):
    _before_release()
    old = tl.atomic_max(ptr, value, mask=mask, sem="acq_rel", scope="sys")
    acquired()
    return old


@triton.jit
def atomic_min(ptr, value, mask=None):
    _before_release()
    old = tl.atomic_min(ptr, value, mask=mask, sem="acq_rel", scope="sys")
    acquired()
    return old


@triton.jit
def atomic_xchg(ptr, value, mask=None):
    _before_release()
    old = tl.atomic_xchg(ptr, value, mask=mask, sem="acq_rel", scope="sys")
    acquired()
    return old


@triton.jit
def atomic_cas(ptr, compare, value):
    # tl.atomic_cas neither converts nor broadcasts.
    compare = tl.cast(compare, ptr.dtype.element_ty)
    value = tl.cast(value, ptr.dtype.element_ty)
    if ptr.type.is_block():
        compare = tl.broadcast_to(compare, ptr.shape)
        value = tl.broadcast_to(value, ptr.shape)
    _before_release()
    old = tl.atomic_cas(ptr, compare, value, sem="acq_rel", scope="sys")
    acquired()
    return old
