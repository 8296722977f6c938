"""Who touched each byte last: the shadow of memory that the race detector keeps.

For every granule of an allocation the shadow holds one number: that of its *history*, which is the last plain write, the
reads since then, and the atomics since then, of all threads that nobody is ordered after. Equal histories are stored
once. A granule is the largest power of two that all accesses so far were multiples of, at most 8 bytes; a narrower access
splits them, down to single bytes. So the shadow takes 4 bytes a granule of the memory that kernels touch, at most 4 times
as much as the memory itself, most often as much or half.

Up to the first race histories lose nothing: an event leaves one only when another, ordered after it, has taken its place,
so any access that races with it races with that other one as well. A write that races replaces what it races with.
"""

import numpy as np

from ..interpreter.affine import Affine
from ..interpreter.memory import view

LIMIT = 400_000  # histories, before those that no granule has any more are dropped

READ, WRITE, ATOMIC_READ, ATOMIC_WRITE = range(4)
EMPTY = (0, (), ())


class Event:
    """An access, or many alike: by one thread, between two steps of its clock, at one source line. `plain`: an atomic that
    is none to another plain one. `size`: bytes of each word of an atomic, which is none to one of another size."""

    __slots__ = ("number", "thread", "rank", "program", "clock", "site", "word", "scope", "writes", "plain",
                 "size")  # fmt: skip

    def __init__(self, number, thread, site, word, scope, writes, plain, size):
        self.number, self.thread, self.rank, self.program = number, thread.id, thread.rank, thread.program
        self.clock, self.site, self.word, self.scope, self.writes = thread.clock, site, word, scope, writes
        self.plain, self.size = plain, size

    def before(self, thread):
        """Whether it is ordered before the next step of `thread`."""
        return thread.knows(self.thread, self.clock)


class Histories:
    """Every event and every history of a run, each stored once."""

    def __init__(self):
        self.events, self.event_numbers = [None], {}
        self.states, self.state_numbers = [EMPTY], {EMPTY: 0}

    def event(self, thread, site, word, scope=None, writes=False, plain=False, size=0):
        key = thread.id, thread.clock, site, word, scope, writes, plain, size
        number = self.event_numbers.get(key)
        if number is None:
            number = self.event_numbers[key] = len(self.events)
            self.events.append(Event(number, thread, site, word, scope, writes, plain, size))
        return self.events[number]

    def number(self, state):
        number = self.state_numbers.get(state)
        if number is None:
            number = self.state_numbers[state] = len(self.states)
            self.states.append(state)
        return number

    def after(self, number, kind, event, thread):
        """(number of the history after `event`, events that it races with)."""
        write, reads, atomics = self.states[number]
        races = []
        events = self.events
        if write and not events[write].before(thread):
            races.append(events[write])
        if kind == READ:
            races += [e for e in map(events.__getitem__, atomics) if e.writes and not e.before(thread)]
            return self.number((write, self._with(reads, event, thread), atomics)), races
        if kind == WRITE:
            races += [e for e in map(events.__getitem__, reads + atomics) if not e.before(thread)]
            return self.number((event.number, (), ())), races
        if kind == ATOMIC_WRITE:
            races += [e for e in map(events.__getitem__, reads) if not e.before(thread)]
        for e in map(events.__getitem__, atomics):
            if (e.writes or event.writes) and not e.before(thread) and not covers(e, event):
                races.append(e)
        return self.number((write, reads, self._with(atomics, event, thread))), races

    def _with(self, numbers, event, thread):
        kept = []
        for number in numbers:
            e = self.events[number]
            if number == event.number or (e.before(thread) and e.writes <= event.writes and e.plain <= event.plain):
                continue
            kept.append(number)
        kept.append(event.number)
        return tuple(sorted(kept))

    def collect(self, shadows):
        """Forgets histories that no granule has any more."""
        used = np.unique(np.concatenate([np.zeros(1, np.int32), *[np.unique(one.numbers) for one in shadows]]))
        new = np.zeros(len(self.states), np.int32)
        new[used] = np.arange(len(used), dtype=np.int32)
        for one in shadows:
            one.numbers = new[one.numbers]
        self.states = [self.states[n] for n in used.tolist()]
        self.state_numbers = {state: n for n, state in enumerate(self.states)}


