"""Atomic operations on a peer's memory, at system scope.

All are acquire and release for the whole program: its stores before the atomic are visible to whoever reads the new
value by an atomic or a wait, and what the old value published is visible to it afterwards.
The dtypes are int32, int64, uint32, uint64, and except for `atomic_cas` fp32 and fp64. Smaller ones are refused at
compile time on every target, because they are not atomic between the ranks of all of them.
"""

import triton
import triton.language as tl

from . import target
from .device_function import device_function
from .rma import symm_at


@triton.jit
def _require_atomic(ptr, WORD: tl.constexpr, FLOAT: tl.constexpr):
    DTYPE: tl.constexpr = ptr.dtype.element_ty.name
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    WHOLE: tl.constexpr = ptr.dtype.element_ty.is_int()
    tl.static_assert(
        (BITS >= 32) and (WHOLE or FLOAT), f"dl.{WORD} is not available for dtype {DTYPE} (target {target.NAME})"
    )


@device_function(target.body("atomic_add"))
def atomic_add(ptr, value, peer, ctx, mask=None):
    """Adds `value` to the peer's copy of `ptr`.

    Args:
        ptr: pointer or block of pointers into this rank's symmetric heap (int32, int64, uint32, uint64, fp32, fp64).
        value: broadcastable to `ptr`, converted to its element type.
        peer, ctx: see `symm_at`.
        mask: int1, broadcastable to `ptr`.

    Returns: the old value(s), of the element type; undefined where masked off. On `ascend` nothing: there the old value
    would be read separately, not atomically, so a kernel that uses it does not compile.
    `ascend` refuses 64-bit dtypes, and uint32 for max and min: it has no such atomics.
    """
    _require_atomic(ptr, "atomic_add", True)
    return target.atomic_add(symm_at(ptr, peer, ctx), value, mask)


@device_function(target.body("atomic_max"))
def atomic_max(ptr, value, peer, ctx, mask=None):
    """Sets the peer's copy of `ptr` to the maximum of it and `value`. Arguments and result as `atomic_add`."""
    _require_atomic(ptr, "atomic_max", True)
    return target.atomic_max(symm_at(ptr, peer, ctx), value, mask)


@device_function(target.body("atomic_min"))
def atomic_min(ptr, value, peer, ctx, mask=None):
    """Sets the peer's copy of `ptr` to the minimum of it and `value`. Arguments and result as `atomic_add`."""
    _require_atomic(ptr, "atomic_min", True)
    return target.atomic_min(symm_at(ptr, peer, ctx), value, mask)


@device_function(target.body("atomic_xchg"))
def atomic_xchg(ptr, value, peer, ctx, mask=None):
    """Replaces the peer's copy of `ptr` by `value`. Arguments and result as `atomic_add`. Refused by `ascend`."""
    _require_atomic(ptr, "atomic_xchg", True)
    return target.atomic_xchg(symm_at(ptr, peer, ctx), value, mask)


@device_function(target.body("atomic_cas"))
def atomic_cas(ptr, compare, value, peer, ctx):
    """Replaces the peer's copy of `ptr` by `value` if it equals `compare`.

    Args:
        ptr: pointer or block of pointers into this rank's symmetric heap (int32, int64, uint32, uint64).
        compare, value: broadcastable to `ptr`, converted to its element type.
        peer, ctx: see `symm_at`.

    Returns: the old value(s); the exchange took place where they equal `compare`. Refused by `ascend`.
    """
    _require_atomic(ptr, "atomic_cas", False)
    return target.atomic_cas(symm_at(ptr, peer, ctx), compare, value)
