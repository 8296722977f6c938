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

# A poll loop of the user's own counts as blocked after so many turns and so many seconds in which it read nothing new.
TURNS, TURNS_S = 3_000, 1.5
PLAIN_TURNS = 20_000  # the same for loops over loads that are not volatile, which may be no polls at all
LOOP_TURNS = 64  # after so many turns, and two for each word, the words that a loop reads are known
RERUN_S = 0.02  # settled loops are run again this often
SLICE_S = 0.02  # a program that runs so long lets the others run, at its next access to memory
WAKE_S = 0.001  # blocked programs are looked at this often while others run
LOST_S = 5.0  # a kernel that only runs ends when a peer is gone so long
SHOWN = 16  # programs named in a report


class Wait:
    """What a program in a wait of the library waits for."""

    __slots__ = ("address", "ctype", "compare", "value", "hit")

    def __init__(self, address, ctype, compare, value):
        self.address, self.ctype, self.compare, self.value = address, ctype, compare, value
        self.hit = None  # the value that ended the wait

    def ready(self):
        """True from the first look that satisfied the wait: a fast peer may have moved the word on since."""
        if self.hit is None:
            seen = self.ctype.from_address(self.address).value
            if COMPARE[self.compare](seen, self.value):
                self.hit = seen
        return self.hit is not None

    def __str__(self):
        seen = self.ctype.from_address(self.address).value
        return f"waits for {_named(self.address)}: wants {SYMBOL[self.compare]} {self.value}, sees {seen}"


class Poll:
    """What a poll loop of the user's own waits for: that any word that it has read becomes another."""

    __slots__ = ("words", "kind")

    def __init__(self, words, kind):
        self.words, self.kind = words, kind

    def ready(self):
        return any(ctypes.string_at(address, len(seen)) != seen for address, seen in self.words.items())

    def __str__(self):
        shown = [f"{_named(a)}, sees {_number(seen, self.kind)}" for a, seen in list(self.words.items())[:4]]
        more = f" and {len(self.words) - 4} more" if len(self.words) > 4 else ""
        return "polls " + "; ".join(shown) + more


def _named(address):
    return context.heap_map.describe(address) if context.heap_map else f"address {address:#x}"


def _number(seen, kind):
    ctype = ctypes_of.get(kind)
    if ctype is None or ctypes.sizeof(ctype) != len(seen):
        return "0x" + seen[::-1].hex()
    return ctype.from_buffer_copy(seen).value


class Worker:
    """A coroutine that runs programs. `words` is what the program has read in vain since it last did anything else:
    address -> bytes; `turns` counts how often it has read only such words, since the time `since`; `loop`: those among them
    that it has read in these turns."""

    __slots__ = ("index", "greenlet", "wait", "words", "turns", "plain", "since", "moved", "resumed", "loop")

    def __init__(self):
        self.index = self.wait = self.greenlet = self.loop = None
        self.words, self.turns, self.plain, self.since, self.moved, self.resumed = {}, 0, True, 0.0, False, 0.0

    def turn(self, words, patience):
        """The program has read `words`, and found what it knows. What it read before the loop that it is in now does not
        count any more: a change of that would let it run again and again, and others never."""
        self.turns += 1
        if self.turns == 1:
            self.loop = {}
        if self.loop is not None:
            self.loop.update(words)
            if self.turns > LOOP_TURNS + 2 * len(self.words):
                self.words, self.loop = self.loop, None
        self.plain = self.plain and patience > 1

    def settled(self, now):
        """Whether this poll loop is as good as blocked."""
        return self.turns >= (PLAIN_TURNS if self.plain else TURNS) and now - self.since > TURNS_S


# What another engine that runs the programs supplies in this one's place (see `Scheduler.hand_over`).
ENGINE = ("block", "pause", "moved", "poll", "launch")


