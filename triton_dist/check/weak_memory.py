"""Weak memory: what a GPU or NPU may do to the values of a program that does not order its accesses.

In an ordinary schedule a write is seen by all at once. Here it arrives at each other program (and each host) at a time of
its own, which the seed chooses, unless the program must see it earlier. So a program that goes by a signal without a release
and an acquire that reach it reads what lay there before, and computes a wrong result.

The model is that of views on the order of writes to each byte (as in Kang et al., POPL 2017), built on what
the race detector knows. Memory holds the newest value of each byte, and every write keeps, for a while, what it replaced.
A read goes back in that order past writes that have not arrived, but never past one that the program must see:

- its own (a program sees its own stores);
- one that happened before, by the detector's clocks: a release at a scope that reaches it, and its acquire; launches, their
  ends, meetings of hosts. So the reads of a program without races are those of an ordinary schedule, always;
- one that it has read before, or that somebody had read before what it is ordered after (coherence of one location);
- one that `quiet` has completed: the caller's, and those that it had seen (as fence.sc does; `fence` does not);
- one that is older than the horizon: nothing is late for ever, so that poll loops end.

Atomics act on the newest value, unless the scope of one of the two does not reach the other: then they may miss each other.
A plain store that nothing orders after an earlier one by another program may come to lie below it: the earlier one arrives
last and stays. Stores to different bytes arrive in any order, whatever their order in the program was.

Plain reads may come late, too, by a second run of a schedule: late_reads.py.

It is stronger than the PTX model in these points: volatile reads and atomics come before the stores that follow them, a wait
and a test look at the newest value, an access to several words is all of one age where one write covers them, unless that
is a relaxed atomic store, whose words arrive apart.

It is not a set of store buffers. Buffers alone show late stores, but not a missing acquire; views show both, and ask no more
of the run than what lay there before.
"""

import collections
import random

import numpy as np

from ..interpreter.affine import Affine
from ..interpreter.memory import bytes_between, view
from ..interpreter.observer import addresses_of
from . import history, sites
from .clocks import called
from .late_reads import LateReads

KEPT = 256  # writes to an allocation that can still be late; older ones have arrived
KEPT_BYTES = 64 << 20  # the same for what they all have replaced
LATENESS = (0.25, 0.5, 0.9)  # the chance that a write is late for a program that must not see it yet
HORIZON = (30, 300, 3000)  # accesses to memory by all programs within which a late write arrives; one of each, by schedule
ATOMIC_HASTE = 4  # volatile reads see a write so many times earlier: they go to memory
TOLD = 4  # of what was late in a schedule, in a report
WORD_PARTS = 3  # in which the words of one relaxed store arrive, at most
OVERTAKEN = 0.25  # the chance that a store that may be overtaken is


class Write:
    """A write that may not have arrived everywhere. `event`: who makes it; its scope is None for a plain one. `old`: the bytes
    at [low, high) before it; `mask`: those that it wrote (None: all)."""

    __slots__ = ("event", "low", "high", "old", "mask", "born", "delays", "readers", "complete")

    def __init__(self, event, low, high, mask, born):
        self.event, self.low, self.high, self.mask, self.born = event, low, high, mask, born
        self.old = bytes_between(low, high).copy()
        self.delays = {}  # thread id -> accesses until it arrives there
        self.readers = {}  # thread id -> (clock of its first read, low, high), of those that it did not have to arrive at
        self.complete = False

    def ordered(self, thread):
        """Whether every read by `thread` must see it."""
        return self.complete or self.event.thread == thread.id or self.event.before(thread)

    def known(self, thread, low, high):
        """Whether a read of [low, high) by `thread` must see it."""
        if self.ordered(thread):
            return True
        for reader, (clock, first, last) in self.readers.items():
            if first < high and low < last and (reader == thread.id or thread.knows(reader, clock)):
                return True
        return False

    def read_by(self, thread, low, high):
        clock, first, last = self.readers.get(thread.id, (thread.clock, low, high))
        self.readers[thread.id] = clock, min(first, low), max(last, high)

    def bits(self, low, high):
        """Which bytes of [low, high), a part of it, it wrote: an array, or True for all."""
        return True if self.mask is None else self.mask[low - self.low : high - self.low]

    def holds(self, address):
        return self.low <= address < self.high and (self.mask is None or bool(self.mask[address - self.low]))


