"""Copies of the host that do not block: aclshmem_putmem_nbi, aclshmem_getmem_nbi, aclshmemx_putmem_signal_nbi.

From its call to the rank's next collective call of shmem (barrier_all, or one that implies it: an allocation, a free, finalize)
a copy is under way: a thread of its own, which comes after what the host has done before the call, and before what it does
after that collective. So who touches the target before, or writes the source, races with it: also in ordinary memory, which is
watched for that time.

With weak memory the source may be read as late as that. (Not the bytes of a get into ordinary memory: these are there at once,
and late for those that must not see them yet.) A copy from memory that is no longer there then leaves the target as it is.
"""

import ctypes
import os

from . import sites

_libc = ctypes.CDLL(None, use_errno=True)


class Copies:
    """Of all ranks of a simulation."""

    def __init__(self, simulation):
        self.simulation, self.detector = simulation, simulation.detector
        self.under_way = {}  # rank -> [Thread]
        self.late = []  # (time at which it is made, rank, what makes it)

    def start(self, make, address, nbytes, put):
        """`make(thread, move)` makes the copy, its bytes by `move(dst, src, n)`. It is a put of `nbytes` at this rank's own
        `address`, or a get to there."""
        rank, places = self.simulation.rank, self.detector.places
        mine = self.under_way.setdefault(rank, [])
        thread = self.detector.threads.copy_started(rank, len(mine))
        mine.append(thread)
        local = nbytes > 0 and places.copying(rank, address, address + nbytes)
        site, weak = sites.here(), self.detector.weak

        def made(move):
            with sites.standing_at(site):
                make(thread, move)

        if weak is not None and (put or not local) and weak.rng.random() < weak.lateness:
            self.late.append((self._now() + weak.rng.randrange(weak.horizon), rank, lambda: made(move_if_there)))
        else:
            made(ctypes.memmove)

    def _now(self):
        return self.simulation.steps + self.simulation.turns

    def progress(self, idle):
        """Makes those whose time has come; when nobody else can move the next one, whose time comes then. Whether any was."""
        if not self.late:
            return False
        now = min(due for due, _, _ in self.late) if idle else self._now()
        ready = [one for one in self.late if one[0] <= now]
        self.late = [one for one in self.late if one[0] > now]
        for _, _, make in ready:
            make()
        return bool(ready)

    def complete(self, rank):
        """The rank's host comes to a collective call."""
        for one in [one for one in self.late if one[1] == rank]:
            self.late.remove(one)
            one[2]()
        self.detector.threads.copies_ended(rank, self.under_way.pop(rank, ()))
        self.detector.places.copied.pop(rank, None)


def move_if_there(dst, src, nbytes):
    """memmove, but for a source that is no longer mapped."""
    file = os.memfd_create("triton_dist.check.copy")
    try:
        while nbytes:
            os.lseek(file, 0, os.SEEK_SET)
            done = _libc.write(file, ctypes.c_void_p(src), ctypes.c_size_t(min(nbytes, 1 << 20)))
            if done <= 0:
                return
            ctypes.memmove(dst, os.pread(file, done, 0), done)
            dst, src, nbytes = dst + done, src + done, nbytes - done
    finally:
        os.close(file)
