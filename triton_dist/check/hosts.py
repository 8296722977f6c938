"""The hosts' part of a simulation: where they wait, meet, and touch symmetric memory by tensor operations."""

import ctypes
import math
import threading

import numpy as np
from greenlet import GreenletExit

from ..errors import UnsupportedError
from . import sites
from .tasks import HostWait

# A host that reads the same few words again and again polls: after so many equal reads it waits for a change, and when nobody
# can make one, it is stuck after HOST_TURNS of them (simulator.py).
PATIENCE, LANES = 50, 64
KINDS = {4: "int32", 8: "int64"}


class Hosts:
    """What Simulation has for hosts. Called on a host's coroutine."""

    def host_thread(self):
        return self.detector.threads.hosts[self.rank]

    def _check_thread(self, what):
        if threading.get_ident() != self.ident:
            text = f"rank {self.rank}: {what} in a Python thread of its own: the checker runs one thread of each rank"
            self._failed(self.rank, "rank-failed", text)
            raise UnsupportedError(text)

    def wait_on_host(self, ready, describe):
        """Blocks the running rank's host."""
        if self.ending:
            raise GreenletExit
        self.moved()
        task, start = self.current, self.progress()
        task.wait = HostWait(ready, describe)
        self._switch()
        if self.recorders:
            self.recorders[task.rank].host_waited(start, describe().partition(";")[0])

    def exchange(self, key, members, rank, value, describe):
        """Every member's value, in order; all meet here. `key` names the meeting, alike on all members."""
        self._check_thread("shmem or torch.distributed was called")
        said = self.meetings.setdefault(key, {})
        said[rank] = value
        self.note("give", key)
        members = list(members)
        if len(said) == len(members):
            self.detector.meet(members)
        else:

            def text():
                late = [member for member in members if member not in said]
                return f"{describe()}; not arrived yet: rank {', '.join(map(str, late))}"

            self.wait_on_host(lambda: len(said) == len(members), text)
        self.note("take", key)
        return [said[member] for member in members]

    def _host_touched(self, where, size, writes, word):
        """A tensor operation of host code is about to read or write symmetric memory."""
        task = self.current
        if task is None or task.launch is not None or self.ending:
            return
        if not self.operating:
            self.step(False)
        self._check_live(where, word)
        if writes:
            self.moved()
            self.operating = True
            self.detector.store(task.thread, where, size, word)
            return
        if math.prod(where.shape) <= LANES and not self.operating:
            addresses = where.array(np.uint64).ravel().tolist()
            words = {address: ctypes.string_at(address, size) for address in addresses}
            self.poll(words, KINDS.get(size, ""), PATIENCE)
        self.operating = True
        self.detector.load(task.thread, where, size, False, word)

    def _check_live(self, where, word):
        heap, (low, _) = self.heap_map(self.rank), where.bounds()
        place = heap.owner(low) if heap is not None else None
        if place is not None and heap.allocation(place[1]) is None:
            site = sites.text(sites.here())
            text = f"{heap.describe(low)}\n{word} by rank {self.rank} host at {site}"
            self.found("bad-access", text, (site,), (self.rank,))

    def _host_watched(self, tensor):
        places = self.detector.places
        if not places.copied:
            return False
        span = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape)) + 1
        return places.is_copied(self.rank, tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size())

    def _host_done(self):
        self.operating = False
        self.detector.load_done()
