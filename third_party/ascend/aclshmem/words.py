"""Device words on aclshmem's own functions. For kernels without `tl.dot` (pure vector kernels), compiled by triton-ascend
3.2 with bin/bishengir-compile on PATH.

All pointers to symmetric memory are this rank's own; `pe` is a world rank, int32. The engine is the one that init was
told (InitAttr.option_attr.data_op_engine_type): with ROCE also ranks of other hosts are reached. aclshmem's functions use
a piece of the core's unified buffer that Triton does not know of (from 190 KiB on by its defaults for RDMA and SDMA):
keep a kernel's tiles below that.

Every call is made once by each program that reaches it, so let one program make it. SHMEM's documents add: no two
transfers to the same rank at a time over RDMA; a signal is set, never added to, between hosts.
"""

import triton
import triton.language as tl

LIBRARY = "triton_dist_aclshmem"  # how custom_call recognises these calls

_core = tl.core


def _call(name, arguments, types, builder):
    symbols = {types: (f"aclshmem_tdist_{name}", tl.int32)}
    return _core.extern_elementwise(LIBRARY, "", arguments, symbols, is_pure=False, _builder=builder)


@_core.extern
def _put_nbi(dst, src, nbytes, pe, _builder=None):
    return _call("put_nbi", [dst, src, nbytes, pe], (tl.int64, tl.int64, tl.int64, tl.int32), _builder)


@_core.extern
def _get_nbi(dst, src, nbytes, pe, _builder=None):
    return _call("get_nbi", [dst, src, nbytes, pe], (tl.int64, tl.int64, tl.int64, tl.int32), _builder)


@_core.extern
def _put_signal_nbi(dst, src, nbytes, sig, value, pe, _builder=None):
    types = tl.int64, tl.int64, tl.int64, tl.int64, tl.int32, tl.int32
    return _call("put_signal_nbi", [dst, src, nbytes, sig, value, pe], types, _builder)


@_core.extern
def _quiet(nothing, _builder=None):
    return _call("quiet", [nothing], (tl.int32,), _builder)


@triton.jit
def _nbytes(dst, src, n, WORD: tl.constexpr):
    TO: tl.constexpr = dst.dtype.element_ty.name
    FROM: tl.constexpr = src.dtype.element_ty.name
    tl.static_assert(TO == FROM, f"aclshmem.{WORD} copies memory: dst ({TO}) and src ({FROM}) must have the same dtype")
    BITS: tl.constexpr = dst.dtype.element_ty.primitive_bitwidth
    ITEMSIZE: tl.constexpr = (BITS + 7) // 8
    return tl.cast(n, tl.int64) * ITEMSIZE


@triton.jit
def put_nbi(dst, src, n, pe):
    """Begins a copy of `n` elements from this rank's `src` to rank pe's copy of symmetric `dst`.

    Args:
        dst: scalar pointer into this rank's symmetric heap.
        src: scalar pointer of the same element type; over RDMA it must be symmetric memory, too.
        n: elements, int32 or int64; the bytes may exceed 2**32.
        pe: world rank.

    Ordering: this program's earlier stores are in memory before it begins. It is under way until `quiet`.
    """
    tl.debug_barrier()
    _put_nbi(dst.to(tl.int64), src.to(tl.int64), _nbytes(dst, src, n, "put_nbi"), tl.cast(pe, tl.int32))


@triton.jit
def get_nbi(dst, src, n, pe):
    """Begins a copy of `n` elements from rank pe's copy of symmetric `src` to this rank's `dst`; see `put_nbi`.

    Ordering: `dst` may be read after `quiet`.
    """
    tl.debug_barrier()
    _get_nbi(dst.to(tl.int64), src.to(tl.int64), _nbytes(dst, src, n, "get_nbi"), tl.cast(pe, tl.int32))


@triton.jit
def put_signal_nbi(dst, src, n, sig, value, pe):
    """`put_nbi`, then sets rank pe's copy of the signal `sig` to `value`: who sees the value sees the elements.

    Args:
        sig: scalar int32 pointer to a signal of `shmem.create_signals`. The peer waits with `dl.wait`.
        value: int32. Set, so one writer a signal, and epochs that grow.
    """
    SIGNAL: tl.constexpr = sig.dtype.element_ty.name
    tl.static_assert(SIGNAL == "int32", f"aclshmem.put_signal_nbi: a signal is int32, this one is {SIGNAL}")
    tl.debug_barrier()
    _put_signal_nbi(
        dst.to(tl.int64), src.to(tl.int64), _nbytes(dst, src, n, "put_signal_nbi"), sig.to(tl.int64),
        tl.cast(value, tl.int32), tl.cast(pe, tl.int32),
    )  # fmt: skip


@triton.jit
def quiet():
    """Returns when every transfer that this program began is done: puts are visible at their targets, gets can be read."""
    _quiet(tl.cast(0, tl.int32))
    tl.debug_barrier()
