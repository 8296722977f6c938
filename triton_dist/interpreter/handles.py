"""Values inside the interpreter: numpy arrays with a Triton type, or formulas that become arrays when they are needed."""

import numpy as np
import triton.language as tl

from . import stock
from .affine import Affine, Constant, Rectangle

Handle = stock.TensorHandle
_np_dtypes = {}


def np_dtype(dtype):
    """The numpy type in which the interpreter keeps a Triton type. (Triton's own builds a dict on every call.)"""
    if dtype.is_ptr():
        return _np_dtypes.setdefault("pointer", np.dtype(np.uint64))
    found = _np_dtypes.get(dtype.scalar.name)
    if found is None:
        found = _np_dtypes[dtype.scalar.name] = stock.numpy_dtype(dtype.scalar)
    return found


class Block(Handle):
    """A handle whose data is a formula (Affine: integers and pointers; Rectangle: booleans; Constant: floats) until it is
    needed."""

    def __init__(self, form, dtype):
        self.form, self.dtype, self.attr, self._array = form, dtype, {}, None

    @property
    def data(self):
        if self._array is None:
            self._array = self.form.array(np_dtype(self.dtype))
        return self._array

    @data.setter
    def data(self, array):
        self._array, self.form = array, None


FORMS = (Affine, Rectangle, Constant)


def form_of(handle, kind=Affine):
    form = getattr(handle, "form", None)
    return form if isinstance(form, kind) else None


# -- for the device language's interpreted bodies


def scalar_handle(value, dtype):
    return Handle(np.array([value], np_dtype(dtype)), dtype)


def tensor_of(handle, shape=()):
    dtype = handle.dtype
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def shifted(ptr, amount):
    """A pointer or block of pointers moved by `amount` bytes."""
    form = form_of(ptr.handle)
    if form:
        return tl.tensor(Block(form.shift(amount), ptr.handle.dtype), ptr.type)
    data = ptr.handle.data
    return tl.tensor(Handle((data.view(np.int64) + np.int64(amount)).view(np.uint64), ptr.handle.dtype), ptr.type)


def addresses(ptr, mask=None):
    """(form or None, array or None) -> the addresses of a pointer block: its bounds where they are enough."""
    form = form_of(ptr.handle)
    rectangle = None if mask is None else form_of(mask.handle, Rectangle)
    if form and (mask is None or rectangle):
        part = form if mask is None else form.part(rectangle)
        return None if 0 in part.shape else part.bounds(), None
    data = ptr.handle.data
    if mask is not None:
        data = data[np.broadcast_to(mask.handle.data, data.shape)]
    return (int(data.min()), int(data.max())) if data.size else None, data


_RMW = {"add": stock.native.RMW_OP.ADD, "xchg": stock.native.RMW_OP.XCHG}


def atomic(op, address, value, dtype):
    """One atomic read-modify-write of a word, acquire and release, exact between processes; returns the old value."""
    old = stock.native.atomic_rmw(
        _RMW[op],
        np.array([address], np.uint64),
        np.array([value], dtype),
        np.ones(1, np.bool_),
        stock.native.MEM_SEMANTIC.ACQUIRE_RELEASE,
    )
    return old.item()
