"""Remote memory access: a peer's copy of an address, tiles to and from a peer, bulk put and get.

None of these words orders anything: what makes a put visible is the signal after it (`notify`, `put_signal`), and what
makes a load valid is the `wait` before it. A peer's memory is written and read by ordinary stores and loads, but for
`remote_store` with sem="relaxed".
"""

import triton
import triton.language as tl

from .. import context
from . import target
from .copy import copy, copy_2d
from .device_function import device_function

_RANK = tl.constexpr(context.RANK)
_NUM_RANKS = tl.constexpr(context.NUM_RANKS)


@device_function(target.body("rank"))
def rank(ctx):
    """This rank in the team of `ctx`, an int32 scalar in 0 .. num_ranks(ctx) - 1.

    Args:
        ctx: pointer to the int64 context table (the tensor that `shmem.context(team)` returns).
    """
    _require_context(ctx)
    return tl.load(ctx + _RANK).to(tl.int32)


@device_function(target.body("num_ranks"))
def num_ranks(ctx):
    """The number of ranks in the team of `ctx`, an int32 scalar."""
    _require_context(ctx)
    return tl.load(ctx + _NUM_RANKS).to(tl.int32)


@triton.jit
def _require_context(ctx):
    DTYPE: tl.constexpr = ctx.dtype.element_ty.name
    tl.static_assert(DTYPE == "int64", f"dl: ctx is the int64 context table of shmem.context(), not a {DTYPE} pointer")


@device_function(target.body("symm_at"))
def symm_at(ptr, peer, ctx):
    """The address that `ptr` has at `peer`.

    Args:
        ptr: pointer, or block of pointers, into this rank's symmetric heap; any element type.
        peer: team rank, int32 or int64; may be this rank. A scalar, or a block that broadcasts with `ptr`: a peer a lane.
        ctx: context table.

    Returns: `ptr` moved by a multiple of 64 bytes, of the same shape and type; loads, stores, block pointers and tensor
    descriptors work on it, and accesses stay as wide as they are on `ptr`.

    An address outside the symmetric heap is not detected when compiled. A peer outside the team is, if the kernel is
    compiled with `debug=True` (or TRITON_DEBUG=1).
    """
    return ptr + _element_delta(ptr, peer, ctx)


@triton.jit
def _element_delta(ptr, peer, ctx):
    # Elements, not bytes: an integer cast to a block of pointers crashes the Ascend compiler.
    _require_context(ctx)
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    ITEMSIZE: tl.constexpr = (BITS + 7) // 8
    # In this order: for a constant peer Triton 3.2 (Ascend) cannot compute `bool & tensor`.
    tl.device_assert((num_ranks(ctx) > peer) & (peer >= 0), "dl: the peer is not a rank of the team of ctx")
    # A multiple of 64 bytes keeps 16-byte accesses. Of the bytes, since a division by 1 is folded away with a hint of its own.
    return target.delta(ctx, peer) // ITEMSIZE


@device_function(target.body("remote_load"))
def remote_load(ptr, peer, ctx, mask=None, other=None):
    """Loads a tile from `peer` into registers: `tl.load(symm_at(ptr, peer, ctx), mask, other)`.

    Args:
        ptr: pointer or block of pointers into this rank's symmetric heap; any element type.
        peer, ctx: see `symm_at`.
        mask: int1, broadcastable to `ptr`; lanes that are False are not read.
        other: value of the masked-off lanes.

    Returns: value(s) of the element type, of the shape of `ptr`.

    Ordering: a plain load. `wait` for the peer's signal first.
    """
    return tl.load(symm_at(ptr, peer, ctx), mask=mask, other=other)


@device_function(target.body("remote_store"))
def remote_store(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = None):
    """Stores a tile from registers to `peer`: `tl.store(symm_at(ptr, peer, ctx), value, mask)`.

    Args:
        ptr: pointer or block of pointers into this rank's symmetric heap; any element type.
        value: broadcastable to `ptr`, converted to its element type.
        peer, ctx: see `symm_at`.
        mask: int1, broadcastable to `ptr`; lanes that are False are not written.
        sem: None, or "relaxed": each element, which must have 32 or 64 bits, is a relaxed atomic store at system scope.

    Ordering: a plain store. It is visible at the peer once the peer has waited for a later `notify` of this program.
    With sem="relaxed" none either, but a peer may read while it comes, by `tl.load(ptr, volatile=True)` or an atomic: it sees
    an element as it was or as it is, never a mixture, and the elements in any order. So a word must tell by itself whether it
    has come, and can tell of nothing else. 16 bytes go in one instruction where a block of one axis has as many for each
    thread; other blocks go element by element.
    Targets: sem="relaxed" is refused at compile time for other widths, and by `ascend`, which promises no whole words.
    """
    if sem is None:
        tl.store(symm_at(ptr, peer, ctx), value, mask=mask)
    else:
        _require_words(ptr, sem)
        target.store_relaxed(symm_at(ptr, peer, ctx), value, mask)


