"""Arithmetic of the float types that numpy lacks, and fast conversions. torch decides every rounding.

The interpreter keeps bfloat16 as uint16 and fp8 as uint8 bit patterns. Types are named as Triton names them: "bf16",
"fp8e5" (e5m2), "fp8e4nv" (e4m3fn), "fp8e5b16" (e5m2fnuz), "fp8e4b8" (e4m3fnuz).
"""

import warnings

import numpy as np
import torch

CODED = {
    "bf16": torch.bfloat16,
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "fp8e4b8": torch.float8_e4m3fnuz,
}
_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16)}
_PLAIN = {np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)}


def _torch_of(array):
    if array.dtype == np.uint16:
        array = array.view(np.int16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # broadcast blocks are read-only; they are only read here
        return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())


def to_float32(array, name):
    """Values of a block as float32. `name` is the Triton type's name; fp64 stays fp64."""
    coded = CODED.get(name)
    if coded is not None:
        return _torch_of(array).view(coded).float().numpy()
    if array.dtype == np.float16:
        return _torch_of(array).float().numpy()
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def encode(array, name):
    """float32 (or any real block) rounded to a coded type, as bit patterns. Rounds to nearest even, as torch does."""
    coded = CODED[name]
    if array.dtype not in _PLAIN:
        array = array.astype(np.float64 if array.dtype.itemsize > 2 else np.float32)
    bits, out = _BITS[coded.itemsize]
    return _torch_of(array).to(coded).view(bits).numpy().view(out)


def cast_float(array, dtype):
    """Conversion between numpy's own floats; torch's is vectorised where numpy's fp16 is not."""
    if np.float16 in (array.dtype, dtype) and array.dtype in _PLAIN and dtype in _PLAIN:
        return _torch_of(array).to({2: torch.float16, 4: torch.float32, 8: torch.float64}[dtype.itemsize]).numpy()
    return array.astype(dtype)


def matmul(a, b):
    """Product of two real blocks by BLAS: integers exactly (through fp64), fp64 in fp64, all else in fp32."""
    if a.dtype.kind in "iub" or b.dtype.kind in "iub":
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
    return np.matmul(a, b)
