"""The words of the device language as the CPU engine runs them: Python bodies that see a wait as a wait.

Each has the name and the parameters of the public word. Pointers arrive as `tl.tensor`; scalars as `tl.tensor`, Python
numbers or constexprs. Every access is checked before it is made, and an error names the kernel's source line.
"""

import ctypes

import numpy as np
import triton.language as tl

from ... import context
from ...errors import SymmetricAccessError, UnsupportedError
from ...interpreter import handles, memory, stock
from ...interpreter.affine import Affine
from ...interpreter.scheduler import COMPARE, Wait, ctypes_of, scheduler

SIGNAL_TYPES = ("int32", "int64")
ATOMIC_TYPES = ("int32", "int64", "uint32", "uint64", "fp32", "fp64")


def _value(x):
    if isinstance(x, tl.constexpr):
        return x.value
    return x.handle.data.item() if isinstance(x, tl.tensor) else x


def _word(table, index):
    return ctypes.c_int64.from_address(table + 8 * index).value


def _table(ctx):
    """The address of a context table, checked."""
    if not isinstance(ctx, tl.tensor) or not ctx.type.is_ptr():
        raise SymmetricAccessError(f"ctx must be the tensor of shmem.context(), got {ctx!r} ({scheduler.place()})")
    table = int(ctx.handle.data.item())
    if not table or _word(table, context.MAGIC_WORD) != context.MAGIC:
        raise SymmetricAccessError(
            "ctx is not a live context table: pass shmem.context(team) of a team that exists and a heap that is not "
            f"finalized, as the last positional argument ({scheduler.place()})"
        )
    return table


def _delta(peer, table):
    """Bytes from this rank's copy to the peer's."""
    ranks = _word(table, context.NUM_RANKS)
    peer = _value(peer)
    if not 0 <= peer < ranks:
        raise SymmetricAccessError(
            f"peer {peer} is out of range: this team has {ranks} ranks, 0 to {ranks - 1} ({scheduler.place()})"
        )
    return _word(table, context.DELTAS + peer)


def _int32(value):
    return handles.tensor_of(handles.scalar_handle(value, tl.int32))


def rank(ctx):
    return _int32(_word(_table(ctx), context.RANK))


def num_ranks(ctx):
    return _int32(_word(_table(ctx), context.NUM_RANKS))


# -- addresses


def symm_at(ptr, peer, ctx):
    table = _table(ctx)
    if not isinstance(ptr, tl.tensor) or not ptr.dtype.is_ptr():
        raise SymmetricAccessError(f"symm_at needs a pointer, got {ptr!r} ({scheduler.place()})")
    _check_local(ptr)
    if isinstance(peer, tl.tensor) and peer.type.is_block():
        deltas = np.array([_delta(p, table) for p in peer.handle.data.ravel().tolist()], np.int64)
        moved = ptr.handle.data.view(np.int64) + deltas.reshape(peer.handle.data.shape)
        return handles.tensor_of(handles.Handle(moved.view(np.uint64), ptr.dtype), moved.shape)
    return handles.shifted(ptr, _delta(peer, table))


def _check_local(ptr):
    """At least one lane must be live memory of this rank's heap; lanes of a ragged edge are masked at the access."""
    bounds, lanes = handles.addresses(ptr)
    low, high = bounds
    heap = context.heap_map
    for address in (low, high) if lanes is None else (low, high, *lanes.ravel()[:64].tolist()):
        place = heap.owner(address) if heap else None
        if place and place[0] == heap.rank and heap.allocation(place[1]):
            return
    memory.check_symmetric(low, low + 1, "symm_at")


def remote_load(ptr, peer, ctx, mask=None, other=None):
    return tl.load(symm_at(ptr, peer, ctx), mask=mask, other=other)


def remote_store(ptr, value, peer, ctx, mask=None, sem=None):
    there, sem = symm_at(ptr, peer, ctx), _value(sem)
    if sem is None:
        tl.store(there, value, mask=mask)
        return
    element = ptr.dtype.element_ty
    if sem != "relaxed":
        raise UnsupportedError(f'remote_store: sem is None or "relaxed", not {sem!r} ({scheduler.place()})')
    if element.primitive_bitwidth not in (32, 64):
        raise UnsupportedError(
            f'remote_store: sem="relaxed" stores elements of 32 or 64 bits, not {element.name} ({scheduler.place()})'
        )
    store_relaxed(there, value, mask)


