"""Reads that come late: after stores of other programs that nothing orders behind them, as the read of a buffer that is given
back without a release.

A read returns its value at once here, so it cannot wait for a store that is yet to come. Instead a schedule that shows
nothing is run once more: the first run chooses a read and a store that came after it, over the same bytes and ordered by
nothing; in the second one, which is the same up to there, the read gets what the store is going to write. If the store then
does not come, or writes something else, that run does not count (in the words of Kang et al., POPL 2017, it is a promise that
was not kept). Only plain reads come late, one of them (and what must see what it saw) in a schedule.
"""

import collections

from ..interpreter.memory import bytes_between

KEPT = 256  # reads of an allocation that a store is compared with


class Read:
    """The `part`-th piece of the `number`-th read of a thread, of [low, high)."""

    __slots__ = ("thread", "clock", "number", "part", "low", "high", "born")

    def __init__(self, thread, number, part, low, high, born):
        self.thread, self.clock, self.number, self.part = thread.id, thread.clock, number, part
        self.low, self.high, self.born = low, high, born


class Promise:
    """A Read of the first run sees `data` at `offset` of its allocation, as far as `changed`, which the store `number` of
    thread `writer` writes there. `event` is that store; `low` the address in the second run, `clock` the reader's there."""

    __slots__ = ("read", "offset", "data", "changed", "writer", "number", "event", "low", "clock")

    def __init__(self, read, writer, number, event):
        self.read, self.writer, self.number, self.event = read, writer, number, event
        self.offset = self.data = self.changed = self.low = self.clock = None

    def seen_by(self, thread):
        """Whether the reads of `thread` come after the promised one."""
        return thread.id == self.read.thread or thread.knows(self.read.thread, self.clock)


class LateReads:
    """`rng` chooses. Without a promise: the first run; `found` is then a Promise for the second, or None. With one: the second;
    `kept` says whether it was kept."""

    def __init__(self, rng, promise=None):
        self.rng, self.promise, self.found, self.kept = rng, promise, None, False
        self.reads = {}  # Shadow -> the latest Reads
        self.loads, self.stores = collections.Counter(), collections.Counter()  # of each thread
        self.choices = 0
        self.made = None  # a store that is being made: (Promise, low, the bytes before it)

    def load(self, thread, shadow, part, low, high, plain, born):
        """Before a read, part by part. Returns (address, bytes, which of them) that it is to see there, or None."""
        if not part:
            self.loads[thread.id] += 1
        if self.promise is None:
            if plain:
                reads = self.reads.get(shadow)
                if reads is None:
                    reads = self.reads[shadow] = collections.deque(maxlen=KEPT)
                reads.append(Read(thread, self.loads[thread.id], part, low, high, born))
            return None
        one, read = self.promise, self.promise.read
        if (thread.id, self.loads[thread.id], part) == (read.thread, read.number, read.part):
            one.low, one.clock = shadow.base + one.offset, thread.clock
        if one.low is None or self.kept or not one.seen_by(thread):
            return None
        first, last = max(low, one.low), min(high, one.low + len(one.data))
        mine = slice(first - one.low, last - one.low)
        return (first, one.data[mine], one.changed[mine]) if first < last else None

    def store(self, thread, shadow, low, high, event, now, horizon):
        """Before a plain store; a read may have been made so many accesses before it, and yet come after it. Returns who has
        read it already, as Write.readers."""
        self.stores[thread.id] += 1
        number = self.stores[thread.id]
        if self.promise is not None:
            one = self.promise
            if (thread.id, number) == (one.writer, one.number) and one.low is not None:
                self.made = one, one.low, None
                return {one.read.thread: (one.clock, one.low, one.low + len(one.data))}
            return {}
        for read in self.reads.get(shadow, ()):
            first, last = max(low, read.low), min(high, read.high)
            if first >= last or read.thread == thread.id or thread.knows(read.thread, read.clock) or now - read.born > horizon:
                continue
            since = (write for write in shadow.writes if write.born > read.born and write.event.thread == read.thread)
            if any(write.low < last and first < write.high for write in since):
                continue  # its thread has written there since, and that lies below this store
            self.choices += 1
            if not self.rng.randrange(self.choices):
                promise = Promise(read, thread.id, number, event)
                promise.offset = first - shadow.base
                self.made = promise, first, bytes_between(first, last).copy()
        return {}

    def settle(self):
        """After a store."""
        if self.made is None:
            return
        (promise, low, before), self.made = self.made, None
        if self.promise is not None:
            now = bytes_between(low, low + len(promise.data))
            self.kept = bool((now == promise.data)[promise.changed].all())
            return
        promise.data = bytes_between(low, low + len(before)).copy()
        promise.changed = promise.data != before
        if promise.changed.any():
            self.found = promise
        else:
            self.choices -= 1  # it makes no difference
