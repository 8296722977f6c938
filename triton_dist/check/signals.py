"""What was published through each word of memory: the order of its values, and what each of them releases.

A wait synchronises with the *first* value that satisfies it, not with the latest that happened to be there: then whatever
a faster reader would have missed is missed in every schedule. The token is that first value, too, so the program goes on
as it would have then. A read-modify-write continues the release sequence that it adds to; a set begins a new one (on
NVIDIA a set is an exchange and continues it; on Ascend it is a store, so a portable program must not rely on that).
"""

import bisect
import ctypes

import numpy as np

from ..interpreter.affine import Affine
from .clocks import joined

KEPT = 1024  # values of a word that are remembered

_INTEGERS = {4: ctypes.c_int32, 8: ctypes.c_int64}


def value_at(address, size):
    kind = _INTEGERS.get(size)
    return kind.from_address(address).value if kind else 0


class Entry:
    """A value of a word and who wrote it. `vc` is what it publishes, None for a relaxed write without a fence."""

    __slots__ = ("value", "thread", "rank", "clock", "scope", "vc", "wide", "site", "word", "begins",
                 "weak", "address")  # fmt: skip

    def __init__(self, address, value, thread, scope, vc, site, word, begins):
        self.address, self.weak = address, thread.weak
        self.value, self.thread, self.rank, self.clock = value, thread.id, thread.rank, thread.clock
        self.scope, self.vc, self.wide, self.site, self.word = scope, vc, thread.wide.copy(), site, word
        self.begins = begins  # a release sequence


class Cell:
    __slots__ = ("address", "size", "initial", "entries", "dropped", "observed", "notified", "waited", "writes", "read",
                 "label", "sites", "adds")  # fmt: skip

    def __init__(self, address, size):
        self.address, self.size = address, size
        self.observed = False  # whether anything ever looked at it
        self.notified, self.sites = None, set()  # the latest notify: an Entry; the lines that notify it
        self.label = None  # how a report names it
        self.waited = None  # the site of a dl.wait or dl.test on it
        self.writes = {}  # thread id -> (op, value, clock, Entry): its latest notify, to find sets that overwrite
        self.reset()

    def reset(self):
        """A plain store: what was published before is gone."""
        self.initial, self.entries, self.dropped, self.read = None, [], 0, {}
        self.adds = {}  # thread id -> (number of the entry, Entry): its latest addition (maximum ...) that changed the value

    def known(self, thread):
        """The index of the latest entry that the thread has seen or is ordered after, -1 for none."""
        found = self.read.get(thread.id, -1) - self.dropped
        for i in range(len(self.entries) - 1, max(found, -1), -1):
            if thread.knows(self.entries[i].thread, self.entries[i].clock):
                return i
        return max(found, -1)

    def follows(self, thread, event):
        """Whether the thread has seen, or is ordered after, a write that came after `event`'s: then nothing it does to the
        word can come before that, though nothing else is ordered by it (a lock that is left by a store after a fence)."""
        latest = self.known(thread)
        return any(one.thread == event.thread and one.clock >= event.clock for one in self.entries[: latest + 1])