def store_relaxed(ptr, value, mask=None):
    value = tl.cast(value, ptr.dtype.element_ty)
    if ptr.type.is_block():
        value = tl.broadcast_to(value, ptr.shape)
        mask = None if mask is None else tl.broadcast_to(tl.cast(mask, tl.int1), ptr.shape)
    stock.builder.store_relaxed(ptr.handle, value.handle, None if mask is None else mask.handle)


# -- memory to memory


def _pair(word, dst, src):
    for name, ptr in (("dst", dst), ("src", src)):
        if not isinstance(ptr, tl.tensor) or not ptr.type.is_ptr():
            raise SymmetricAccessError(f"{word}: {name} must be a scalar pointer, got {ptr!r} ({scheduler.place()})")
    if dst.dtype.element_ty != src.dtype.element_ty:
        raise SymmetricAccessError(
            f"{word}: dst points to {dst.dtype.element_ty}, src to {src.dtype.element_ty}; they must agree "
            f"({scheduler.place()})"
        )
    size = max(1, dst.dtype.element_ty.primitive_bitwidth // 8)
    return int(dst.handle.data.item()), int(src.handle.data.item()), size


def _share(word, pid, num_pids):
    pid, num_pids = _value(pid), _value(num_pids)
    if not 0 <= pid < num_pids:
        raise SymmetricAccessError(f"{word}: pid {pid} is not in 0 .. num_pids {num_pids} - 1 ({scheduler.place()})")
    return pid, num_pids


def _block(word, size):
    size = _value(size)
    if not isinstance(size, int) or size < 1 or size & (size - 1):
        raise SymmetricAccessError(f"{word}: BLOCK is {size!r}; give a power of two ({scheduler.place()})")
    return size


def _copy(word, dst, src, n, peer, ctx, pid, num_pids, BLOCK, remote_dst):
    to, source, size = _pair(word, dst, src)
    delta = _delta(peer, _table(ctx))
    n, block = _value(n), _block(word, BLOCK)
    pid, num_pids = _share(word, pid, num_pids)
    if n < 0:
        raise SymmetricAccessError(f"{word}: n is {n} elements ({scheduler.place()})")
    scheduler.moved()
    if n == 0:
        return
    symmetric, local = (to, source) if remote_dst else (source, to)
    memory.check_symmetric(symmetric, symmetric + n * size, word)
    memory.check(local, local + n * size, word)
    to, source = (to + delta, source) if remote_dst else (to, source + delta)
    if num_pids == 1:
        _watch_copy(word, to, source, (n,), (size,), (size,), size)
        ctypes.memmove(to, source, n * size)
        _copied()
        return
    for start in range(pid * block, n, num_pids * block):
        _watch_copy(word, to + start * size, source + start * size, (min(block, n - start),), (size,), (size,), size)
        ctypes.memmove(to + start * size, source + start * size, min(block, n - start) * size)
        _copied()


def _watch_copy(word, to, source, shape, to_strides, source_strides, size):
    if scheduler.observer is not None:
        scheduler.observer.load(Affine(source, source_strides, shape), size, False, word)
        scheduler.observer.store(Affine(to, to_strides, shape), size, word)


def _copied():
    if scheduler.observer is not None:
        scheduler.observer.load_done()


def put(dst, src, n, peer, ctx, pid=0, num_pids=1, BLOCK=1024):
    _copy("put", dst, src, n, peer, ctx, pid, num_pids, BLOCK, remote_dst=True)


def get(dst, src, n, peer, ctx, pid=0, num_pids=1, BLOCK=1024):
    _copy("get", dst, src, n, peer, ctx, pid, num_pids, BLOCK, remote_dst=False)


def _copy_2d(word, dst, src, rows, cols, dst_stride, src_stride, peer, ctx, pid, num_pids, block, remote_dst):
    to, source, size = _pair(word, dst, src)
    delta = _delta(peer, _table(ctx))
    rows, cols, to_stride, source_stride = map(_value, (rows, cols, dst_stride, src_stride))
    pid, num_pids = _share(word, pid, num_pids)
    if rows < 0 or cols < 0 or (rows > 1 and min(to_stride, source_stride) < cols):
        raise SymmetricAccessError(
            f"{word}: region of {rows} x {cols} elements with row strides {to_stride} (dst) and {source_stride} (src): "
            f"sizes must not be negative, strides not less than the columns ({scheduler.place()})"
        )
    scheduler.moved()
    if not rows or not cols:
        return
    for address, stride, symmetric in ((to, to_stride, remote_dst), (source, source_stride, not remote_dst)):
        high = address + ((rows - 1) * stride + cols) * size
        (memory.check_symmetric if symmetric else memory.check)(address, high, word)
    to, source = (to + delta, source) if remote_dst else (to, source + delta)
    unit = np.dtype(f"u{size}")
    target = memory.view(to, unit, (rows, cols), (to_stride * size, size))
    origin = memory.view(source, unit, (rows, cols), (source_stride * size, size))
    strides = (to_stride * size, size), (source_stride * size, size)
    if num_pids == 1:
        _watch_copy(word, to, source, (rows, cols), *strides, size)
        target[...] = origin
        _copied()
        return
    height, width = block
    across = -(-cols // width)
    for tile in range(pid, -(-rows // height) * across, num_pids):
        r, c = tile // across * height, tile % across * width
        shape = min(height, rows - r), min(width, cols - c)
        _watch_copy(word, to + (r * to_stride + c) * size, source + (r * source_stride + c) * size, shape, *strides, size)
        target[r : r + height, c : c + width] = origin[r : r + height, c : c + width]
        _copied()


def put_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, pid=0, num_pids=1, BLOCK_M=16, BLOCK_N=256):
    block = _block("put_2d", BLOCK_M), _block("put_2d", BLOCK_N)
    _copy_2d("put_2d", dst, src, rows, cols, dst_stride, src_stride, peer, ctx, pid, num_pids, block, True)


def get_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, pid=0, num_pids=1, BLOCK_M=16, BLOCK_N=256):
    block = _block("get_2d", BLOCK_M), _block("get_2d", BLOCK_N)
    _copy_2d("get_2d", dst, src, rows, cols, dst_stride, src_stride, peer, ctx, pid, num_pids, block, False)


def put_signal(dst, src, n, sig, peer, ctx, value=1, op="set", pid=0, num_pids=1, BLOCK=1024):
    put(dst, src, n, peer, ctx, pid, num_pids, BLOCK)
    notify(sig, peer, ctx, value, op)


# -- signals


def _signal(word, sig):
    """(address, numpy dtype, ctype) of a signal in this rank's heap, checked."""
    if not isinstance(sig, tl.tensor) or not sig.type.is_ptr():
        raise SymmetricAccessError(f"{word}: sig must be a scalar pointer, got {sig!r} ({scheduler.place()})")
    name = sig.dtype.element_ty.name
    if name not in SIGNAL_TYPES:
        raise UnsupportedError(f"{word}: signals are int32 or int64, not {name} ({scheduler.place()})")
    address, dtype = int(sig.handle.data.item()), np.dtype(name)
    if address % dtype.itemsize:
        raise SymmetricAccessError(
            f"{word}: misaligned signal: address {address:#x} is not a multiple of {dtype.itemsize} bytes "
            f"({scheduler.place()})"
        )
    memory.check_symmetric(address, address + dtype.itemsize, word)
    return address, dtype, ctypes_of[name]


def signal_at(sig, i):
    if not isinstance(sig, tl.tensor) or not sig.dtype.is_ptr() or sig.dtype.element_ty.name not in SIGNAL_TYPES:
        raise UnsupportedError(f"signal_at: sig must point to int32 or int64 signals, got {sig!r} ({scheduler.place()})")
    if sig.type.is_block() or (isinstance(i, tl.tensor) and i.type.is_block()):
        return sig + i * (context.SIGNAL_BYTES * 8 // sig.dtype.element_ty.primitive_bitwidth)
    return handles.shifted(sig, _value(i) * context.SIGNAL_BYTES)


def _integer(word, value):
    value = _value(value)
    if not isinstance(value, (int, np.integer)):
        raise UnsupportedError(f"{word}: value is {value!r}; signals hold integers ({scheduler.place()})")
    return int(value)


def _wanted(word, value, dtype):
    """An integer that the signal can have. Of another one some targets compare the lowest bits, others all."""
    value, bits = _integer(word, value), dtype.itemsize * 8
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise UnsupportedError(f"{word}: value is {value}, which no {dtype} signal ever holds ({scheduler.place()})")
    return value


def _signal_value(word, value, dtype):
    """An integer, wrapped to the signal's type as compiled code wraps it."""
    value = _integer(word, value)
    bits = dtype.itemsize * 8
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def notify(sig, peer, ctx, value=1, op="set"):
    address, dtype, _ = _signal("notify", sig)
    op = _value(op)
    if op not in ("set", "add"):
        raise UnsupportedError(f'notify: op is "set" or "add", not {op!r} ({scheduler.place()})')
    delta = _delta(peer, _table(ctx))
    scheduler.moved()
    address, value = address + delta, _signal_value("notify", value, dtype)
    if scheduler.observer is not None:
        scheduler.observer.notify(address, dtype.itemsize, op)
    handles.atomic("xchg" if op == "set" else "add", address, value, dtype)
    if scheduler.observer is not None:
        scheduler.observer.notify_done(address, dtype.itemsize, op)


def _compare_name(word, cmp):
    cmp = _value(cmp)
    if cmp not in COMPARE:
        raise UnsupportedError(f"{word}: cmp is one of {', '.join(sorted(COMPARE))}, not {cmp!r} ({scheduler.place()})")
    return cmp


def wait(sig, value, ctx, cmp="ge", n=1):
    address, dtype, ctype = _signal("wait", sig)
    cmp, value, n = _compare_name("wait", cmp), _wanted("wait", value, dtype), _value(n)
    if n < 1:
        raise SymmetricAccessError(f"wait: n is {n}; give 1 or more signals ({scheduler.place()})")
    _table(ctx)
    seen = value
    for i in range(n):
        signal = address + i * context.SIGNAL_BYTES
        memory.check_symmetric(signal, signal + dtype.itemsize, "wait")
        scheduler.moved()
        over = Wait(signal, ctype, cmp, value)
        if scheduler.observer is not None:
            scheduler.observer.waiting(over, dtype.itemsize)
        scheduler.block(over)
        handles.atomic("add", signal, 0, dtype)  # acquire
        if scheduler.observer is not None:
            scheduler.observer.waited(over, dtype.itemsize)
        seen = over.hit
    return handles.tensor_of(handles.scalar_handle(seen, sig.dtype.element_ty))


def test(sig, value, ctx, cmp="ge"):
    address, dtype, _ = _signal("test", sig)
    cmp, value = _compare_name("test", cmp), _wanted("test", value, dtype)
    _table(ctx)
    if scheduler.observer is not None:
        scheduler.observer.test(address, dtype.itemsize)
    seen = handles.atomic("add", address, 0, dtype)
    hit = COMPARE[cmp](seen, value)
    if scheduler.observer is not None:
        scheduler.observer.tested(address, dtype.itemsize, hit)
    if hit:
        scheduler.moved()
    else:
        scheduler.poll({address: np.array(seen, dtype).tobytes()}, sig.dtype.element_ty.name)
    return handles.tensor_of(handles.scalar_handle(hit, tl.int1))


def consume_token(x, token):
    return x


def _fence(ctx, complete):
    _table(ctx)
    scheduler.moved()
    if scheduler.observer is not None:
        scheduler.observer.fence(complete)


def fence(ctx):
    _fence(ctx, False)


def quiet(ctx):
    _fence(ctx, True)


# -- remote atomics


def _atomic(word, ptr, value, peer, ctx, mask):
    name = ptr.dtype.element_ty.name if isinstance(ptr, tl.tensor) and ptr.dtype.is_ptr() else repr(ptr)
    if name not in ATOMIC_TYPES:
        raise UnsupportedError(
            f"{word}: remote atomics work on {', '.join(ATOMIC_TYPES)}, not {name} ({scheduler.place()})"
        )
    call = getattr(tl, word)
    return call(symm_at(ptr, peer, ctx), value, mask=mask, sem="acq_rel", scope="sys")


def atomic_add(ptr, value, peer, ctx, mask=None):
    return _atomic("atomic_add", ptr, value, peer, ctx, mask)


def atomic_max(ptr, value, peer, ctx, mask=None):
    return _atomic("atomic_max", ptr, value, peer, ctx, mask)


def atomic_min(ptr, value, peer, ctx, mask=None):
    return _atomic("atomic_min", ptr, value, peer, ctx, mask)


def atomic_xchg(ptr, value, peer, ctx, mask=None):
    return _atomic("atomic_xchg", ptr, value, peer, ctx, mask)


def atomic_cas(ptr, compare, value, peer, ctx):
    name = ptr.dtype.element_ty.name
    if name not in ("int32", "int64", "uint32", "uint64"):
        raise UnsupportedError(f"atomic_cas: works on 32- and 64-bit integers, not {name} ({scheduler.place()})")
    compare, value = (tl.cast(x, ptr.dtype.element_ty) for x in (compare, value))
    if ptr.type.is_block():
        compare, value = (tl.broadcast_to(x, ptr.shape) for x in (compare, value))
    return tl.atomic_cas(symm_at(ptr, peer, ctx), compare, value, sem="acq_rel", scope="sys")
