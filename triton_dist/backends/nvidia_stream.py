"""Stream memory operations of the CUDA driver: a word set, or waited for, in the order of a stream, by no kernel.

They need no multiprocessor, so they go on while every one of them is busy, and nothing that they wait for can be kept
waiting by a grid. From the driver's manual: a write is preceded by a fence at system scope, so what the stream did
before it is visible to whoever sees the word; a wait holds back everything given to the stream after it.
"""

import ctypes
import functools

from ..errors import BackendError


WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 (until the word is the value or more, cyclically), _WRITE_VALUE_32


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a union of 48 bytes."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    ]


@functools.cache
def _driver():
    try:
        library = ctypes.CDLL("libcuda.so.1")
        call = library.cuStreamBatchMemOp_v2
    except (OSError, AttributeError) as error:
        raise BackendError(f"the CUDA driver has no stream memory operations: {error}") from None
    call.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    return call


def batch(*operations):
    """What `give` gives to a stream: (WAIT or WRITE, address of a 32-bit word, value), one after the other. A write may be to
    a word of a peer's device, after all that the stream was given before; a wait is for one of this device."""
    made = (_Operation * len(operations))()
    for one, (operation, address, value) in zip(made, operations):
        one.operation, one.address, one.value = operation, address, value
    return made


def give(stream, operations):
    """Gives a `batch` to a stream (a handle): one call of the driver, whatever their number."""
    code = _driver()(stream, len(operations), operations, 0)
    if code:
        words = ", ".join(f"{one.address:#x}" for one in operations)
        raise BackendError(f"the CUDA driver refused to set or wait for {words} in the order of a stream: error {code}")
