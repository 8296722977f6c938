"""The cpu platform: a process a rank on one Linux host, heaps in anonymous shared memory, kernels in the interpreter.

Every rank maps all heaps into one reserved range, in an order and at an offset of its own, so that bases differ between
ranks as they do on devices and a program that mixes up addresses fails here, too.
"""

import ctypes
import os

import torch

from .. import errors, interpreted
from . import processes, segments

_C_INT = {4: ctypes.c_int32, 8: ctypes.c_int64}


class Platform:
    process_group = "gloo"

    def load(self):
        pass  # gloo is torch's own

    def device_count(self):
        return None

    def prepare(self, rank):
        if not interpreted:
            raise errors.BackendError("the cpu platform runs kernels in Triton's interpreter, which needs numpy")
        if not hasattr(os, "memfd_create"):
            raise errors.BackendError("the cpu platform needs Linux (memfd_create)")
        return torch.device("cpu")

    def heap(self, rank, n_ranks, nbytes, options):
        return Heap(rank, n_ranks, nbytes)


class Heap:
    """`nbytes` of symmetric heap on each of `n_ranks` ranks of this host."""

    stuck = False

    def __init__(self, rank, n_ranks, nbytes):
        from .control import Control

        self.rank, self.n_ranks, self.nbytes, self.device = rank, n_ranks, nbytes, torch.device("cpu")
        self._control_bytes = Control.nbytes(n_ranks)
        self._fd = segments.create(nbytes, f"triton_dist.heap.{rank}")
        self._control_fd = segments.create(self._control_bytes, "triton_dist.control") if rank == 0 else None
        self.descriptor = {"process": processes.identity(), "heap": segments.describe(self._fd)}
        if rank == 0:
            self.descriptor["control"] = segments.describe(self._control_fd)
        self.peers = self.control = self._tensors = None

    def connect(self, descriptors, store, timeout):
        from .. import interpreter
        from .control import Control

        mine = self.descriptor["process"]
        for rank, one in enumerate(descriptors):
            if not processes.same_host(one["process"], mine):
                raise errors.ShmemError(
                    f"rank {rank} runs on host {one['process']['host']} and rank {self.rank} on {mine['host']} (or in "
                    "another container): the ranks of the cpu platform share one host and one pid namespace",
                    segments.SMEM,
                )
        step = segments.round_up(self.nbytes, segments.GUARD) + segments.GUARD
        shift = (1 + self.rank) * segments.GUARD  # the order alone repeats bases, e.g. for forked ranks
        control_at = shift + self.n_ranks * step
        total = control_at + segments.round_up(self._control_bytes, segments.GUARD) + segments.GUARD
        reservation = segments.Reservation(total)
        self.span = (reservation.start, reservation.start + total)
        self.bases = []
        for rank, one in enumerate(descriptors):
            place = shift + (rank - self.rank) % self.n_ranks * step
            self.bases.append(self._map(reservation, place, self.nbytes, rank, one["process"], one["heap"], self._fd))
        root = descriptors[0]
        address = self._map(
            reservation, control_at, self._control_bytes, 0, root["process"], root["control"], self._control_fd
        )
        self._tensors = [segments.tensor(reservation.array(base, self.nbytes)) for base in self.bases]
        self.control = Control(reservation, address, self.rank, self.n_ranks)
        self.peers = processes.Peers(self.rank, [one["process"] for one in descriptors])
        self.control.board.lost = self.peers.lost
        interpreter.attach(self.control.board)

    def _map(self, reservation, place, nbytes, rank, process, segment, own):
        if rank == self.rank:
            return reservation.map(place, nbytes, own)
        fd = segments.open_peer(rank, process, segment)
        try:
            return reservation.map(place, nbytes, fd)
        finally:
            os.close(fd)

    def mapped_by_all(self):
        """Every rank has its mappings: the descriptors can go."""
        for fd in (self._fd, self._control_fd):
            if fd is not None:
                os.close(fd)
        self._fd = self._control_fd = None

    def tensor(self, rank):
        return self._tensors[rank]

    def exchange(self, team, text, describe, timeout=None):
        return self.control.exchange(team, text, describe, timeout)

    def limit_waits(self, seconds):
        self.control.board.limit = seconds

    def check_waits(self):
        pass  # a wait that ends by its limit raises in the launch

    def counter(self, team_id):
        return int(self.control.arrivals[team_id, self.rank])

    # -- put, get, signals: `blocking` makes no difference, the copy is done on return
    def _at(self, address, peer):
        return address + self.bases[peer] - self.bases[self.rank]

    def put(self, dst, src, nbytes, peer, blocking):
        ctypes.memmove(self._at(dst, peer), src, nbytes)

    def get(self, dst, src, nbytes, peer, blocking):
        ctypes.memmove(dst, self._at(src, peer), nbytes)

    def put_signal(self, dst, src, nbytes, signal, value, add, itemsize, peer, blocking):
        from ..interpreter import atomic_add

        self.put(dst, src, nbytes, peer, blocking)
        there = self._at(signal, peer)
        if add:
            atomic_add(there, value, itemsize)
        else:
            _C_INT[itemsize].from_address(there).value = value  # one aligned store

    def wait_signal(self, address, compare, value, itemsize, describe, timeout=None):
        from ..interpreter import atomic_add

        seen = _C_INT[itemsize].from_address(address)

        def ready():
            return compare(seen.value, value)

        def text():
            return f"{describe()}; seen {seen.value}"

        self.control.wait(ready, text, timeout)
        atomic_add(address, 0, itemsize)  # an acquire

    # -- streams: work is done when it is given
    def stream(self, urgent):
        return Now()

    def copy(self, to, source):
        to.copy_(source)

    def recorder(self):
        return None

    def word_setter(self, *addresses):
        from ..interpreter import atomic_add

        return lambda: [atomic_add(address, 1, 4) for address in addresses]  # from 0

    def word_taker(self, describe, *addresses):
        from ..interpreter import atomic_add

        def take():
            for address in addresses:
                word = _C_INT[4].from_address(address)
                self.control.wait(lambda word=word: word.value == 1, lambda: f"waits {describe()}", None)
                atomic_add(address, -1, 4)

        return take

    word_teller, word_poller = word_setter, word_taker

    def end_peers(self):
        if self.peers:
            self.peers.end()

    def close(self):
        from .. import interpreter

        if self.control:
            interpreter.detach()
        if self.peers:
            self.peers.close()
        self.mapped_by_all()
        self.control = self.peers = self._tensors = None


class Now:
    """A stream whose work is done when it is given."""

    def follow(self, mark=None):
        pass

    join = mark = __enter__ = follow

    def __exit__(self, *exc):
        pass
