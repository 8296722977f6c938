"""The race detector: told of every access, it knows what is ordered by what, and reports what is not.

An access is ordered before another by: the order of one program; a release and the acquire that sees it, when the scope of
both reaches the other; a launch (host before program) and its end (program before host; a rank's launches and its host's
tensor operations are one stream); a meeting of hosts (barriers, collective calls, torch.distributed).
Not seen: orders inside one program (a missing `tl.debug_barrier`), memory that is neither symmetric nor part of a kernel's
tensor arguments, and what libraries do to memory outside of torch operations.
"""

import numpy as np

from ..context import SIGNAL_BYTES
from ..interpreter.affine import Affine
from ..interpreter.observer import addresses_of
from ..interpreter.scheduler import COMPARE
from . import history, signals, sites
from .clocks import Threads, called, joined
from .history import ATOMIC_READ, ATOMIC_WRITE, READ, WRITE, Histories
from .places import Places

MANY_LANES = 4096  # an atomic on more words than this is no signal: its words publish nothing


class Detector:
    """`heap_map(rank)` is the rank's HeapMap or None; `found(kind, text, places, ranks)` takes what is found. `weak`: a
    WeakMemory, which then decides what is read, or None."""

    def __init__(self, world, heap_map, found, weak=None):
        self.places, self.found, self.weak = Places(heap_map), found, weak
        if weak is not None:
            weak.describe = self.places.describe
        self.threads = Threads(world)
        self.histories, self.cells = Histories(), signals.Cells()
        self.lines = {}  # number of a 64-byte line -> address of the signal in it
        self._stored = []  # stores to signals that are being made: their values are there at the next call
        self.written = 0  # counts writes: who waits looks again only when it has changed

    # -- accesses
    def load(self, thread, where, size, volatile, word):
        """A plain read. A volatile one is a relaxed atomic read at system scope, as on a GPU."""
        site = sites.here()
        self._settle()
        parts = self.places.split(thread, where, size)
        kind, word, scope = (ATOMIC_READ, "volatile load", "sys") if volatile else (READ, _role(word, "read"), None)
        event = self.histories.event(thread, site, word, scope, size=size if volatile else 0) if parts else None
        missed = self.weak.load(thread, parts, size, event) if self.weak is not None else ()
        for shadow, part in parts:
            self._access(thread, shadow, part, size, kind, event)
            for cell in self.cells.touched(part, size):
                if volatile:
                    behind = sum(write.holds(cell.address) for write in missed)
                    self.cells.read(cell, thread, "relaxed", "sys", site, behind=behind)
                else:
                    cell.observed = True
                    self._heard_plainly(cell, thread, site)

    def load_done(self):
        """The latest read has been made; of a copy, its write too."""
        if self.weak is not None:
            self.weak.restore()

    @property
    def reading(self):
        """Whether a read is being made that nobody else may come between."""
        return self.weak is not None and bool(self.weak.patches)

    def _heard_plainly(self, cell, thread, site):
        """A plain read of a signal: if the program goes by what it read, an acquire is missing."""
        if cell.entries:
            last = cell.entries[-1]
            if not thread.knows(last.thread, last.clock):
                thread.wide = joined(thread.wide, last.wide)
                thread.hear_of((*last.weak, ("acquire", last, "sys", site)))

    def store(self, thread, where, size, word, sem=None):
        """A plain write; with `sem` "relaxed" as many relaxed atomic stores at system scope."""
        site, word = sites.here(), _role(word, "write")
        self._settle()
        self.written += 1
        for shadow, part in self.places.split(thread, where, size):
            if sem is not None:
                event = self.histories.event(thread, site, word, "sys", True, size=size)
                if self.weak is not None:
                    self.weak.store_words(thread, shadow, part, size, event)
                self._access(thread, shadow, part, size, ATOMIC_WRITE, event)
                lanes = addresses_of(part)
                if lanes.size <= MANY_LANES:
                    cells = [self.cells.touch(address, size) for address in lanes.tolist()]
                    self._stored += [(cell, thread, site, word) for cell in cells]
                continue
            if thread.fenced is not None and size in (4, 8) and _one(part) is not None:
                # One word after a fence may be a signal: on every target it is written at once, and after what was before.
                # To those who read it atomically it is one; to other plain accesses it is a plain write.
                address = _one(part)
                event = self.histories.event(thread, site, word, "sys", True, plain=True, size=size)
                if self.weak is not None:
                    self.weak.store(thread, shadow, part, size, event)
                self._access(thread, shadow, part, size, ATOMIC_WRITE, event)
                self._stored.append((self.cells.touch(address, size), thread, site, word))
                continue
            event = self.histories.event(thread, site, word)
            if self.weak is not None:
                self.weak.store(thread, shadow, part, size, event)
            self._access(thread, shadow, part, size, WRITE, event)
            for cell in self.cells.touched(part, size):
                cell.reset()

    def _settle(self):
        if self.weak is not None:
            self.weak.settle()
        stored, self._stored = self._stored, []
        for cell, thread, site, word in stored:
            wiped = self._wiped(cell, thread)
            entry = self.cells.write(cell, thread, "relaxed", "sys", site, word, begins=True)
            self._lost(thread, cell.address, entry, wiped)

    def _access(self, thread, shadow, where, size, kind, event):
        def report(earlier, address, number):
            self._race(thread, earlier, event, kind, address, number)

        shadow.access(self.histories, where, size, kind, event, thread, report)
        if len(self.histories.states) > history.LIMIT:
            self.histories.collect(self.places.all_shadows())

    # -- atomics and signals
    def atomic(self, thread, lanes, size, sem, scope):
        site = sites.here()
        self._settle()
        event = self.histories.event(thread, site, "atomic", scope, True, size=size)
        parts = self.places.split(thread, lanes, size)
        if self.weak is not None:
            self.weak.atomic(thread, parts, size, event)
        for shadow, part in parts:
            self._access(thread, shadow, part, size, ATOMIC_WRITE, event)
        if lanes.size <= MANY_LANES and size in (4, 8):
            for address in lanes.tolist():
                cell = self.cells.touch(address, size)
                self.cells.read(cell, thread, sem, scope, site)

    def atomic_done(self, thread, lanes, size, sem, scope, wrote, adds=False):
        if self.weak is not None:
            self.weak.atomic_done(thread, wrote, lanes, size)
        if lanes.size > MANY_LANES or size not in (4, 8) or wrote is False:
            return
        self.written += 1
        site = sites.here()
        wrote = np.broadcast_to(wrote, lanes.shape)
        for address, changed in zip(lanes.tolist(), wrote.tolist()):
            if changed:
                self.cells.write(self.cells.at(address, size), thread, sem, scope, site, "atomic", adds=adds)
        thread.tick()

    def notify(self, thread, address, size, op):
        site = sites.here()
        self._settle()
        self._line(thread, address, size, site)
        cell = self.cells.touch(address, size)
        if cell.label is None:
            cell.label = self.places.describe(thread.rank, address)
        event = self.histories.event(thread, site, f"notify ({op})", "sys", True, size=size)
        parts = self.places.split(thread, Affine(address, (), ()), size)
        if self.weak is not None:
            self.weak.atomic(thread, parts, size, event)
        for shadow, part in parts:
            self._access(thread, shadow, part, size, ATOMIC_WRITE, event)

    def notify_done(self, thread, address, size, op):
        if self.weak is not None:
            self.weak.atomic_done(thread, True, np.array([address], np.uint64), size)
        self.written += 1
        site = sites.here()
        cell = self.cells.at(address, size)
        lost = self._wiped(cell, thread) if op == "set" else []
        entry = self.cells.write(cell, thread, "release", "sys", site, f"notify ({op})", begins=op == "set")
        cell.notified = entry
        cell.sites.add(site)
        for other, (their_op, value, clock, theirs) in cell.writes.items():
            if other == thread.id or thread.knows(other, clock) or "set" not in (op, their_op):
                continue
            if op == their_op and value == entry.value:
                continue
            lost.append(theirs)
        self._lost(thread, address, entry, lost)
        cell.writes[thread.id] = op, entry.value, thread.clock, entry
        thread.tick()

    def _wiped(self, cell, thread):
        """Additions by atomics that a set, which the thread is about to make or has just made, takes away, though nobody can
        know: it is ordered after none of them, and has not seen their values either. An exchange or a compare-and-swap is
        none: it takes what it finds, and may be meant to be set again."""
        seen = cell.read.get(thread.id, -1)
        wiped = [
            entry
            for other, (number, entry) in cell.adds.items()
            if other != thread.id and number > seen and not thread.knows(other, entry.clock)
        ]
        cell.adds = {}
        return wiped

    def _lost(self, thread, address, entry, others):
        """`entry`, which thread has just written, or one of `others` sets the word that the other one changes."""
        for theirs in others:
            text = (
                f"{self.places.describe(thread.rank, address)}\n"
                f"{theirs.word} by {self.threads.list[theirs.thread]} at {sites.text(theirs.site)}\n"
                f"{entry.word} by {thread} at {sites.text(entry.site)}\n"
                "Neither is ordered before the other, so the set may wipe out the other's value."
            )
            places = sites.text(theirs.site), sites.text(entry.site)
            self.found("lost-update", text, places, (theirs.rank, thread.rank))

    def _line(self, thread, address, size, site):
        """A signal has a 64-byte line to itself."""
        line = address // SIGNAL_BYTES
        first = self.lines.setdefault(line, (address, site))
        if first[0] != address:
            text = (
                f"{self.places.describe(thread.rank, first[0])}, used at {sites.text(first[1])}\n"
                f"{self.places.describe(thread.rank, address)}, used at {sites.text(site)} by {thread}"
            )
            self.found("shared-line", text, (sites.text(first[1]), sites.text(site)), (thread.rank,))

    def _look(self, thread, address, size, scope, site, word):
        self._settle()
        self._line(thread, address, size, site)
        cell = self.cells.at(address, size)
        cell.observed, cell.waited = True, site
        event = self.histories.event(thread, site, word, scope, size=size)
        parts = self.places.split(thread, Affine(address, (), ()), size)
        if self.weak is not None:
            self.weak.see(thread, parts, size)
        for shadow, part in parts:
            self._access(thread, shadow, part, size, ATOMIC_READ, event)
        return cell

    def waiting(self, thread, address, size):
        """A wait has begun, which may never end."""
        cell = self.cells.at(address, size)
        cell.observed, cell.waited = True, sites.here()

    def waited(self, thread, wait, size, sem="acquire", scope="sys"):
        site = sites.here()
        cell = self._look(thread, wait.address, size, scope, site, "wait")
        compare = COMPARE[wait.compare]
        first = self.cells.read(cell, thread, sem, scope, site, lambda value: compare(value, wait.value))
        if first is not None:
            wait.hit = first

    def tested(self, thread, address, size, hit):
        site = sites.here()
        cell = self._look(thread, address, size, "sys", site, "test")
        if hit:
            self.cells.read(cell, thread, "acquire", "sys", site)

    def fence(self, thread, complete=False):
        """dl.fence; with `complete` dl.quiet."""
        self._settle()
        if complete and self.weak is not None:
            self.weak.complete(thread, self.places.all_shadows())
        signals.fence(thread)

    # -- launches
    def launched(self, rank, tensors):
        """`tensors`: (label, address, bytes) of what the kernel was given."""
        self._settle()
        self.threads.launched(rank)
        self.places.launched(rank, tensors)

    def program_ended(self, thread):
        self._settle()
        self.threads.program_ended(thread)

    def meet(self, ranks):
        self._settle()
        self.threads.meet(ranks)

    def launch_ended(self, rank):
        self._settle()
        self.places.launch_ended(rank)
        self.threads.launch_ended(rank)

    # -- the end
    def ended(self):
        """The run has come to its end: signals that nobody ever looked at. A line that notifies many signals (of buffers
        that a short run does not use again, say) counts as heard when one of them was looked at."""
        cells = self.cells.by_address.values()
        heard = {site for cell in cells if cell.observed for site in cell.sites}
        for cell in cells:
            if cell.notified is not None and not cell.observed and not cell.sites & heard:
                entry = cell.notified
                text = (
                    f"{cell.label}, value {entry.value}\n"
                    f"{entry.word} by {self.threads.list[entry.thread]} at {sites.text(entry.site)}"
                )
                self.found("unwaited-signal", text, (sites.text(entry.site),), (entry.rank,))

    def forget(self):
        self.histories, self.cells = Histories(), signals.Cells()
        self.places.forget()

    # -- reports
    def _race(self, thread, earlier, event, kind, address, number):
        cell = self.cells.by_address.get(address)
        if earlier.plain and cell is not None and cell.follows(thread, earlier):
            return
        reason = None
        weak = None
        plain = None if (earlier.scope is None) == (event.scope is None) else event if event.scope is None else earlier
        if plain is not None and (event.plain or earlier.plain) and (kind == WRITE or self._wrote(earlier, number)):
            plain = None  # two plain stores, one of them after a fence
        if thread.knows_widely(earlier.thread, earlier.clock):
            # Not the adds to the very tensor that a host goes on to use: these make a sum, no signal.
            total = self.places.allocation(thread.rank, address) if plain is not None and plain.program is None else None
            weak = next(
                (
                    one
                    for one in thread.weak
                    if _covers(one[1], earlier)
                    and (total is None or self.places.allocation(thread.rank, one[1].address) is not total)
                ),
                None,
            )
        atomics = earlier.scope is not None and event.scope is not None and not (earlier.plain and event.plain)
        mixed = atomics and earlier.size != event.size
        if mixed:
            reason = "data-race"
        elif atomics:
            reason = "narrow-scope"
        elif weak is not None:
            reason = {"release": "missing-release", "acquire": "missing-acquire", "scope": "narrow-scope"}[weak[0]]
        elif plain is not None and plain.program is not None and self._signal(address):
            reads = kind == READ or (plain is earlier and kind in (ATOMIC_WRITE,) and not self._wrote(earlier, number))
            reason = "missing-acquire" if reads else "missing-release"
        elif kind == WRITE and event.rank != earlier.rank and self._was_read(earlier, number):
            write = self.histories.states[number][0]
            if write and self.histories.events[write].rank == event.rank:
                reason = "buffer-reuse"
        reason = reason or "data-race"
        lines = [
            self.places.describe(thread.rank, address),
            f"{earlier.word} by {self._name(earlier)} at {sites.text(earlier.site)}",
            f"{event.word} by {self._name(event)} at {sites.text(event.site)}",
        ]
        if weak is not None and reason in ("missing-release", "missing-acquire", "narrow-scope") and not atomics:
            _, entry, scope, site = weak
            lines.append(
                f"They meet in {self.places.describe(thread.rank, entry.address)}: {entry.word} with scope {entry.scope} at "
                f"{sites.text(entry.site)}, seen with scope {scope} at {sites.text(site)}"
            )
        if mixed:
            lines.append(f"Atomics of {earlier.size} and of {event.size} bytes are not atomic to one another.")
        places = sites.text(earlier.site), sites.text(event.site)
        self.found(reason, "\n".join(lines), places, (earlier.rank, event.rank))

    def _signal(self, address):
        cell = self.cells.by_address.get(address)
        return cell is not None and (cell.notified is not None or cell.waited is not None or bool(cell.entries))

    def _wrote(self, event, number):
        return self.histories.states[number][0] == event.number

    def _was_read(self, event, number):
        return event.number in self.histories.states[number][1]

    def _name(self, event):
        return called(event.rank, event.program)


def _covers(entry, event):
    return event.thread < len(entry.wide) and event.clock <= entry.wide[event.thread]


def _role(word, role):
    """A copy both reads and writes: says which."""
    return f"{word} ({role})" if word.startswith(("put", "get", "copy_")) else word


def _one(where):
    """The address of an access to one word, else None."""
    if isinstance(where, Affine):
        return where.base if all(n == 1 for n in where.shape) else None
    return int(where[0]) if where.size == 1 else None
