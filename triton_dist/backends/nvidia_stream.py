"""Stream memory operations of the CUDA driver: a word set, or waited for, in the order of a stream, by no kernel.

They need no multiprocessor, so they go on while every one of them is busy, and nothing that they wait for can be kept
waiting by a grid. From the driver's manual: a write is preceded by a fence at system scope, so what the stream did
before it is visible to whoever sees the word; a wait holds back everything given to the stream after it.
"""

import ctypes
import functools

from ..errors import BackendError


@functools.cache
def _driver():
    try:
        library = ctypes.CDLL("libcuda.so.1")
        calls = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
    except (OSError, AttributeError) as error:
        raise BackendError(f"the CUDA driver has no stream memory operations: {error}") from None
    for call in calls:
        call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return calls


def _check(code, what, address):
    if code:
        raise BackendError(f"the CUDA driver refused to {what} the word at {address:#x} in the order of a stream: error {code}")


def write(stream, address, value):
    """Sets the 32-bit word at `address`, of this or of a peer's device, after all that `stream` (a handle) was given."""
    _check(_driver()[0](stream, address, value, 0), "set", address)


def wait(stream, address, value):
    """`stream` goes on when the 32-bit word at `address`, of this device, is `value` or more (cyclically)."""
    _check(_driver()[1](stream, address, value, 0), "wait for", address)
