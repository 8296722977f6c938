"""Cooperative execution of one rank's grid: every program is a coroutine, and a wait lets another program run.

A worker (a greenlet) runs programs one after another until one of them blocks; then the next worker goes on. A program
blocks in `dl.wait` and its kin, or in a poll loop of its own: a scalar load, failed compare-and-swap or no-op atomic
that sees the same value twice with nothing done in between.
"""

import ctypes
import operator
import os
import threading
import time
from collections import deque

from greenlet import GreenletExit, greenlet

from .. import context
from ..errors import BackendError, DeadlockError, SymmetricAccessError, TritonDistError
from .location import error_line, source_line

COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}
SYMBOL = {"eq": "==", "ne": "!=", "ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

RESPINS = 1000  # a poll loop of the user's own is called blocked after so many turns and so many seconds
RESPIN_S = 1.0
RESPIN_PAUSE_S = 0.02
WAKE_S = 0.001  # blocked programs are looked at this often while others run
SHOWN = 16  # programs named in a report


class Wait:
    """What a blocked program waits for. `soft` marks a poll loop of the user's own."""

    __slots__ = ("address", "ctype", "compare", "value", "soft", "hit")

    def __init__(self, address, ctype, compare, value, soft=False):
        self.address, self.ctype, self.compare, self.value, self.soft = address, ctype, compare, value, soft
        self.hit = None  # the value that ended the wait

    def seen(self):
        return self.ctype.from_address(self.address).value

    def ready(self):
        """True from the first look that satisfied the wait: a fast peer may have moved the word on since."""
        if self.hit is None:
            seen = self.ctype.from_address(self.address).value
            if COMPARE[self.compare](seen, self.value):
                self.hit = seen
        return self.hit is not None


class Worker:
    __slots__ = ("index", "greenlet", "wait", "polls", "spins", "since", "moved", "where")

    def __init__(self):
        self.index = self.wait = self.greenlet = self.where = None
        self.polls, self.spins, self.since, self.moved = {}, 0, 0.0, False


class Scheduler:
    def __init__(self):
        self.rank, self.board = 0, None
        self.current = None  # the Worker whose program runs now
        self.kernel = None
        self.lock = threading.RLock()
        self.set_program = lambda index, dim: None  # tells the interpreter which program runs
        self.switches = 0

    # -- called from inside a program
    def block(self, wait):
        worker = self.current
        if worker is None:
            raise SymmetricAccessError("a device wait was called outside of a kernel")
        if wait.ready():
            return
        worker.wait = wait
        worker.greenlet.parent.switch()

    def pause(self):
        """Lets the other programs run once."""
        self.current.greenlet.parent.switch()

    def moved(self):
        """The running program did something other than polling."""
        worker = self.current
        if worker is not None and worker.polls:
            worker.polls.clear()
            worker.spins, worker.moved = 0, True

    def poll(self, address, ctype, value, patience=1):
        """The running program read one word. Reading the same value `patience` times more is a poll loop."""
        worker = self.current
        if worker is None:
            return
        last = worker.polls.get(address)
        if last is None or last[0] != value:
            if len(worker.polls) > 64:
                worker.polls.clear()
            worker.polls[address] = (value, 1)
            if last is not None:
                worker.spins, worker.moved = 0, True
        elif last[1] < patience:
            worker.polls[address] = (value, last[1] + 1)
        else:
            self.block(Wait(address, ctype, "ne", value, soft=True))

    def place(self):
        """"kernel k, program (x, y, z), file.py:12" of the running program."""
        if self.current is None:
            return f"rank {self.rank}, {source_line()}"
        return f"rank {self.rank}, kernel {self.kernel}, program {self.current.index}, {source_line()}"

    # -- one launch
    def launch(self, kernel, run_program, grid):
        """Runs `run_program(index)` for every program of `grid`; returns when all have ended."""
        with self.lock:
            if self.current is not None:
                raise TritonDistError(f"kernel {kernel} was launched from inside kernel {self.kernel}")
            self.kernel = kernel
            if self.board:
                self.board.running()
            try:
                _Launch(self, run_program, grid).run()
            except BaseException as error:
                if self.board:
                    self.board.failed(f"kernel {kernel} failed: {type(error).__name__}: {str(error)[:1000]}")
                raise
            else:
                if self.board:
                    self.board.host()
            finally:
                self.kernel = None


def resident_limit(programs):
    text = os.environ.get("TRITON_DIST_RESIDENT", "")
    if not text:
        return programs
    if not text.isdigit() or int(text) < 1:
        raise BackendError(f"TRITON_DIST_RESIDENT={text!r}: give the number of programs that run at a time, 1 or more")
    return int(text)


class _Launch:
    def __init__(self, scheduler, run_program, grid):
        self.scheduler, self.run_program, self.grid = scheduler, run_program, grid
        self.programs = grid[0] * grid[1] * grid[2]
        self.limit = resident_limit(self.programs)
        self.next = 0
        self.live, self.blocked = deque(), []
        self.since = time.monotonic_ns()
        self.last_wake = self.last_respin = time.monotonic()

    def run(self):
        try:
            while self.next < self.programs or self.live or self.blocked:
                self.wake()
                if not self.live and self.next < self.programs and len(self.blocked) < self.limit:
                    worker = Worker()
                    worker.greenlet = greenlet(lambda worker=worker: self.work(worker))
                    self.live.append(worker)
                if not self.live:
                    if not self.respin_all():
                        self.all_blocked()
                    continue
                worker = self.live.popleft()
                self.resume(worker)
                if worker.greenlet.dead:
                    continue
                (self.blocked if worker.wait is not None else self.live).append(worker)
        except BaseException:
            for worker in [*self.live, *self.blocked]:
                if worker.greenlet and not worker.greenlet.dead:
                    worker.greenlet.throw(GreenletExit)
            raise

    def work(self, worker):
        nx, ny, nz = self.grid
        while self.next < self.programs:
            i = self.next
            self.next += 1
            worker.index = (i // (ny * nz), i // nz % ny, i % nz)
            self.scheduler.set_program(worker.index, self.grid)
            self.run_program()
            worker.polls.clear()
            worker.spins = 0

    def resume(self, worker):
        scheduler = self.scheduler
        worker.wait = None
        scheduler.current = worker
        scheduler.switches += 1
        if worker.index is not None:
            scheduler.set_program(worker.index, self.grid)
        try:
            worker.greenlet.switch()
        except TritonDistError:
            raise
        except Exception as error:
            error.program_place = (
                f"rank {scheduler.rank}, kernel {scheduler.kernel}, program {worker.index}, {error_line(error)}"
            )
            raise
        finally:
            scheduler.current = None

    def wake(self):
        """Moves programs whose wait is over back to the runnable ones."""
        if not self.blocked:
            return
        now = time.monotonic()
        if self.live and now - self.last_wake < WAKE_S:
            return
        self.last_wake = now
        still = []
        for worker in self.blocked:
            (self.live if worker.wait.ready() else still).append(worker)
        self.blocked = still

    def respin_all(self):
        """Gives every poll loop that may still end by itself one more turn. True when one of them got anywhere."""
        moved = False
        for worker in [w for w in self.blocked if w.wait.soft]:
            now = time.monotonic()
            worker.since = now if worker.spins == 0 else worker.since
            worker.spins, worker.moved = worker.spins + 1, False
            before = worker.wait
            self.resume(worker)
            same = (
                not worker.greenlet.dead
                and worker.wait is not None
                and worker.wait.soft
                and worker.wait.address == before.address
                and not worker.moved
            )
            if same:
                continue
            moved = True
            self.blocked.remove(worker)
            if not worker.greenlet.dead:
                (self.blocked if worker.wait is not None else self.live).append(worker)
        return moved

    def respin(self):
        """For Board.wait: True: something moved; None: some poll loop may still end; False: all are as good as blocked."""
        now = time.monotonic()
        soft = [w for w in self.blocked if w.wait.soft]
        settled = all(w.spins >= RESPINS and now - w.since > RESPIN_S for w in soft)
        if settled and now - self.last_respin < RESPIN_PAUSE_S:
            return False
        self.last_respin = now
        if self.respin_all():
            return True
        return False if settled else None

    def all_blocked(self):
        """Nothing can run here: wait for another rank, or prove that nobody can move."""
        board = self.scheduler.board
        soft = any(w.wait.soft for w in self.blocked)
        if board is not None:
            board.wait(
                lambda: any(w.wait.ready() for w in self.blocked),
                self.describe,
                respin=self.respin if soft else None,
                since=self.since,
            )
            return
        while soft:  # no other rank exists: only the poll loops themselves can move
            verdict = self.respin()
            if verdict:
                return
            if verdict is False:
                break
        if not any(w.wait.ready() for w in self.blocked):
            raise DeadlockError(
                f"deadlock: every program is blocked, and shmem is not initialised, so no other rank can wake one\n"
                f"  rank {self.scheduler.rank}: {self.describe()}"
            )

    def describe(self):
        unstarted = self.programs - self.next
        started = f"{len(self.blocked)} program(s) blocked, {unstarted} not started"
        if unstarted and self.limit < self.programs:
            started += f" (TRITON_DIST_RESIDENT={self.limit} programs run at a time)"
        lines = [f"kernel {self.scheduler.kernel}, grid {self.grid}: {started}"]
        for worker in self.blocked[:SHOWN]:
            wait = worker.wait
            where = source_line(worker.greenlet.gr_frame)
            name = context.heap_map.describe(wait.address) if context.heap_map else f"address {wait.address:#x}"
            how = "polls" if wait.soft else "waits for"
            lines.append(
                f"    program {worker.index} at {where}: {how} {name}: "
                f"wants {SYMBOL[wait.compare]} {wait.value}, sees {wait.seen()}"
            )
        if len(self.blocked) > SHOWN:
            lines.append(f"    ... and {len(self.blocked) - SHOWN} more")
        return "\n".join(lines)


ctypes_of = {
    "int8": ctypes.c_int8,
    "int16": ctypes.c_int16,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint8": ctypes.c_uint8,
    "uint16": ctypes.c_uint16,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
scheduler = Scheduler()