class Scheduler:
    def __init__(self):
        self.rank, self.board = 0, None
        self.observer = None  # told of every access to memory before it is made: see observer.py
        self.current = None  # the Worker whose program runs now
        self.kernel = None
        self.lock = threading.RLock()
        self.set_program = lambda index, dim: None  # tells the interpreter which program runs
        self.crowded = lambda: False  # whether another program of the grid could run

    def hand_over(self, engine):
        """From now on `engine` runs the programs, by its own methods named in ENGINE. None: this scheduler does again."""
        for name in ENGINE:
            vars(self).pop(name, None)
            if engine is not None:
                setattr(self, name, getattr(engine, name))

    # -- called from inside a program
    def block(self, wait):
        worker = self.current
        if worker is None:
            raise SymmetricAccessError("a device wait was called outside of a kernel")
        self.moved()
        if wait.ready():
            return
        worker.wait = wait
        worker.greenlet.parent.switch()

    def pause(self):
        """Lets the other programs run once."""
        self.current.greenlet.parent.switch()

    def moved(self):
        """The running program did something other than polling: a store, a large load, arithmetic that a poll loop has no
        use for. It may have to let others run now."""
        worker = self.current
        if worker is None:
            return
        if worker.words:
            worker.words, worker.turns, worker.plain, worker.moved = {}, 0, True, True
        if time.monotonic() - worker.resumed > SLICE_S and self.crowded():
            self.pause()

    def poll(self, words, kind, patience=1):
        """The running program read `words` (address -> bytes) and nothing else. A loop that finds only what it knows, so
        often as `patience` says, waits until a word changes."""
        worker = self.current
        if worker is None or not words:
            return
        known = worker.words
        if any(known.get(address) != seen for address, seen in words.items()):
            if len(known) > 256:
                known.clear()
            if any(address in known for address in words):
                worker.moved = True  # a word has changed
            known.update(words)
            worker.turns, worker.plain = 0, worker.plain and patience > 1
            return
        worker.turn(words, patience)
        if worker.turns == 1:
            worker.since = time.monotonic()
        if worker.turns >= patience:
            worker.wait = Poll(dict(worker.words), kind)
            worker.greenlet.parent.switch()

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
            launch = _Launch(self, run_program, grid)
            self.crowded = launch.crowded
            try:
                launch.run()
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
        self.last_wake = self.last_rerun = self.last_look = time.monotonic()
        self.lost_since = None

    def crowded(self):
        return self.next < self.programs or bool(self.live) or bool(self.blocked)

    def run(self):
        paused = False
        try:
            while self.next < self.programs or self.live or self.blocked:
                self.wake()
                residents = len(self.live) + len(self.blocked)
                if (paused or not self.live) and self.next < self.programs and residents < self.limit:
                    worker = Worker()
                    worker.greenlet = greenlet(lambda worker=worker: self.work(worker))
                    self.live.appendleft(worker)
                paused = False
                if not self.live:
                    if not self.rerun():
                        self.all_blocked()
                    continue
                worker = self.live.popleft()
                self.resume(worker)
                paused = self.file(worker)
        except BaseException:
            for worker in [*self.live, *self.blocked]:
                if worker.greenlet and not worker.greenlet.dead:
                    worker.greenlet.throw(GreenletExit)
            raise

    def file(self, worker):
        """Puts a worker that was resumed where it belongs; True when it only let others run."""
        if worker.greenlet.dead:
            return False
        (self.live if worker.wait is None else self.blocked).append(worker)
        if worker.wait is None:
            self.look_for_lost()
        return worker.wait is None

    def look_for_lost(self):
        """A program that stores or counts in its poll loop waits unseen; when a peer is gone, it would for ever."""
        now, board = time.monotonic(), self.scheduler.board
        if board is None or now - self.last_look < 1:
            return
        self.last_look = now
        lost = board.lost()
        self.lost_since = (self.lost_since or now) if lost else None
        if lost and now - self.lost_since > LOST_S:
            board.raise_lost(lost, "a kernel runs on, which may wait for it")

    def work(self, worker):
        nx, ny, nz = self.grid
        while self.next < self.programs:
            i = self.next
            self.next += 1
            worker.index = (i // (ny * nz), i // nz % ny, i % nz)
            self.scheduler.set_program(worker.index, self.grid)
            if self.scheduler.observer is None:
                self.run_program()
            else:
                self.scheduler.observer.program(worker.index, i)
                self.run_program()
                self.scheduler.observer.program_done(worker.index, i)
            worker.words, worker.turns, worker.plain, worker.moved = {}, 0, True, True

    def resume(self, worker):
        scheduler = self.scheduler
        worker.wait = None
        scheduler.current = worker
        worker.resumed = time.monotonic()
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

    # -- poll loops, also for Board.wait
    def loops(self):
        return [worker for worker in self.blocked if isinstance(worker.wait, Poll)]

    def settled(self):
        now = time.monotonic()
        return all(worker.settled(now) for worker in self.loops())

    def due(self):
        return not self.settled() or time.monotonic() - self.last_rerun > RERUN_S

    def rerun(self):
        """Gives every poll loop one more turn: a bounded one may end. True when one of them got anywhere."""
        self.last_rerun = time.monotonic()
        moved = False
        for worker in self.loops():
            worker.moved = False
            self.blocked.remove(worker)
            try:
                self.resume(worker)
            finally:
                self.file(worker)
            moved |= worker.moved or worker.greenlet.dead or not isinstance(worker.wait, Poll)
        return moved

    def all_blocked(self):
        """Nothing can run here: wait for another rank, or prove that nobody can move."""
        board = self.scheduler.board
        loops = bool(self.loops())
        if board is not None:
            board.wait(
                lambda: any(worker.wait.ready() for worker in self.blocked),
                self.describe,
                loops=self if loops else None,
                since=self.since,
            )
            return
        while loops and not self.settled():  # no other rank exists: only the loops themselves can move
            if self.rerun():
                return
        if not any(worker.wait.ready() for worker in self.blocked):
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
            where = source_line(worker.greenlet.gr_frame)
            lines.append(f"    program {worker.index} at {where}: {worker.wait}")
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
