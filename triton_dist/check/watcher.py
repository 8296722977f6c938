"""What stands between a running kernel and the detector: at every access others may run first, then the detector is told."""

import numpy as np

from ..interpreter.observer import addresses_of
from .signals import value_at


class Watcher:
    """The observer of a simulation: see interpreter/observer.py."""

    def __init__(self, simulation):
        self.simulation, self.detector = simulation, simulation.detector
        self.exhaustive = simulation.strategy.exhaustive
        self.recorders = simulation.recorders

    def _record(self, what, *about):
        """Tells the timeline, after others may have run and before the access is made."""
        if self.recorders:
            getattr(self.recorders[self.simulation.rank], what)(*about)

    def launching(self, tensors):
        self.simulation.arguments = tensors
        self._record("launching", tensors)

    def program(self, index, number):
        self._record("program", index, number)

    def program_done(self, index, number):
        self._record("program_done", index, number)

    def load(self, where, size, volatile, word):
        self.simulation.step(volatile)
        if volatile and self.exhaustive:
            self._note_lanes("r", addresses_of(where))
        self._record("load", where, size, volatile, word)
        self.detector.load(self.simulation.current.thread, where, size, volatile, word)

    def load_done(self):
        self.detector.load_done()

    def store(self, where, size, word, sem=None):
        if not self.detector.reading:  # else the second half of a copy
            self.simulation.step(sem is not None)
        if sem is not None and self.exhaustive:
            for address in addresses_of(where).tolist():
                self.simulation.note("w", address, value_at(address, size))
        self._record("store", where, size, word)
        self.detector.store(self.simulation.current.thread, where, size, word, sem)

    def _note_lanes(self, kind, lanes):
        for address in lanes.ravel().tolist():
            self.simulation.note(kind, address)

    def atomic(self, lanes, size, sem, scope):
        self.simulation.step()
        if self.exhaustive:
            self.before = [value_at(address, size) for address in lanes.tolist()]
        self._record("atomic", lanes, size, sem, scope)
        self.detector.atomic(self.simulation.current.thread, lanes, size, sem, scope)

    def atomic_done(self, lanes, size, sem, scope, wrote, adds=False):
        self.detector.atomic_done(self.simulation.current.thread, lanes, size, sem, scope, wrote, adds)
        if self.exhaustive:
            wrote = np.broadcast_to(wrote, lanes.shape)
            for address, value, written in zip(lanes.tolist(), self.before, wrote.tolist()):
                if written:
                    self.simulation.note("w", address, value)
            self._note_lanes("r", lanes[~wrote])

    def notify(self, address, size, op):
        self.simulation.step()
        self.simulation.note("w", address, value_at(address, size))
        self._record("notify", address, size, op)
        self.detector.notify(self.simulation.current.thread, address, size, op)

    def notify_done(self, address, size, op):
        self._record("notify_done", address, size, op)
        self.detector.notify_done(self.simulation.current.thread, address, size, op)

    def waiting(self, wait, size):
        self._record("waiting", wait, size)
        self.detector.waiting(self.simulation.current.thread, wait.address, size)

    def waited(self, wait, size, sem="acquire", scope="sys"):
        self.detector.waited(self.simulation.current.thread, wait, size, sem, scope)
        self._record("waited", wait, size)

    def test(self, address, size):
        self.simulation.step()
        self._record("test", address, size)

    def tested(self, address, size, hit):
        self.simulation.note("r", address)
        self.detector.tested(self.simulation.current.thread, address, size, hit)

    def fence(self, complete=False):
        self._record("fence", complete)
        self.detector.fence(self.simulation.current.thread, complete)
