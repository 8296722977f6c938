"""Vector clocks: who has seen how much of whom. A thread is the host of a rank, or one program of its grid.

A program of a later launch takes the thread of the program with the same number before it: the host lies between the
two, so they are ordered anyway, and the clocks stay as short as the widest grid.
"""

import numpy as np

KEPT = 16  # looks at signals that did not synchronise: they explain a race


class Thread:
    """`clock` is this thread's own time; it moves on whenever something is published, so what comes after is newer."""

    __slots__ = ("id", "rank", "program", "vc", "wide", "fenced", "heard", "heard_wide", "weak")

    def __init__(self, id, rank, program, size):
        self.id, self.rank, self.program = id, rank, program  # program: its index, None for a host, or what else it is
        self.vc = np.zeros(size, np.int64)  # what happened before this thread's next step
        self.wide = np.zeros(size, np.int64)  # the same if every atomic and volatile access were acq_rel at system scope
        self.vc[id] = self.wide[id] = 1
        self.fenced = None  # vc at the last fence: what a relaxed write publishes
        self.heard = self.heard_wide = None  # what relaxed reads have seen: a fence acquires it
        self.weak = ()  # the latest looks at a signal that did not synchronise: (reason, Entry, scope, site)

    @property
    def clock(self):
        return int(self.vc[self.id])

    def tick(self):
        self.vc[self.id] += 1
        self.wide[self.id] += 1

    def knows(self, thread_id, clock):
        return thread_id < len(self.vc) and clock <= self.vc[thread_id]

    def knows_widely(self, thread_id, clock):
        return thread_id < len(self.wide) and clock <= self.wide[thread_id]

    def join(self, vc, wide):
        self.vc, self.wide = joined(self.vc, vc), joined(self.wide, wide)

    def hear_of(self, weak):
        if weak and weak is not self.weak:
            self.weak = (*self.weak, *[one for one in weak if one not in self.weak])[-KEPT:]

    def __str__(self):
        return called(self.rank, self.program)


def called(rank, program):
    """A thread's name."""
    return f"rank {rank} " + ("host" if program is None else program if isinstance(program, str) else f"program {program}")


def joined(mine, other):
    """The elementwise maximum; `mine` is changed unless it is the shorter one."""
    if len(mine) < len(other):
        mine = np.concatenate([mine, np.zeros(len(other) - len(mine), np.int64)])
    part = mine[: len(other)]
    np.maximum(part, other, out=part)
    return mine


class Threads:
    """All threads of a run."""

    def __init__(self, world):
        self.list, self.programs, self.launches = [], {}, {}
        self.hosts = [self._new(rank, None) for rank in range(world)]

    def _new(self, rank, program):
        thread = Thread(len(self.list), rank, program, len(self.list) + 1)
        self.list.append(thread)
        return thread

    def launched(self, rank):
        """The host of a rank launches a kernel: every program of it starts after all that the host has done."""
        host = self.hosts[rank]
        self.launches[rank] = host.vc.copy(), host.wide.copy(), host.weak, []
        host.tick()

    def program(self, rank, index, number):
        """The thread of program `number` of the rank's launch, which starts now."""
        thread = self.programs.get((rank, number))
        if thread is None:
            thread = self.programs[rank, number] = self._new(rank, index)
        vc, wide, weak, _ = self.launches[rank]
        thread.program = index
        thread.join(vc, wide)
        thread.tick()
        thread.fenced = thread.heard = thread.heard_wide = None
        thread.weak = weak
        return thread

    def copy_started(self, rank, number):
        """The thread of the `number`-th copy of a rank's host that is under way at a time: it starts now."""
        host, thread = self.hosts[rank], self.programs.get((rank, "copy", number))
        if thread is None:
            thread = self.programs[rank, "copy", number] = self._new(rank, "copy under way")
        thread.join(host.vc, host.wide)
        thread.tick()
        thread.weak = host.weak
        host.tick()
        return thread

    def copies_ended(self, rank, threads):
        for thread in threads:
            self.hosts[rank].join(thread.vc, thread.wide)

    def program_ended(self, thread):
        self.launches[thread.rank][3].append(thread)

    def launch_ended(self, rank):
        """The host goes on after all that its programs did."""
        host = self.hosts[rank]
        for thread in self.launches.pop(rank)[3]:
            host.join(thread.vc, thread.wide)
            host.hear_of(thread.weak)
        host.tick()

    def meet(self, ranks):
        """The hosts of `ranks` have met: each goes on after all that every other did."""
        hosts = [self.hosts[rank] for rank in ranks]
        vc, wide, weak = hosts[0].vc.copy(), hosts[0].wide.copy(), hosts[0].weak
        for host in hosts[1:]:
            weak += host.weak
            vc, wide = joined(vc, host.vc), joined(wide, host.wide)
        for host in hosts:
            host.join(vc, wide)
            host.hear_of(weak)
            host.tick()
