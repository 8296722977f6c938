"""Copies of blocks of rows that lie apart, by a copy engine of the device: torch copies such a block by a kernel, which needs
multiprocessors.

Two H200s, 4096 rows of 512 to 4096 columns of 16 bits: to the peer as fast as one contiguous piece; within a device 570 to
800 GB/s.
"""

import ctypes
import functools

from ..errors import BackendError

UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says where it is


class _Side(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D"""

    _fields_ = [("source", _Side), ("to", _Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


@functools.cache
def _driver():
    call = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    call.argtypes = [ctypes.POINTER(_Copy), ctypes.c_void_p]
    return call


def copy_rows(to, source, stream):
    """to = source, [rows, columns] of one dtype with contiguous rows, not empty, in the order of a stream (a handle)."""
    made = _Copy(width=source.shape[1] * source.itemsize, height=source.shape[0])
    for side, tensor in ((made.source, source), (made.to, to)):
        side.kind, side.device, side.pitch = UNIFIED, tensor.data_ptr(), tensor.stride(0) * tensor.itemsize
    code = _driver()(ctypes.byref(made), stream)
    if code:
        raise BackendError(f"the CUDA driver refused to copy {list(source.shape)} of {source.dtype}: error {code}")