def covers(one, other):
    """Whether two atomics are atomic to one another: they have the same size, each one's scope contains the other's thread,
    and one is no plain store."""
    if one.thread == other.thread:
        return True
    if (one.plain and other.plain) or one.size != other.size:
        return False
    needed = ("gpu", "sys") if one.rank == other.rank else ("sys",)
    return one.scope in needed and other.scope in needed


class Shadow:
    """The histories of `nbytes` of memory that begin at `base`."""

    def __init__(self, base, nbytes):
        self.base, self.nbytes = base, nbytes
        self.granule = 8
        self.writes = []  # of weak_memory.py: the latest, in order
        self.numbers = np.zeros(-(-nbytes // 8), np.int32)

    def _split(self, amount):
        """Makes granules small enough for offsets and strides that are multiples of `amount`."""
        granule = min(self.granule, amount & -amount)
        if granule < self.granule:
            self.numbers = np.repeat(self.numbers, self.granule // granule)
            self.granule = granule

    def adopt(self, other):
        """Takes over what the shadow of a part of this memory says."""
        self._split(other.granule | (other.base - self.base))
        other._split(self.granule)
        start = (other.base - self.base) // self.granule
        self.numbers[start : start + len(other.numbers)] = other.numbers
        self.writes = self.writes + other.writes if self.writes else other.writes

    def part(self, where, size):
        """The granules of an access, as a view (Affine) or as (flat array, indices)."""
        if isinstance(where, Affine):
            offset, amount = where.base - self.base, size
            shape, strides = [], []
            for n, s in zip(where.shape, where.strides):
                if n > 1 and s:
                    shape.append(n)
                    strides.append(s)
                    amount |= abs(s)
            self._split(amount | offset)
            g = self.granule
            if size > g:
                shape.append(size // g)
                strides.append(g)
            start = self.numbers.ctypes.data + offset // g * 4
            return view(start, self.numbers.dtype, shape, tuple(s // g * 4 for s in strides))
        offsets = np.unique(where).astype(np.int64) - self.base
        self._split(size | int(np.bitwise_or.reduce(offsets)))
        index = offsets // self.granule
        if size > self.granule:
            index = (index[:, None] + np.arange(size // self.granule)).ravel()
        return index

    def access(self, histories, where, size, kind, event, thread, report):
        """Notes an access; calls report(earlier event, address) for what it races with, once for each history."""
        part = self.part(where, size)
        flat = not isinstance(where, Affine)
        numbers = self.numbers[part] if flat else part
        if not numbers.size:
            return
        low, high = int(numbers.min()), int(numbers.max())
        if low == high:
            new, races = histories.after(low, kind, event, thread)
            if new != low:
                if flat:
                    self.numbers[part] = new
                else:
                    part[...] = new
        else:
            found, back = np.unique(numbers, return_inverse=True)
            after = [histories.after(n, kind, event, thread) for n in found.tolist()]
            renumbered = np.array([new for new, _ in after], np.int32)[back].reshape(numbers.shape)
            races = []
            for n, (_, some) in zip(found.tolist(), after):
                for e in some:
                    report(e, self._address(numbers, part, n, flat), n)
            if flat:
                self.numbers[part] = renumbered
            else:
                part[...] = renumbered
            return
        for e in races:
            report(e, self._address(None, part, low, flat), low)

    def _address(self, numbers, part, number, flat):
        """The address of the first granule of an access that has a certain history."""
        index = (0,) * (1 if flat else part.ndim)
        if numbers is not None:
            index = tuple(int(i) for i in np.argwhere(numbers == number)[0])
        if flat:
            place = int(part[index[0]])
        else:
            start = (part.__array_interface__["data"][0] - self.numbers.ctypes.data) // 4
            place = start + sum(i * s // 4 for i, s in zip(index, part.strides))
        return self.base + place * self.granule
