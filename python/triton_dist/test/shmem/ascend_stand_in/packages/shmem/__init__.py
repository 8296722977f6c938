"""A stand-in for the `shmem` wheel of CANN, for tests without an NPU: the documented names, arguments and return codes
of what triton_dist calls. Symmetric memory is CPU memory that the ranks' processes share.

A unique id, and the address of an init by `ip_port`, name a folder; it is gone as soon as all ranks have mapped all
heaps. STAND_IN_UNREACHABLE lists ranks that have no address here, as NPUs of another host.
"""

import ctypes
import enum
import hashlib
import mmap
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import torch_npu  # noqa: F401  the wheel needs it
from recording import recorded

HEADER = 4096  # before each heap: an arrival count for barriers
LIMIT_S = 20.0
UID_BYTES = 128


class InitStatus(enum.Enum):  # like pybind's: no int, but int() of it works
    NOT_INITIALIZED = 0
    SHM_CREATED = 1
    INITIALIZED = 2
    INVALID = 3

    def __int__(self):
        return self.value


class OpEngineType:
    """Like pybind's enumeration: made of any int, so also of a combination."""

    def __init__(self, value):
        self.value = int(value)

    def __int__(self):
        return self.value


OpEngineType.MTE, OpEngineType.SDMA, OpEngineType.ROCE, OpEngineType.UDMA = map(OpEngineType, (1, 2, 4, 8))


class OptionalAttr:
    def __init__(self):
        self.version, self.data_op_engine_type, self.sockFd = 1, OpEngineType.MTE, -1
        self.shm_init_timeout = self.shm_create_timeout = self.control_operation_timeout = 120


class InitAttr:
    def __init__(self):
        self.my_rank = self.n_ranks = self.local_mem_size = 0
        self.ip_port, self.option_attr = "", OptionalAttr()


class _Heaps:
    """All ranks' heaps, mapped."""

    def __init__(self, folder, rank, n_ranks, nbytes):
        self.rank, self.n_ranks, self.nbytes, self.used, self.live = rank, n_ranks, nbytes, 0, {}
        self.arrivals = 0
        with open(folder / f"new.{rank}", "wb") as file:
            file.truncate(HEADER + nbytes)
        os.rename(folder / f"new.{rank}", folder / f"heap.{rank}")
        paths = [folder / f"heap.{peer}" for peer in range(n_ranks)]
        _until(lambda: all(path.exists() for path in paths), "the peers' heaps")
        self.maps = []
        for path in paths:
            with open(path, "r+b") as file:
                self.maps.append(mmap.mmap(file.fileno(), 0))
        self.starts = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self.maps]
        self.barrier()
        if rank == 0:
            shutil.rmtree(folder)

    def base(self, rank):
        return self.starts[rank] + HEADER

    def barrier(self):
        """Counts are in the headers, so nothing of the folder is needed."""
        self.arrivals += 1
        ctypes.c_int64.from_address(self.starts[self.rank]).value = self.arrivals
        counts = [ctypes.c_int64.from_address(start) for start in self.starts]
        _until(lambda: all(one.value >= self.arrivals for one in counts), "the peers in a barrier")


_heaps = None


def _until(ready, what):
    end = time.monotonic() + LIMIT_S
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError(f"the stand-in wheel waited {LIMIT_S} s for {what}")
        time.sleep(1e-4)


def _folder(name):
    return Path(tempfile.gettempdir(), f"stand_in_wheel.{name}")


def _begin(folder, rank, n_ranks, nbytes):
    global _heaps
    if _heaps is not None or not 0 <= rank < n_ranks or nbytes % (2 << 20) or not 0 < nbytes <= 40 << 30:
        return -1
    folder.mkdir(exist_ok=True)
    _heaps = _Heaps(folder, rank, n_ranks, nbytes)
    return 0


@recorded
def set_conf_store_tls(enable, tls_info):
    assert isinstance(enable, bool) and isinstance(tls_info, str)
    return 0


@recorded
def aclshmemx_init_status():
    return InitStatus.NOT_INITIALIZED if _heaps is None else InitStatus.INITIALIZED


@recorded
def aclshmem_get_unique_id():
    return str(_folder(secrets.token_hex(16))).encode().ljust(UID_BYTES, b"\0")


@recorded
def aclshmem_init_using_unique_id(mype, npes, mem_size, uid):
    if not isinstance(uid, bytes) or len(uid) < UID_BYTES:
        return -1
    return _begin(Path(uid.rstrip(b"\0").decode()), mype, npes, mem_size)


@recorded
def aclshmem_init(attributes):
    assert isinstance(attributes, InitAttr) and isinstance(attributes.option_attr.data_op_engine_type, OpEngineType)
    if not attributes.ip_port.startswith("tcp://") or len(attributes.ip_port) > 63:
        return -1
    folder = _folder(hashlib.sha256(attributes.ip_port.encode()).hexdigest()[:16])
    return _begin(folder, attributes.my_rank, attributes.n_ranks, attributes.local_mem_size)


@recorded
def aclshmem_finalize():
    global _heaps
    if _heaps is None:
        return -5
    _heaps = None  # tensors may still lie in the mapping: it goes with the last of them
    return 0


@recorded
def aclshmem_align(alignment, size):
    offset = -(-_heaps.used // alignment) * alignment
    if offset + size > _heaps.nbytes:
        raise RuntimeError("aclshmem_align failed")
    _heaps.used = offset + size
    address = _heaps.base(_heaps.rank) + offset
    _heaps.live[address] = size
    _heaps.barrier()
    return address


@recorded
def aclshmem_free(ptr):
    _heaps.barrier()
    del _heaps.live[ptr]


@recorded
def aclshmem_ptr(ptr, peer):
    offset = ptr - _heaps.base(_heaps.rank)
    if not 0 <= peer < _heaps.n_ranks or not 0 <= offset < _heaps.nbytes:
        return 0
    if str(peer) in os.environ.get("STAND_IN_UNREACHABLE", "").split(","):
        return 0
    return _heaps.base(peer) + offset


def _there(ptr, pe):
    return ptr - _heaps.base(_heaps.rank) + _heaps.base(pe)


@recorded
def aclshmem_putmem(dst, src, elem_size, pe):
    ctypes.memmove(_there(dst, pe), src, elem_size)


@recorded
def aclshmem_putmem_nbi(dst, src, elem_size, pe):
    ctypes.memmove(_there(dst, pe), src, elem_size)


@recorded
def aclshmem_getmem(dst, src, elem_size, pe):
    ctypes.memmove(dst, _there(src, pe), elem_size)


@recorded
def aclshmem_getmem_nbi(dst, src, elem_size, pe):
    ctypes.memmove(dst, _there(src, pe), elem_size)


def _put_signal(dst, src, elem_size, sig, signal, sig_op, pe):
    assert elem_size > 0 and type(sig_op) is int
    ctypes.memmove(_there(dst, pe), src, elem_size)
    word = ctypes.c_int32.from_address(_there(sig, pe))
    word.value = word.value + signal if sig_op else signal


@recorded
def aclshmemx_putmem_signal(dst, src, elem_size, sig, signal, sig_op, pe):
    _put_signal(dst, src, elem_size, sig, signal, sig_op, pe)


@recorded
def aclshmemx_putmem_signal_nbi(dst, src, elem_size, sig, signal, sig_op, pe):
    _put_signal(dst, src, elem_size, sig, signal, sig_op, pe)


@recorded
def aclshmem_info_get_version():
    return 1, 1
