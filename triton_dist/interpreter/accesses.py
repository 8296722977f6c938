"""The interpreter's accesses to memory: loads and stores, tensor descriptors, atomics. Each is checked, told to the observer
and, when it may be a look at a signal, to the scheduler.

`*policy` absorbs the cache arguments, which differ between Triton 3.6 and 3.9.
"""

import ctypes
import math
import time

import numpy as np
import triton.language as tl

from .. import context
from ..errors import SymmetricAccessError, UnsupportedError
from . import memory, observer, stock
from .affine import Affine, Constant, Rectangle
from .handles import Handle, form_of, np_dtype
from .scheduler import Wait, ctypes_of, scheduler

_POLL_LANES = 64  # a volatile load or idle atomic of at most so many lanes counts as a poll
_PATIENCE = 50  # plain scalar loads count as a poll loop after so many equal reads
_ADDITIVE = {stock.ir.ATOMIC_OP.ADD, stock.ir.ATOMIC_OP.FADD, stock.ir.ATOMIC_OP.OR, stock.ir.ATOMIC_OP.XOR}


def _words(addresses, values):
    """address -> bytes of lanes that were read."""
    return {address: value.tobytes() for address, value in zip(addresses.ravel().tolist(), values.ravel())}


def _volatile(policy, named):
    return bool(named["is_volatile"] if "is_volatile" in named else policy[-1])


