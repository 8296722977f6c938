"""Anonymous shared memory on Linux: segments without a name in any directory, all mapped into one reserved range.

A segment is a memfd: it takes no room in /dev/shm and is freed by the kernel with its last user, whatever dies when.
Peers open it as /proc/<pid>/fd/<fd> and check the inode, because process ids repeat in other containers.
"""

import ctypes
import fcntl
import mmap
import os

import torch

from ..errors import ShmemError

SMEM, MALLOC_FAILED = -3, -8  # as in shmem/codes.py
GUARD = 2 << 20  # unmapped space between segments, and their alignment: an overrun faults, huge pages stay possible

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def round_up(nbytes, to):
    return -(-nbytes // to) * to


def create(nbytes, name):
    """A new zeroed segment; returns its file descriptor. Sealed, so that no peer can shrink it under the others."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, round_up(nbytes, mmap.PAGESIZE))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise ShmemError(f"the kernel gave no segment of {nbytes} bytes: {error}", MALLOC_FAILED) from error
    return fd


def describe(fd):
    """What a peer needs to open the segment and to know that it is the right one. A dict for JSON."""
    stat = os.fstat(fd)
    return {"fd": fd, "dev": stat.st_dev, "ino": stat.st_ino}


def open_peer(rank, identity, segment):
    """Opens rank's segment; returns a file descriptor of this process."""
    path = f"/proc/{identity['pid']}/fd/{segment['fd']}"
    who = f"rank {rank} (host {identity['host']}, pid {identity['pid']})"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ShmemError(
            f"cannot map the heap of {who}: {path}: {error.strerror}. Has it died, or does it run as another user "
            "or in "
            "another container? The ranks of the cpu platform share one host, one user and one pid namespace",
            SMEM,
        ) from error
    stat = os.fstat(fd)
    if (stat.st_dev, stat.st_ino) != (segment["dev"], segment["ino"]):
        os.close(fd)
        raise ShmemError(
            f"cannot map the heap of {who}: {path} is not what that rank published (it runs in another container, "
            "or has "
            "died and its pid was reused). The ranks of the cpu platform share one host and one pid namespace",
            SMEM,
        )
    return fd


class Reservation:
    """A range of addresses that nothing else in this process can take. Unmapped with its last user."""

    def __init__(self, nbytes):
        self.nbytes = round_up(nbytes, GUARD) + GUARD  # room to align the start
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._raw = _mmap(None, self.nbytes, _PROT_NONE, flags, -1, 0)
        if self._raw in (None, _FAILED):
            self._raw = None
            raise ShmemError(
                f"cannot reserve {self.nbytes} bytes of address space for the heaps of all ranks: "
                f"{os.strerror(ctypes.get_errno())} (see `ulimit -v`)",
                MALLOC_FAILED,
            )
        self.start = round_up(self._raw, GUARD)

    def map(self, offset, nbytes, fd):
        """Maps a segment at `offset` (page aligned); returns its address."""
        address = self.start + offset
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        got = _mmap(address, round_up(nbytes, mmap.PAGESIZE), prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if got != address:
            error = os.strerror(ctypes.get_errno())
            raise ShmemError(f"cannot map a segment of {nbytes} bytes: {error}", MALLOC_FAILED)
        return address

    def array(self, address, nbytes):
        """The memory as a ctypes array. Who holds it, or a tensor over it, keeps the whole range mapped."""
        array = (ctypes.c_uint8 * nbytes).from_address(address)
        array.reservation = self
        return array

    def __del__(self, munmap=_munmap):
        if self._raw:
            munmap(self._raw, self.nbytes)


def tensor(array):
    """The array's memory as a uint8 tensor: one storage, which keeps the mapping alive."""
    return torch.frombuffer(array, dtype=torch.uint8)