@triton.jit
def _require_words(ptr, SEM: tl.constexpr):
    DTYPE: tl.constexpr = ptr.dtype.element_ty.name
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    tl.static_assert(SEM == "relaxed", f'dl.remote_store: sem is None or "relaxed", not {SEM}')
    tl.static_assert(
        (BITS == 32) or (BITS == 64), f'dl.remote_store: sem="relaxed" stores elements of 32 or 64 bits, not {DTYPE}'
    )


@device_function(target.body("put"))
def put(dst, src, n, peer, ctx, pid=0, num_pids=1, BLOCK: tl.constexpr = 1024):
    """Copies `n` elements from this rank's memory to `peer`.

    Args:
        dst: pointer into this rank's symmetric heap; the peer's copy of it is written.
        src: pointer to any memory of this rank, of the same element type; must not overlap with what is written.
        n: number of elements, int32 or int64 (may exceed 2**31). 0 does nothing.
        peer, ctx: see `symm_at`.
        pid, num_pids: this program does blocks pid, pid + num_pids, ... of the copy, so that `num_pids` programs
            share it. Default: this program does it all.
        BLOCK: elements in flight in a program, a power of two. A larger one hides more of the link's latency.

    Accesses are 16 bytes wide where dst and src are aligned so and BLOCK gives each thread 16 bytes; only the last,
    partial block is masked.

    Ordering: plain stores; see `remote_store`. `put_signal` adds the signal.
    """
    _require_same_dtype(dst, src, "put")
    copy(symm_at(dst, peer, ctx), src, n, pid, num_pids, BLOCK)


@device_function(target.body("get"))
def get(dst, src, n, peer, ctx, pid=0, num_pids=1, BLOCK: tl.constexpr = 1024):
    """Copies `n` elements from `peer` to this rank's memory.

    Args:
        dst: pointer to any memory of this rank.
        src: pointer into this rank's symmetric heap, of the same element type; the peer's copy of it is read.
        n, peer, ctx, pid, num_pids, BLOCK: see `put`.

    Ordering: plain loads; `wait` for the peer's signal first. When `get` returns, this program's later loads see what
    it copied after a `tl.debug_barrier()`.
    """
    _require_same_dtype(dst, src, "get")
    copy(dst, symm_at(src, peer, ctx), n, pid, num_pids, BLOCK)


@triton.jit
def _require_same_dtype(dst, src, WORD: tl.constexpr):
    TO: tl.constexpr = dst.dtype.element_ty.name
    FROM: tl.constexpr = src.dtype.element_ty.name
    tl.static_assert(TO == FROM, f"dl.{WORD} copies memory: dst ({TO}) and src ({FROM}) must have the same dtype")


@device_function(target.body("put_2d"))
def put_2d(
    dst, src, rows, cols, dst_stride, src_stride, peer, ctx, pid=0, num_pids=1,
    BLOCK_M: tl.constexpr = 16, BLOCK_N: tl.constexpr = 256,
):  # fmt: skip
    """Copies a [rows, cols] region from this rank's memory to `peer`.

    Args:
        dst: pointer to the region's first element in this rank's symmetric heap; the peer's copy is written.
        src: pointer to the first element in any memory of this rank, of the same element type.
        rows, cols: extent of the region, any non-negative integers.
        dst_stride, src_stride: elements from one row to the next; the elements of a row are adjacent.
        peer, ctx: see `symm_at`.
        pid, num_pids: this program does tiles pid, pid + num_pids, ... in row-major order of tiles.
        BLOCK_M, BLOCK_N: tile, powers of two.

    Accesses are 16 bytes wide in tiles that are whole along the row, where pointers and strides are aligned so.

    Ordering: as `put`.
    """
    _require_same_dtype(dst, src, "put_2d")
    copy_2d(symm_at(dst, peer, ctx), src, rows, cols, dst_stride, src_stride, pid, num_pids, BLOCK_M, BLOCK_N)


@device_function(target.body("get_2d"))
def get_2d(
    dst, src, rows, cols, dst_stride, src_stride, peer, ctx, pid=0, num_pids=1,
    BLOCK_M: tl.constexpr = 16, BLOCK_N: tl.constexpr = 256,
):  # fmt: skip
    """Copies a [rows, cols] region from `peer` to this rank's memory.

    Args:
        dst: pointer to the region's first element in any memory of this rank.
        src: pointer to the first element in this rank's symmetric heap; the peer's copy is read.
        rows, cols, dst_stride, src_stride, peer, ctx, pid, num_pids, BLOCK_M, BLOCK_N: see `put_2d`.

    Ordering: as `get`.
    """
    _require_same_dtype(dst, src, "get_2d")
    copy_2d(dst, symm_at(src, peer, ctx), rows, cols, dst_stride, src_stride, pid, num_pids, BLOCK_M, BLOCK_N)
