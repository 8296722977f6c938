"""The platform under a simulation: all ranks' heaps in this process, and meetings that switch to the other ranks.

What it takes from `backends`: the Platform and Heap methods listed in backends/__init__.py.
"""

import ctypes
import operator
import os

import torch

from ..backends import processes, segments
from ..backends.cpu import Now
from ..interpreter import atomic_add
from ..interpreter.affine import Affine
from ..interpreter.scheduler import Wait

_COMPARE = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_C_INT = {4: ctypes.c_int32, 8: ctypes.c_int64}


class SimulatedPlatform:
    process_group = "gloo"

    def __init__(self, simulation):
        self.simulation = simulation
        self.identity = processes.identity()
        self.inits = [0] * simulation.world_size  # of each rank
        self.memory = {}  # number of the init -> _Memory

    def device_count(self):
        return None

    def load(self):
        pass

    def prepare(self, rank):
        return torch.device("cpu")

    def heap(self, rank, n_ranks, nbytes, options):
        return SimulatedHeap(self, rank, n_ranks, nbytes)

    def meeting(self, rank, n_ranks):
        return _Meeting(self, rank, n_ranks)


class _Meeting:
    """The ranks of one init: what shmem/rendezvous.py's Meeting is for processes."""

    address, store = "the simulation", None

    def __init__(self, platform, rank, n_ranks):
        self.platform, self.rank, self.n_ranks = platform, rank, n_ranks
        self.number = platform.inits[rank]

    def _all(self, tag, value):
        key, members = ("init", self.number, tag), range(self.n_ranks)
        return self.platform.simulation.exchange(key, members, self.rank, value, lambda: "in shmem.aclshmem_init")

    def claim(self):
        simulation = self.platform.simulation
        if self.n_ranks != simulation.world_size or self.rank != simulation.rank:
            raise ValueError(
                f"InitAttr names rank {self.rank} of {self.n_ranks}, but this is rank {simulation.rank} of "
                f"{simulation.world_size}"
            )

    def join(self, value):
        return self._all("join", value)

    def vote(self, value, timeout, lost):
        return self._all("vote", value)

    def met(self):
        self.platform.inits[self.rank] = self.number + 1

    def withdraw(self):
        pass

    def clear(self):
        pass


class _Memory:
    """The heaps of all ranks, with guard space between."""

    def __init__(self, n_ranks, nbytes):
        step = segments.round_up(nbytes, segments.GUARD) + segments.GUARD
        total = n_ranks * step + segments.GUARD
        reservation = segments.Reservation(total)
        self.span = reservation.start, reservation.start + total
        self.bases, self.tensors = [], []
        for rank in range(n_ranks):
            fd = segments.create(nbytes, f"triton_dist.check.{rank}")
            try:
                self.bases.append(reservation.map(segments.GUARD + rank * step, nbytes, fd))
            finally:
                os.close(fd)
            self.tensors.append(segments.tensor(reservation.array(self.bases[-1], nbytes)))


