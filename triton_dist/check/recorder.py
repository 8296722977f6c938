"""What kernels do, recorded: the events of a trace and a summary. For what is in them, see timeline.py."""

import collections
import fcntl
import json
import math
import os
import time

from .. import context
from ..interpreter import scheduler
from ..interpreter.affine import Affine
from . import sites
from .signals import value_at

COPIES = {"put", "get", "put_2d", "get_2d"}
SHOWN = 5
LIMIT = 200_000  # events of a rank; what comes after is left out
HOST = 1 << 20  # the host's thread in a trace: after the programs


class Recorder:
    """The observer of one rank: see interpreter/observer.py. `steps()` is the clock of a simulation; None: the real one."""

    def __init__(self, steps=None):
        self.steps = steps
        self.events, self.open, self.waits, self.dropped = [], {}, {}, 0
        self.threads = {}  # program index -> its number
        self.sent, self.fetched = collections.Counter(), collections.Counter()  # peer -> bytes
        self.blocked = collections.Counter()  # description of a signal -> microseconds
        self.longest = (0.0, "", "")  # microseconds, signal, source line
        self.started, self.kernels = {}, 0
        self.rank = 0

    # -- events
    def _now(self):
        self.rank = scheduler.rank
        if self.steps is not None:
            return self.steps()
        return time.monotonic_ns() / 1e3  # microseconds, alike in all processes of a host

    def _thread(self):
        worker = scheduler.current
        return self.threads.get(worker.index, 0) if worker is not None else 0

    def _event(self, **event):
        if len(self.events) < LIMIT:
            self.events.append({"pid": self.rank, **event})
        else:
            self.dropped += 1

    def _span(self, name, thread, start, end, **about):
        self._event(ph="X", name=name, tid=thread, ts=start, dur=max(end - start, 0.1), args=about)

    def _slice(self, name, start, end, **about):
        self._span(name, self._thread(), start, end, **about, at=sites.text(sites.here()))

    def _close(self, now):
        """Ends the program's copy that was under way."""
        thread = self._thread()
        if thread in self.open:
            name, start, about = self.open.pop(thread)
            self._span(name, thread, start, now, **about)

    def _peer(self, where):
        address = where.base if isinstance(where, Affine) else int(where[0]) if where.size else 0
        place = context.heap_map.owner(address) if context.heap_map is not None else None
        return None if place is None else place[0]

    def _lanes(self, where):
        return math.prod(where.shape) if isinstance(where, Affine) else where.size

    # -- what the engine tells
    def launching(self, tensors):
        self.kernels += 1

    def program(self, index, number):
        self.threads[index] = number
        self.started[index] = self._now()

    def program_done(self, index, number):
        now = self._now()
        self._close(now)
        start = self.started.pop(index)
        self._span(f"{scheduler.kernel} {index}", number, start, now)

    def host_waited(self, start, what):
        """A simulated host has waited since step `start`."""
        what = what.removeprefix("in ").removeprefix("its ").removesuffix(" to end")
        self._span(what, HOST, start, self._now())
        self.threads["host"] = HOST

    def load(self, where, size, volatile, word):
        now = self._now()
        self._close(now)
        nbytes = self._lanes(where) * size
        peer = self._peer(where) if nbytes else None
        if peer is not None and peer != self.rank:
            self.fetched[peer] += nbytes
        if word in COPIES:
            about = {"bytes": nbytes, "at": sites.text(sites.here())}
            if peer is not None and word.startswith("get"):
                about["peer"] = peer
            self.open[self._thread()] = word, now, about

    def load_done(self):
        pass

    def store(self, where, size, word, sem=None):
        nbytes = self._lanes(where) * size
        peer = self._peer(where) if nbytes else None
        if peer is not None and peer != self.rank:
            self.sent[peer] += nbytes
        if word in COPIES and self._thread() in self.open:  # its load came just before
            if peer is not None and word.startswith("put"):
                self.open[self._thread()][2]["peer"] = peer
            return
        self._close(self._now())

    def atomic(self, lanes, size, sem, scope):
        self._close(self._now())

    def atomic_done(self, lanes, size, sem, scope, wrote, adds=False):
        pass

    def notify(self, address, size, op):
        now = self._now()
        self._close(now)
        self.notifying = now

    def notify_done(self, address, size, op):
        now = self._now()
        self._slice(f"notify ({op})", self.notifying, now, signal=self._signal(address), value=value_at(address, size))
        self._arrow("s", address, value_at(address, size), self.notifying)

    def waiting(self, wait, size):
        now = self._now()
        self._close(now)
        self.waits[scheduler.current.index] = now

    def waited(self, wait, size, sem="acquire", scope="sys"):
        now, start = self._now(), self.waits.pop(scheduler.current.index)
        signal = self._signal(wait.address)
        self._slice("wait", start, now, signal=signal, wanted=f"{wait.compare} {wait.value}", seen=wait.hit)
        self._arrow("f", wait.address, wait.hit, now)
        self.blocked[signal] += now - start
        self.longest = max(self.longest, (now - start, signal, sites.text(sites.here())))

    def test(self, address, size):
        self._close(self._now())

    def tested(self, address, size, hit):
        pass

    def fence(self, complete=False):
        self._close(self._now())

    def _signal(self, address):
        return context.heap_map.describe(address)

    def _arrow(self, phase, address, value, at):
        owner, offset = context.heap_map.owner(address)
        id, binding = f"{owner}.{offset:x}.{value}", {"bp": "e"} if phase == "f" else {}
        self._event(ph=phase, name="signal", cat="signal", id=id, tid=self._thread(), ts=at, **binding)

    # -- results
    def write(self, path):
        """Adds this rank's events to the file, a JSON array that the ranks share."""
        names = [{"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}]
        for index, number in self.threads.items():
            about = {"name": index if index == "host" else f"program {index}"}
            names.append({"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number, "args": about})
        lines = ",\n".join(json.dumps(event) for event in names + self.events).encode()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            os.lseek(descriptor, max(size - 2, 0), os.SEEK_SET)
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write((b",\n" if size else b"[\n") + lines + b"\n]")
        finally:
            os.close(descriptor)

    def _shown(self, time):
        return f"{time / 1e3:.2f} ms" if self.steps is None else f"{time} steps"

    def summary(self):
        lines = [f"rank {self.rank}: {self.kernels} launches"]
        for verb, counter in (("to", self.sent), ("from", self.fetched)):
            if counter:
                shown = ", ".join(f"{peer}: {nbytes}" for peer, nbytes in sorted(counter.items()))
                lines.append(f"  bytes {verb} rank {shown}")
        for signal, us in self.blocked.most_common(SHOWN):
            lines.append(f"  blocked {self._shown(us)} on {signal}")
        if self.longest[1]:
            lines.append(f"  longest wait: {self._shown(self.longest[0])} for {self.longest[1]} at {self.longest[2]}")
        if self.dropped:
            lines.append(f"  the trace ends after {LIMIT} events; {self.dropped} more are left out")
        return "\n".join(lines)


def write(path, recorders, title):
    """A new trace of all ranks of a simulated schedule; returns the summary of all."""
    open(path, "wb").close()
    for rank, recorder in enumerate(recorders):
        recorder.rank = rank
        recorder.write(path)
    return "\n".join([title, *("  " + line for one in recorders for line in one.summary().splitlines())])