class Accesses(stock.InterpreterBuilder):
    # -- memory
    def create_load(self, ptr, *policy, **named):
        return self._load(ptr, None, None, _volatile(policy, named))

    def create_masked_load(self, ptrs, mask, other, *policy, **named):
        return self._load(ptrs, mask, other, _volatile(policy, named))

    def create_store(self, ptr, val, *policy, **named):
        return self._store(ptr, val, None)

    def create_masked_store(self, ptrs, value, mask, *policy, **named):
        return self._store(ptrs, value, mask)

    def _load(self, ptrs, mask, other, volatile, watched=False):
        element = ptrs.get_element_ty()
        dtype = np_dtype(element)
        constant = form_of(other, Constant)
        fill = constant.value if constant else None if other is None else other.data
        form = form_of(ptrs)
        rectangle = None if mask is None else form_of(mask, Rectangle)
        if form is None or (mask is not None and rectangle is None):
            address = ptrs.data
            found = memory.forms_of(address, None if mask is None else mask.data)
            if found is None:
                scheduler.moved()
                if scheduler.observer is not None and not watched:
                    lanes = observer.lanes_of(address, None if mask is None else mask.data)
                    scheduler.observer.load(lanes, dtype.itemsize, volatile, "load")
                out = memory.gather(address, None if mask is None else mask.data, dtype, fill)
                if scheduler.observer is not None and not watched:
                    scheduler.observer.load_done()
                return Handle(out, element)
            form, rectangle = found
        if scheduler.observer is not None and not watched:
            part = form if rectangle is None else form.part(rectangle)
            scheduler.observer.load(part, dtype.itemsize, volatile, "load")
        out = memory.load_affine(form, rectangle, dtype, fill)
        if scheduler.observer is not None and not watched:
            scheduler.observer.load_done()
        self._note_load(form, rectangle, element, out, volatile)
        return Handle(out, element)

    def _note_load(self, form, rectangle, element, out, volatile):
        """Tells the scheduler what was read: one word, or a few by a volatile load, may be a look at a signal."""
        if scheduler.current is None:
            return
        part = form if rectangle is None else form.part(rectangle)
        lanes = math.prod(part.shape)
        if lanes > (_POLL_LANES if volatile else 1):
            scheduler.moved()
        elif lanes:
            seen = out if rectangle is None else out[rectangle.slices()]
            scheduler.poll(_words(part.array(np.uint64), seen), element.name, 1 if volatile else _PATIENCE)

    def store_relaxed(self, ptrs, value, mask):
        """Of the device language: each element, of 32 or 64 bits, by a relaxed atomic store at system scope."""
        self._check_atomic(ptrs, mask)
        self._store(ptrs, value, mask, sem="relaxed")

    def _store(self, ptrs, value, mask, watched=False, sem=None):
        scheduler.moved()
        data = value.data
        form = form_of(ptrs)
        rectangle = None if mask is None else form_of(mask, Rectangle)
        if form is None or (mask is not None and rectangle is None):
            found = memory.forms_of(ptrs.data, None if mask is None else mask.data)
        else:
            found = form, rectangle
        if scheduler.observer is not None and not watched:
            if found:
                where = found[0] if found[1] is None else found[0].part(found[1])
            else:
                where = observer.lanes_of(ptrs.data, None if mask is None else mask.data)
            scheduler.observer.store(where, data.itemsize, "store" if sem is None else f"{sem} store", sem)
        if sem is not None:
            return self._exchange(ptrs.data, data, mask)
        if found and memory.store_affine(*found, data):
            return
        address = ptrs.data
        lanes = np.ones(address.shape, np.bool_) if mask is None else np.broadcast_to(mask.data, address.shape)
        memory.check_lanes(address[lanes], data.itemsize, "store")
        stock.native.store(address, np.broadcast_to(data, address.shape), lanes)

    def _exchange(self, addresses, data, mask):
        """Words put in place of others one by one: no reader in another process sees half of one, as it may of a block copy."""
        bits = np.broadcast_to(data, addresses.shape).view(f"u{data.itemsize}")
        lanes = np.ones(addresses.shape, np.bool_) if mask is None else np.broadcast_to(mask.data, addresses.shape)
        arrays = (np.ascontiguousarray(one) for one in (addresses, bits, lanes))
        stock.native.atomic_rmw(stock.native.RMW_OP.XCHG, *arrays, stock.native.MEM_SEMANTIC.RELAXED)

    def _box(self, desc, indices):
        """A descriptor access as (addresses inside the tensor, Rectangle of the block that they fill)."""
        size = max(1, desc.base.dtype.element_ty.primitive_bitwidth // 8)
        start = [int(i.data.flat[0]) for i in indices]
        extent = [int(s.data.flat[0]) for s in desc.shape]
        strides = [int(s.data.flat[0]) * size for s in desc.strides]
        block = [int(n) for n in desc.block_shape]
        if start[-1] * size % 16:
            raise SymmetricAccessError(
                f"tensor descriptor: offset {start[-1]} of the last axis is not a multiple of 16 bytes "
                f"({scheduler.place()})"
            )
        base = int(desc.base.data.flat[0]) + sum(i * s for i, s in zip(start, strides))
        ranges = [(min(n, max(0, -i)), max(0, min(n, e - i))) for i, n, e in zip(start, block, extent)]
        return Affine(base, strides, block), Rectangle(ranges, block)

    def create_descriptor_load(self, desc, indices, *policy):
        scheduler.moved()
        element = desc.base.dtype.element_ty
        dtype = np_dtype(element)
        fill = None
        if desc.padding == stock.ir.PADDING_OPTION.PAD_NAN:
            fill = self.cast_impl(Handle(np.array([np.nan], np.float32), tl.float32), element).data
        form, rectangle = self._box(desc, indices)
        if scheduler.observer is not None:
            scheduler.observer.load(form.part(rectangle), dtype.itemsize, False, "descriptor load")
        out = Handle(memory.load_affine(form, rectangle, dtype, fill), element)
        if scheduler.observer is not None:
            scheduler.observer.load_done()
        if getattr(desc, "round_f32_to_tf32", False) and element == tl.float32:
            return Handle(stock.round_to_tf32(out.data), element)
        return out

    def create_descriptor_store(self, desc, value, indices, *policy):
        scheduler.moved()
        form, rectangle = self._box(desc, indices)
        if scheduler.observer is not None:
            scheduler.observer.store(form.part(rectangle), value.data.itemsize, "descriptor store")
        if not memory.store_affine(form, rectangle, value.data):
            raise SymmetricAccessError(f"tensor descriptor: a store with a stride of 0 ({scheduler.place()})")

    # -- atomics
    def _check_atomic(self, ptr, mask):
        element = ptr.get_element_ty()
        size = max(1, element.primitive_bitwidth // 8)
        address = ptr.data
        lanes = address.ravel() if mask is None else address[np.broadcast_to(mask.data, address.shape)]
        if not lanes.size:
            return
        heap = context.heap_map
        shared = heap is not None and any(heap.owner(a) for a in (int(lanes.min()), int(lanes.max())))
        if size < 4 and (shared or element == tl.bfloat16):
            raise UnsupportedError(
                f"an atomic on {element} is not exact between ranks; use a 32- or 64-bit type ({scheduler.place()})"
            )
        if (lanes & np.uint64(size - 1)).any():
            raise SymmetricAccessError(
                f"atomic at a misaligned address {int(lanes[0]):#x} for {element} ({scheduler.place()})"
            )
        memory.check_lanes(lanes, size, "atomic")

    def _note_atomic(self, ptr, mask, out, idle):
        lanes = ptr.data if mask is None else ptr.data[np.broadcast_to(mask.data, ptr.data.shape)]
        if idle and scheduler.current is not None and 0 < lanes.size <= _POLL_LANES:
            seen = out.data if mask is None else out.data[np.broadcast_to(mask.data, ptr.data.shape)]
            scheduler.poll(_words(lanes, seen), ptr.get_element_ty().name)
        else:
            scheduler.moved()
        return out

    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        self._check_atomic(ptr, mask)
        element, bits = val.dtype.scalar, None
        if op == stock.ir.ATOMIC_OP.XCHG:  # of floats too: Triton's compiled helper exchanges integers alone
            bits = {tl.float32: tl.uint32, tl.float64: tl.uint64}.get(element)
        given = Handle(val.data.view(np_dtype(bits)), bits) if bits else val
        idle = op in _ADDITIVE and not val.data.any()
        watched = self._watch_atomic(ptr, mask, sem, scope)
        out = super().create_atomic_rmw(op, ptr, given, mask, sem, scope)
        out = Handle(out.data.view(np_dtype(element)), element) if bits else out
        if watched is not None:
            scheduler.observer.atomic_done(*watched, not idle, adds=op != stock.ir.ATOMIC_OP.XCHG)
        same = op == stock.ir.ATOMIC_OP.XCHG and bool((out.data == val.data).all())  # a lock that is still taken, say
        return self._note_atomic(ptr, mask, out, idle=idle or same)

    def _watch_atomic(self, ptr, mask, sem, scope):
        """Tells the observer, if there is one; returns what it is told again afterwards."""
        if scheduler.observer is None:
            return None
        lanes = observer.lanes_of(ptr.data, None if mask is None else mask.data)
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        watched = lanes, size, observer.sem_name(sem), observer.scope_name(scope)
        scheduler.observer.atomic(*watched)
        return watched

    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        self._check_atomic(ptr, None)
        watched = self._watch_atomic(ptr, None, sem, scope)
        out = super().create_atomic_cas(ptr, cmp, val, sem, scope)
        if watched is not None:
            exchanged = np.broadcast_to(out.data == cmp.data, ptr.data.shape).ravel()
            scheduler.observer.atomic_done(*watched, exchanged)
        failed = bool((out.data != cmp.data).all() or (cmp.data == val.data).all())
        return self._note_atomic(ptr, None, out, idle=failed)

    def create_atomic_load(self, ptr, mask, sem, scope):
        self._check_atomic(ptr, mask)
        watched = self._watch_atomic(ptr, mask, sem, scope)
        out = self._load(ptr, mask, None, True, watched=True)
        if watched is not None:
            scheduler.observer.atomic_done(*watched, False)
        return out

    def create_atomic_store(self, ptr, val, mask, sem, scope):
        self._check_atomic(ptr, mask)
        watched = self._watch_atomic(ptr, mask, sem, scope)
        self._store(ptr, val, mask, watched=True)
        if watched is not None:
            scheduler.observer.atomic_done(*watched, True)

    def create_atomic_poll(self, ptr, expected, timeout_ns, sem, scope):
        self._check_atomic(ptr, None)
        matched = np.ones(ptr.data.shape, np.bool_)
        ctype = ctypes_of[ptr.get_element_ty().name]
        limit = None if not isinstance(timeout_ns, Handle) else time.monotonic_ns() + int(timeout_ns.data.flat[0])
        for index in np.ndindex(ptr.data.shape):
            wanted = np.broadcast_to(expected.data, ptr.data.shape)[index].item()
            wait = Wait(int(ptr.data[index]), ctype, "eq", wanted)
            if scheduler.observer is not None:
                scheduler.observer.waiting(wait, ctypes.sizeof(ctype))
            if limit is None:
                scheduler.block(wait)
            else:
                while not wait.ready() and time.monotonic_ns() < limit:
                    scheduler.pause()
                matched[index] = wait.ready()
            if scheduler.observer is not None and matched[index]:
                policy = observer.sem_name(sem), observer.scope_name(scope)
                scheduler.observer.waited(wait, ctypes.sizeof(ctype), *policy)
        return Handle(matched, tl.int1)