class SimulatedHeap:
    stuck = False

    def __init__(self, platform, rank, n_ranks, nbytes):
        self.platform, self.simulation = platform, platform.simulation
        self.rank, self.n_ranks, self.nbytes, self.device = rank, n_ranks, nbytes, torch.device("cpu")
        self.number = platform.inits[rank]
        self.descriptor = {"process": platform.identity}
        self.memory = None

    def connect(self, descriptors, store, timeout):
        made = self.platform.memory
        if self.number not in made:
            made[self.number] = _Memory(self.n_ranks, self.nbytes)
        self.memory = made[self.number]
        self.bases, self.span = list(self.memory.bases), self.memory.span
        self.simulation.host_access.watch(self.memory)

    def mapped_by_all(self):
        pass

    def tensor(self, rank):
        return self.memory.tensors[rank]

    def copy(self, to, source):
        to.copy_(source)

    def recorder(self):
        return None

    def exchange(self, team, text, describe, timeout=None):
        self.simulation.copies.complete(self.rank)
        key = "team", self.number, team.id, team.serial, tuple(team.members), team.epoch
        said = self.simulation.exchange(key, team.members, self.rank, text, describe)
        team.epoch += 1
        return said

    def limit_waits(self, seconds):
        pass

    def check_waits(self):
        pass  # a wait that ends by its limit raises in the launch

    def counter(self, team_id):
        return 0

    # -- put, get, signals
    def _at(self, address, peer):
        return address + self.bases[peer] - self.bases[self.rank]

    def _copy(self, thread, move, dst, src, nbytes, word):
        if not nbytes:
            return
        detector = self.simulation.detector
        detector.load(thread, Affine(src, (1,), (nbytes,)), 1, False, word)
        detector.store(thread, Affine(dst, (1,), (nbytes,)), 1, word)
        move(dst, src, nbytes)
        detector.load_done()

    def _move(self, dst, src, nbytes, own, is_source, blocking, word):
        """`own`: this rank's side of a copy that does not block; is_source: it is the one that is read."""
        self.simulation.step()
        if blocking:
            self._copy(self.simulation.host_thread(), ctypes.memmove, dst, src, nbytes, word)
            return

        def make(thread, move):
            self._copy(thread, move, dst, src, nbytes, f"{word}_nbi")

        self.simulation.copies.start(make, own, nbytes, is_source)

    def put(self, dst, src, nbytes, peer, blocking):
        self._move(self._at(dst, peer), src, nbytes, src, True, blocking, "putmem")

    def get(self, dst, src, nbytes, peer, blocking):
        self._move(dst, self._at(src, peer), nbytes, dst, False, blocking, "getmem")

    def put_signal(self, dst, src, nbytes, signal, value, add, itemsize, peer, blocking):
        there = self._at(signal, peer)
        if blocking:
            self.put(dst, src, nbytes, peer, True)
            self.simulation.step()
            self._signal(self.simulation.host_thread(), there, value, add, itemsize)
            return
        dst = self._at(dst, peer)

        def make(thread, move):
            self._copy(thread, move, dst, src, nbytes, "putmem_signal_nbi")
            self._signal(thread, there, value, add, itemsize)

        self.simulation.step()
        self.simulation.copies.start(make, src, nbytes, True)

    def _signal(self, thread, there, value, add, itemsize):
        detector, op = self.simulation.detector, "add" if add else "set"
        detector.notify(thread, there, itemsize, op)
        if add:
            atomic_add(there, value, itemsize)
        else:
            _C_INT[itemsize].from_address(there).value = value
        detector.notify_done(thread, there, itemsize, op)

    def wait_signal(self, address, compare, value, itemsize, describe, timeout=None):
        wait = Wait(address, _C_INT[itemsize], compare.__name__, value)
        detector, thread = self.simulation.detector, self.simulation.host_thread()
        detector.waiting(thread, address, itemsize)
        self.simulation.wait_on_host(wait.ready, lambda: f"{describe()}; seen {_C_INT[itemsize].from_address(address).value}")
        detector.waited(thread, wait, itemsize)

    # -- streams: work is done when it is given, so their host is the thread of it all
    def stream(self, urgent):
        return Now()

    def word_setter(self, *addresses):
        def set_them():
            for address in addresses:
                self.simulation.step()
                self._signal(self.simulation.host_thread(), address, 1, False, 4)

        return set_them

    def word_taker(self, describe, *addresses):
        def take():
            for address in addresses:
                self.wait_signal(address, operator.eq, 1, 4, lambda: f"waits {describe()}")
                self._signal(self.simulation.host_thread(), address, 0, False, 4)

        return take

    word_teller, word_poller = word_setter, word_taker

    def end_peers(self):
        raise SystemExit("aclshmem_global_exit")

    def close(self):
        self.memory = None
