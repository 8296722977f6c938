"""Ascend NPUs through triton-ascend 3.2, which has the API of Triton 3.2.

`sem` and `scope` of an atomic make no fence here; `tl.debug_barrier` (PIPE_ALL: all pipelines of the core drain) is
what orders a store before its signal and a load after its wait. Known miscompiles decide the rest:
- a poll must be a block load with a barrier in the loop: a scalar load is cached, an atomic poll takes a lock;
- a set is a block store: a scalar `atomic_xchg` is deleted;
- the old value of an atomic is a separate load, a 64-bit atomic takes a lock of its own device, and `atomic_cas` is not
  atomic across devices: all three are refused;
- a kernel with a `tl.dot` runs in two halves, on a matrix core and on two vector cores. Stores of the vector half are done
  by one of the two, atomics by both: signals of such kernels are sets. And round a wait before a product the loop must be a
  `while`: in a `for` the compiler lets the matrix half run ahead of the vector half's wait;
- a pointer chosen by an `if` crashes the compiler; a load with a mask that is no range reads all lanes, a store with such a
  mask to a tile without gaps writes all lanes, those that the mask excludes with what it read;
- there is no fp8: copy such tensors through their int8 views.
"""

import triton
import triton.language as tl

from ... import context
from ..comparison import pending

__all__ = [
    "NAME", "WIDE", "LIMITED", "delta", "publish_set", "publish_add", "poll", "spin", "acquired", "fence", "quiet",
    "dot_stored", "store_relaxed",
    "atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas",
]  # fmt: skip

NAME = tl.constexpr("ascend")
WIDE = tl.constexpr(False)
LIMITED = tl.constexpr(False)

_DELTAS = tl.constexpr(context.DELTAS)


@triton.jit
def delta(ctx, peer):
    return tl.multiple_of(tl.load(ctx + _DELTAS + peer), 64)


@triton.jit
def publish_set(ptr, value, mask=None):
    lane = tl.arange(0, 1)
    tl.debug_barrier()
    tl.store(ptr + lane, value + tl.zeros((1,), ptr.dtype.element_ty))


@triton.jit
def publish_add(ptr, value, mask=None):
    _require_32_bits(ptr, 'notify with op="add"')
    tl.debug_barrier()
    tl.atomic_add(ptr, value, sem="release", scope="sys")


@triton.jit
def _require_32_bits(ptr, WORD: tl.constexpr):
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    tl.static_assert(BITS == 32, f"dl.{WORD}: the target ascend has no 64-bit atomics")


@triton.jit
def poll(ptr, mask=None):
    tl.debug_barrier()
    return tl.max(tl.load(ptr + tl.arange(0, 1), volatile=True), 0)


@triton.jit
def spin(ptr, value, cmp: tl.constexpr):
    seen = poll(ptr)
    while pending(seen, value, cmp):
        seen = poll(ptr)
    return seen


@triton.jit
def acquired():
    tl.debug_barrier()


@triton.jit
def fence():
    tl.debug_barrier()


@triton.jit
def dot_stored():
    # A kernel with a dot is split into a cube and a vector part that run apart; a barrier orders only its own part.
    # The compiler uses flags of the same 16 counters for its own pairs, from 0 on, and does not look whether a program has
    # taken one: a pair that shared its counter would be satisfied by the other's set. CANN gives programs 0 to 10.
    tl.sync_block_set("cube", "vector", 10)
    tl.sync_block_wait("cube", "vector", 10)


@triton.jit
def quiet():
    tl.debug_barrier()


@triton.jit
def store_relaxed(ptr, value, mask=None):
    # A block goes by DMA, and no public source says in which units that writes.
    tl.static_assert(False, 'dl.remote_store: sem="relaxed" is not available on the target ascend: nothing keeps words whole')


@triton.jit
def _require_signed(ptr, WORD: tl.constexpr):
    DTYPE: tl.constexpr = ptr.dtype.element_ty.name
    tl.static_assert(DTYPE != "uint32", f"dl.{WORD} is not available for dtype uint32 on the target ascend")


@triton.jit
def atomic_add(ptr, value, mask=None):
    _require_32_bits(ptr, "atomic_add")
    tl.debug_barrier()
    tl.atomic_add(ptr, value, mask=mask, sem="acq_rel", scope="sys")


@triton.jit
def atomic_max(ptr, value, mask=None):
    _require_32_bits(ptr, "atomic_max")
    _require_signed(ptr, "atomic_max")
    tl.debug_barrier()
    tl.atomic_max(ptr, value, mask=mask, sem="acq_rel", scope="sys")


@triton.jit
def atomic_min(ptr, value, mask=None):
    _require_32_bits(ptr, "atomic_min")
    _require_signed(ptr, "atomic_min")
    tl.debug_barrier()
    tl.atomic_min(ptr, value, mask=mask, sem="acq_rel", scope="sys")


@triton.jit
def atomic_xchg(ptr, value, mask=None):
    tl.static_assert(False, "dl.atomic_xchg is not available on the target ascend: its compiler deletes the store")


@triton.jit
def atomic_cas(ptr, compare, value):
    tl.static_assert(False, "dl.atomic_cas is not available on the target ascend: it is not atomic across devices")
