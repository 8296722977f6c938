"""Reductions and scans of the small floats: computed in fp32, rounded once."""

import triton.language as tl

from . import numerics, stock
from .handles import Handle


def _reduce_wide(call, input, also_half):
    """Runs a reduction or scan of bf16, fp8 (and fp16) values in fp32 and rounds its result once."""
    kinds = [t.dtype for t in input]

    def small(dtype):
        return dtype.name in numerics.CODED or (also_half and dtype == tl.float16)

    if not any(map(small, kinds)):
        return call(input)

    def wide(t):
        data = numerics.to_float32(t.handle.data, t.dtype.name)
        return tl.tensor(Handle(data, tl.float32), tl.block_type(tl.float32, list(data.shape)))

    def back(t, dtype):
        if not small(dtype) or t.dtype != tl.float32:
            return t
        handle = stock.builder.cast_impl(t.handle, dtype)
        return tl.tensor(handle, tl.block_type(dtype, list(t.shape)) if t.shape else dtype)

    result = call(tuple(wide(t) if small(t.dtype) else t for t in input))
    if isinstance(result, (tuple, list)):
        return tuple(back(t, k) for t, k in zip(result, [*kinds, *kinds]))
    return back(result, kinds[0])


class Reduce(stock.ReduceOps):
    def apply_impl(self, input):
        return _reduce_wide(super().apply_impl, input, self.combine_fn is stock.sum_combine)


class Scan(stock.ScanOps):
    def apply_impl(self, input):
        return _reduce_wide(super().apply_impl, input, self.combine_fn is stock.sum_combine)
