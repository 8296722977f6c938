"""NVIDIA GPUs: a barrier, then one release at system scope; an acquire at system scope, then a barrier.

In PTX's memory model a release by one thread covers the stores of the whole program only if a barrier orders them
before it, and an acquire by one thread covers the loads of the whole program only if a barrier orders them after it.
TMA reads and writes memory through another path (the async proxy), which neither covers: see `tma_stores_done` and
`proxy_fence`. Both are part of every publish and every wait, because what they cost is small beside the trip to the
peer, and a forgotten one is wrong data that shows up rarely.
"""

import triton
import triton.language as tl

from ... import limits

__all__ = [
    "NAME", "WIDE", "LIMITED", "publish_set", "publish_add", "poll", "acquired", "fence", "quiet", "dot_stored",
    "atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas",
]  # fmt: skip

NAME = tl.constexpr("nvidia")
WIDE = tl.constexpr(True)
LIMITED = tl.constexpr(limits.KERNEL_WAITS_LIMITED)


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
    # A scalar atomic is done by one thread and its result handed to all, so the loop is uniform over the program.
    # Acquire in every turn, rather than relaxed turns and one acquire at the end: the final one would be another trip
    # to memory (or a fence by every thread), on the path that matters, the turn that succeeds.
    return tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope="sys")


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