class Cells:
    """All words that were ever published through."""

    def __init__(self):
        self.by_address, self.sorted = {}, []

    def at(self, address, size):
        cell = self.by_address.get(address)
        if cell is None:
            cell = self.by_address[address] = Cell(address, size)
            bisect.insort(self.sorted, address)
        return cell

    def touched(self, where, size):
        """Those that an access touches: `size` bytes at each address of `where`, an Affine or an array."""
        if not self.sorted:
            return ()
        flat = not isinstance(where, Affine)
        low, high = (int(where.min()), int(where.max())) if flat else where.bounds()
        # A word has at most 8 bytes.
        first, last = bisect.bisect_left(self.sorted, low - 7), bisect.bisect_left(self.sorted, high + size)
        cells = [self.by_address[a] for a in self.sorted[first:last]]
        if not cells:
            return ()
        if not flat:
            return [cell for cell in cells if where.meets(size, cell.address, cell.size)]
        lanes = np.sort(where, axis=None)
        ends = np.array([cell.address + cell.size for cell in cells], np.uint64)
        latest = np.searchsorted(lanes, ends).tolist()  # lanes that begin before the word's end
        return [cell for cell, n in zip(cells, latest) if n and int(lanes[n - 1]) + size > cell.address]

    def touch(self, address, size):
        """Before a word is written by an atomic: keeps what it held."""
        cell = self.at(address, size)
        if not cell.entries and cell.initial is None:
            cell.initial = value_at(address, size)
        return cell

    def write(self, cell, thread, sem, scope, site, word, begins=False, adds=False):
        """After a word was written by an atomic. `adds`: to what was there."""
        if sem in ("release", "acq_rel"):
            vc = thread.vc.copy()
        else:
            vc, scope = thread.fenced, scope if thread.fenced is None else "sys"
        value = value_at(cell.address, cell.size)
        entry = Entry(cell.address, value, thread, scope, vc, site, word, begins or not cell.entries)
        before = cell.entries[-1].value if cell.entries else cell.initial
        cell.entries.append(entry)
        number = cell.read[thread.id] = cell.dropped + len(cell.entries) - 1
        if adds and value != before:
            cell.adds[thread.id] = number, entry
        if len(cell.entries) > KEPT:
            del cell.entries[0]
            cell.dropped += 1
            cell.initial = None
        return entry

    def read(self, cell, thread, sem, scope, site, satisfied=None, behind=0):
        """A read of the word: joins what it acquires to the thread. With `satisfied`, a wait: returns the first value that
        ends it. Without, a look at the latest one but `behind`."""
        cell.observed = True
        entries = cell.entries
        if not entries:
            return None
        index = len(entries) - 1 - behind
        if index < 0:
            return None
        if satisfied is not None:
            known = cell.known(thread)
            if known < 0 and cell.initial is not None and not cell.dropped and satisfied(cell.initial):
                return cell.initial
            index = next((i for i in range(max(known, 0), len(entries)) if satisfied(entries[i].value)), None)
            if index is None:
                return None
        cell.read[thread.id] = max(cell.read.get(thread.id, -1), cell.dropped + index)
        i = index
        while i >= 0:
            self._acquire(entries[i], thread, sem, scope, site)
            if entries[i].begins:
                break
            i -= 1
        return entries[index].value

    def _acquire(self, entry, thread, sem, scope, site):
        if entry.thread == thread.id:
            return
        needed = ("gpu", "sys") if entry.rank == thread.rank else ("sys",)
        narrow = [side for side, used in (("from", entry.scope), ("to", scope)) if used not in needed]
        acquires = sem in ("acquire", "acq_rel")
        if entry.vc is not None and not narrow:
            if acquires:
                if not thread.knows(entry.thread, entry.clock):
                    thread.join(entry.vc, entry.wide)
                    thread.hear_of(entry.weak)
                return
            thread.heard = entry.vc.copy() if thread.heard is None else joined(thread.heard, entry.vc)
            thread.heard_wide = entry.wide.copy() if thread.heard_wide is None else joined(thread.heard_wide, entry.wide)
        if not thread.knows_widely(entry.thread, entry.clock):
            thread.wide = joined(thread.wide, entry.wide)
        if not thread.knows(entry.thread, entry.clock):
            reason = "release" if entry.vc is None else "scope" if narrow else "acquire"
            thread.hear_of((*entry.weak, (reason, entry, scope, site)))


def fence(thread):
    """dl.fence and dl.quiet: what was stored before comes before what is stored after, and what was read before comes
    before what is read after."""
    if thread.heard is not None:
        thread.join(thread.heard, thread.heard_wide)
        thread.heard = thread.heard_wide = None
    thread.fenced = thread.vc.copy()
    thread.tick()
