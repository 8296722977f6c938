"""The interpreter's operations: integer blocks as formulas, the floats that numpy lacks. What touches memory: accesses.py."""

import numpy as np
import triton.language as tl

from . import numerics, stock
from .accesses import Accesses
from .affine import Affine, Constant, Rectangle
from .handles import FORMS, Block, Handle, form_of, np_dtype
from .scheduler import scheduler

_CODED = numerics.CODED


def _name(handle):
    return handle.dtype.scalar.name


def _coded(handle):
    return _name(handle) in _CODED


def _wide(handle):
    """The handle's values in a float type that numpy can compute with."""
    return Handle(numerics.to_float32(handle.data, _name(handle)), tl.float32) if _coded(handle) else handle


def _narrow(handle, dtype):
    return Handle(numerics.encode(handle.data, dtype.name), dtype)


def _constant(value, dtype):
    return _narrow(Handle(np.array([value], np.float32), tl.float32), dtype)


def _compare(name):
    op = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[name]

    def create(self, lhs, rhs):
        a, b = form_of(lhs), form_of(rhs)
        form = a.compare(b, name) if a and b else None
        return Block(form, tl.int1) if form else self.binary_op(lhs, rhs, op)

    return create


class Builder(Accesses):
    # -- integer blocks as formulas
    def create_make_range(self, *args):
        start, stop = args[-2:]
        return Block(Affine(start, (1,), (stop - start,)), tl.int32)

    def create_splat(self, *args):
        if isinstance(args[0], Handle):  # Triton 3.2: (arg, shape)
            arg, shape = args
        else:
            arg, shape = args[1], args[0].shape
        dtype = arg.dtype.scalar
        shape = [int(n) for n in shape]
        if arg.data.size == 1:
            if dtype.is_int() and dtype.primitive_bitwidth == 1:
                ranges = [(0, n) if arg.data.item() else (0, 0) for n in shape]
                return Block(Rectangle(ranges, shape), dtype)
            if dtype.is_int() or dtype.is_ptr():
                return Block(Affine(arg.data.item(), (0,) * len(shape), shape), dtype)
            return Block(Constant(arg.data, shape), dtype)
        return super().create_splat(*args)

    def create_expand_dims(self, arg, axis):
        form = form_of(arg, FORMS)
        return Block(form.expand_dims(axis), arg.dtype) if form else super().create_expand_dims(arg, axis)

    def create_broadcast(self, arg, shape):
        form = form_of(arg, FORMS)
        if form and len(form.shape) == len(shape):
            return Block(form.broadcast([int(n) for n in shape]), arg.dtype)
        return super().create_broadcast(arg, shape)

    def create_trans(self, arg, perm):
        form = form_of(arg, FORMS)
        return Block(form.transpose(perm), arg.dtype) if form else super().create_trans(arg, perm)

    def _affine_op(self, lhs, rhs, combine, op):
        a, b = form_of(lhs), form_of(rhs)
        if a and b:
            form = combine(a, b)
            if form and form.fits(np_dtype(lhs.dtype)):
                return Block(form, lhs.dtype)
        return self.binary_op(lhs, rhs, op)

    def create_add(self, lhs, rhs):
        return self._affine_op(lhs, rhs, Affine.plus, np.add)

    def create_sub(self, lhs, rhs):
        return self._affine_op(lhs, rhs, lambda a, b: a.plus(b, -1), np.subtract)

    def create_mul(self, lhs, rhs):
        return self._affine_op(lhs, rhs, Affine.times, np.multiply)

    def create_srem(self, lhs, rhs):
        a, b = form_of(lhs), form_of(rhs)
        if a and b:  # `offsets % M` that wraps nothing
            low, high = a.bounds()
            modulus = b.constant()
            if modulus is not None and 0 <= low and high < modulus:
                return lhs
        return super().create_srem(lhs, rhs)

    create_icmpSLT, create_icmpSLE = _compare("lt"), _compare("le")
    create_icmpSGT, create_icmpSGE = _compare("gt"), _compare("ge")

    def create_and(self, lhs, rhs):
        a, b = form_of(lhs, Rectangle), form_of(rhs, Rectangle)
        return Block(a.intersect(b), lhs.dtype) if a and b else self.binary_op(lhs, rhs, np.bitwise_and)

    def create_select(self, cond, lhs, rhs):
        if lhs.data.dtype != rhs.data.dtype:  # Triton 3.6's atomic_min of floats: int64 and uint64, float64 to numpy
            rhs = Handle(rhs.data.astype(lhs.data.dtype), lhs.dtype)
        return super().create_select(cond, lhs, rhs)

    def create_addptr(self, ptr, offset):
        a, b = form_of(ptr), form_of(offset)
        if a and b:
            size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
            form = a.plus(b.scale(size))
            low, high = form.bounds()
            if 0 <= low and high < 1 << 63:
                return Block(form, ptr.dtype)
        return super().create_addptr(ptr, offset)

    def create_int_cast(self, src, dst_type, is_signed):
        form = form_of(src)
        if form and dst_type.scalar.primitive_bitwidth > 1 and form.fits(np_dtype(dst_type.scalar)):
            return Block(form, dst_type.scalar)
        return super().create_int_cast(src, dst_type, is_signed)

    def create_bitcast(self, src, dst_type):
        form = form_of(src)
        if form and src.dtype.is_ptr() != dst_type.scalar.is_ptr() and form.fits(np_dtype(dst_type.scalar)):
            return Block(form, dst_type.scalar)
        return super().create_bitcast(src, dst_type)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # -- floats that numpy lacks
    def get_bf16(self, value):
        return _constant(value, tl.bfloat16)

    def get_fp8e5(self, value):
        return _constant(value, tl.float8e5)

    def get_fp8e4nv(self, value):
        return _constant(value, tl.float8e4nv)

    def get_fp8e5b16(self, value):
        return _constant(value, tl.float8e5b16)

    def get_fp8e4b8(self, value):
        return _constant(value, tl.float8e4b8)

    def binary_op(self, lhs, rhs, op):
        if _coded(lhs) and not op.__name__.startswith("bitwise"):
            out = Handle(op(_wide(lhs).data, _wide(rhs).data), tl.float32)
        else:
            out = super().binary_op(lhs, rhs, op)
        if out.data.dtype == np.bool_:
            # The stock interpreter gives a comparison the type of its operands; a splat of it would be a block of integers.
            return Handle(out.data, tl.int1)
        if lhs.dtype.scalar.is_floating():
            scheduler.moved()
        return _narrow(out, lhs.dtype.scalar) if _coded(lhs) and out.dtype == tl.float32 else out

    def unary_op(self, arg, op):
        scheduler.moved()
        if _coded(arg):
            return _narrow(Handle(op(_wide(arg).data), tl.float32), arg.dtype.scalar)
        return super().unary_op(arg, op)

    def _widened(self, call, *args):
        dtype = args[-1].dtype.scalar
        return _narrow(call(*map(_wide, args)), dtype) if dtype.name in _CODED else call(*args)

    def create_clampf(self, arg, lo, hi, propagate_nans):
        base = super()
        return self._widened(lambda *a: base.create_clampf(*a, propagate_nans), arg, lo, hi)

    def create_fma(self, x, y, z):
        return self._widened(super().create_fma, x, y, z)

    def create_rsqrt(self, arg):
        return self._widened(super().create_rsqrt, arg)

    def create_erf(self, arg):
        return self._widened(super().create_erf, arg)

    def cast_impl(self, src, dst_type):
        dst, name = dst_type.scalar, _name(src)
        form = form_of(src, Constant)
        if form and dst.is_floating():
            return Block(Constant(self.cast_impl(Handle(form.value, src.dtype.scalar), dst).data, form.shape), dst)
        if dst.name in _CODED:
            data = numerics.to_float32(src.data, name) if name in _CODED else src.data
            return Handle(numerics.encode(data, dst.name), dst)
        if name in _CODED:
            return super().cast_impl(_wide(src), dst_type)
        if src.dtype.scalar.is_floating() and dst.is_floating():
            return Handle(numerics.cast_float(src.data, np_dtype(dst)), dst)
        return super().cast_impl(src, dst_type)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = cast_impl
    create_fp_ext = create_fp_trunc = cast_impl

    def create_fp_to_fp(self, src, dst_type, rounding_mode=None):
        exact = rounding_mode in (None, stock.ir.ROUNDING_MODE.RTNE)
        known = all(t.scalar.name != "fp8e4b15" for t in (src.dtype, dst_type))
        return self.cast_impl(src, dst_type) if exact and known else super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_dot(self, a, b, d, *precision):
        scheduler.moved()
        out_type = d.dtype.scalar
        if out_type.is_int():
            out = numerics.matmul(a.data, b.data) + d.data
            return Handle(out.astype(np_dtype(out_type)), out_type)
        out = numerics.matmul(numerics.to_float32(a.data, _name(a)), numerics.to_float32(b.data, _name(b)))
        form = form_of(d, Constant)
        if form is None or not form.zero():
            out = np.add(out, _wide(d).data, out=out)
        return self.cast_impl(Handle(out, tl.float64 if out.dtype == np.float64 else tl.float32), out_type)

    # -- the rest
    def create_assert(self, condition, message, *where):
        if not bool(condition.data.all() if isinstance(condition, Handle) else condition):
            raise AssertionError(f"device_assert failed: {message}")

    def create_print(self, prefix, hex, values, *signs):
        shown = [_wide(v) for v in values]
        return super().create_print(f"rank {scheduler.rank}: {prefix}", hex, shown, *signs)