class WeakMemory:
    """`seed` chooses what is late, and how long; the schedule's own choices are not touched by it. `describe(rank, address)`
    names memory. `promise`: the read that comes late, of a second run of the same schedule (late_reads.py)."""

    def __init__(self, seed, describe=None, promise=None):
        self.describe = describe
        self.story = collections.OrderedDict()  # what was late, as text, the latest last
        self.rng = random.Random(f"weak memory {seed}")
        self.lateness, self.horizon = self.rng.choice(LATENESS), self.rng.choice(HORIZON)
        self.late_reads = LateReads(random.Random(f"late reads {seed}"), promise)
        self.now = 0  # counts accesses
        self.recent, self.bytes = collections.deque(), 0  # (list that it is in, Write), by age; what they have replaced
        self.patches = []  # (address, the bytes that belong there) while a late read is made
        self.made = []  # [(Shadow, Write)] of the atomic that is being made
        self.passed = None  # a store that is being made and is overtaken: (Write, the Write that overtakes it)

    # -- the story
    def _tell(self, event, what, write):
        """Notes what is late; of alike events the latest."""
        other = write.event
        key = event.word, event.site, event.rank, event.program, what, other.site, other.rank, other.program
        if key not in self.story:
            where = f"{self.describe(event.rank, write.low)}: " if self.describe else ""
            self.story[key] = (
                f"{where}{event.word} by {called(event.rank, event.program)} at {sites.text(event.site)}\n  {what} "
                f"{other.word} by {called(other.rank, other.program)} at {sites.text(other.site)}"
            )
            if len(self.story) > TOLD:
                self.story.popitem(last=False)
        self.story.move_to_end(key)

    def explain(self):
        """Lines for a report of what a schedule came to."""
        return ["Late in this schedule, the latest last:", *self.story.values()] if self.story else []

    # -- reads
    def load(self, thread, parts, size, event):
        """Before a read: puts what the program is to see there, until `restore`. Returns the writes that it does not see."""
        self.now += 1
        missed = []
        for part, (shadow, where) in enumerate(parts):
            low, high = _bounds(where, size)
            if shadow.writes:
                missed += self._load(thread, shadow.writes, low, high, event)
            late = self.late_reads.load(thread, shadow, part, low, high, event.scope is None, self.now)
            if late is not None:
                address, data, changed = late
                there = bytes_between(address, address + len(data))
                self.patches.append((address, there.copy()))
                there[changed] = data[changed]
                self._tell(event, "comes late, and sees", self.late_reads.promise)
        return missed

    def _load(self, thread, writes, low, high, event):
        above, settled, there, missed = [], None, None, []
        for write in reversed(writes):
            if write.high <= low or write.low >= high:
                continue
            first, last = max(low, write.low), min(high, write.high)
            seen = write.known(thread, first, last) or _reach(write.event, event) or self._arrived(write, thread, event.scope)
            if seen and not write.ordered(thread):
                write.read_by(thread, first, last)
            if seen:
                if settled is None:
                    above.append(write)
                else:
                    settled[first - low : last - low] |= write.bits(first, last)
                if write.mask is None and first == low and last == high:
                    break  # it hides all that came before
                continue
            if settled is None:
                settled, there = np.zeros(high - low, np.bool_), bytes_between(low, high).copy()
                for one in above:
                    a, b = max(low, one.low), min(high, one.high)
                    settled[a - low : b - low] |= one.bits(a, b)
            part = slice(first - low, last - low)
            take = ~settled[part] & write.bits(first, last)
            there[part][take] = write.old[first - write.low : last - write.low][take]
            missed.append(write)
            self._tell(event, "misses", write)
        if missed:
            self.patches.append((low, bytes_between(low, high).copy()))
            bytes_between(low, high)[:] = there
        return missed

    def _arrived(self, write, thread, strong):
        delay = write.delays.get(thread.id)
        if delay is None:
            delay = self.rng.randrange(1, self.horizon) if self.rng.random() < self.lateness else 0
            write.delays[thread.id] = delay
        return write.born + (delay // ATOMIC_HASTE if strong else delay) <= self.now

    def restore(self):
        """After a read: memory is again as it is. Also settles a store."""
        while self.patches:
            address, data = self.patches.pop()
            bytes_between(address, address + len(data))[:] = data
        if self.passed is not None:
            self.settle()

    def see(self, thread, parts, size):
        """A read of the newest value has been made."""
        for shadow, where in parts:
            low, high = _bounds(where, size)
            for write in reversed(shadow.writes):
                if write.low < high and low < write.high:
                    if not write.ordered(thread):
                        write.read_by(thread, low, high)
                    if write.mask is None and write.low <= low and high <= write.high:
                        break

    # -- writes
    def _write(self, shadow, where, size, event):
        low, high, mask = _footprint(where, size)
        write = Write(event, low, high, mask, self.now)
        shadow.writes.append(write)
        self.recent.append((shadow.writes, write))
        self.bytes += high - low
        if len(shadow.writes) > KEPT:
            del shadow.writes[0]
        while self.bytes > KEPT_BYTES or self.now - self.recent[0][1].born > self.horizon:
            writes, old = self.recent.popleft()
            self.bytes -= old.high - old.low
            if old in writes:
                writes.remove(old)
        return write

    def store(self, thread, shadow, where, size, event):
        """Before a plain store; one that a fence makes a signal has a scope."""
        self.now += 1
        low, high = _bounds(where, size)
        if any(a < high and low < a + len(data) for a, data in self.patches):
            self.restore()  # a copy onto itself
        above = None
        if event.scope is None and shadow.writes and self.rng.random() < OVERTAKEN:
            above = self._overtakes(thread, shadow.writes, low, high)
        readers = {}
        if event.scope is None:
            horizon = 0 if above is not None else self.horizon
            readers = self.late_reads.store(thread, shadow, low, high, event, self.now, horizon)
        write = self._write(shadow, where, size, event)
        write.readers.update(readers)
        if above is not None and above in shadow.writes:
            shadow.writes.remove(write)
            shadow.writes.insert(shadow.writes.index(above), write)
            self.passed = write, above
            self._tell(event, "is followed by the late", above)

    def store_words(self, thread, shadow, where, size, event):
        """Before relaxed atomic stores: words of one access arrive apart, in a few parts that the seed deals out."""
        self.now += 1
        lanes = np.unique(addresses_of(where))
        parts = min(len(lanes), self.rng.randrange(1, WORD_PARTS + 1))
        dealt = np.array([self.rng.randrange(parts) for _ in range(len(lanes))])
        for number in range(parts):
            if (dealt == number).any():
                self._write(shadow, lanes[dealt == number], size, event)

    def _overtakes(self, thread, writes, low, high):
        """The newest write to [low, high), where it is a plain one to all of it that has not arrived here, else None."""
        for write in reversed(writes):
            if write.low < high and low < write.high:
                late = write.event.scope is None and write.mask is None and write.low <= low and high <= write.high
                if late and not write.known(thread, low, high) and not self._arrived(write, thread, None):
                    return write
                return None
        return None

    def settle(self):
        """After a store. If it has been overtaken, what was there stays, and is seen until the other one arrives."""
        self.late_reads.settle()
        if self.passed is None:
            return
        (write, above), self.passed = self.passed, None
        now = bytes_between(write.low, write.high)
        stored, part = now.copy(), slice(write.low - above.low, write.high - above.low)
        newest = write.old.copy()
        bits = slice(None) if write.mask is None else write.mask
        now[bits] = newest[bits]
        write.old[bits] = above.old[part][bits]
        above.old[part][bits] = stored[bits]

    def atomic(self, thread, parts, size, event):
        """Before read-modify-writes."""
        self.made = [(shadow, self._write(shadow, where, size, event)) for shadow, where in parts]
        for shadow, write in self.made:
            below = shadow.writes[:-1]
            if below:
                self.now += 1
                self._load(thread, below, write.low, write.high, event)

    def atomic_done(self, thread, wrote, lanes, size):
        """After them; `wrote`: all, none, or an array of one a lane."""
        made, self.made = self.made, []
        written = wrote if isinstance(wrote, bool) else bool(wrote.all()) or (bool(wrote.any()) and None)
        if self.patches:
            mine = np.unique(lanes if written is not False else lanes[:0])
            mine = mine if written is not None else np.unique(lanes[wrote])
            kept = [(a, bytes_between(a, a + size).copy()) for a in mine.tolist()]
            self.restore()
            for address, data in kept:
                bytes_between(address, address + size)[:] = data
        for shadow, write in made:
            if written is False:
                if write in shadow.writes:
                    shadow.writes.remove(write)
                self.see(thread, [(shadow, lanes)], size)
            elif written is None:
                mine = lanes[wrote]
                inside = mine[(mine >= np.uint64(write.low)) & (mine < np.uint64(write.high))]
                write.mask = np.zeros(write.high - write.low, np.bool_)
                for address in inside.tolist():
                    write.mask[address - write.low : address - write.low + size] = True

    def complete(self, thread, shadows):
        """dl.quiet: all that the program has written, or seen, is there for everybody."""
        for shadow in shadows:
            for write in shadow.writes:
                delay = write.delays.get(thread.id)
                arrived = delay is not None and write.born + delay <= self.now
                write.complete = write.complete or arrived or write.known(thread, write.low, write.high)


def _reach(write, event):
    """Whether `event` is a read-modify-write that is atomic to the write, so that it must see it."""
    return event.writes and event.scope is not None and write.scope is not None and history.covers(write, event)


def _bounds(where, size):
    if isinstance(where, Affine):
        low, high = where.bounds()
    else:
        low, high = int(where.min()), int(where.max())
    return low, high + size


def _footprint(where, size):
    """(low, high, mask) of the bytes of an access: mask None for all of them."""
    low, high = _bounds(where, size)
    if isinstance(where, Affine):
        axes = sorted((abs(s), s, n) for s, n in zip(where.strides, where.shape) if s and n > 1)
        dense = size
        for step, _, n in axes:
            if step > dense:
                break
            dense = max(dense, step * (n - 1) + dense)
        else:
            return low, high, None
        mask = np.zeros(high - low, np.bool_)
        shape, strides = [n for _, _, n in axes] + [size], tuple([s for _, s, _ in axes] + [1])
        view(mask.ctypes.data + where.base - low, mask.dtype, shape, strides)[...] = True
        return low, high, mask
    offsets = (np.unique(where) - np.uint64(low)).astype(np.int64)
    mask = np.zeros(high - low, np.bool_)
    mask[(offsets[:, None] + np.arange(size)).ravel()] = True
    return low, high, None if mask.all() else mask
