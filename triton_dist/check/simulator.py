"""All ranks in one process and one thread: their hosts and the programs of their kernels are coroutines, and a strategy
says which goes on. A schedule depends on nothing but the strategy's seed.

While a simulation runs it stands in for three things: the scheduler's own way of running programs (`scheduler.hand_over`),
the platform under shmem (`backends.in_process`), and torch.distributed's functions (process_group.py). Per-rank state of
the process (shmem's world, rank_state.py) is exchanged whenever another rank's host goes on.
"""

import threading

from greenlet import GreenletExit, getcurrent, greenlet

from .. import backends
from ..errors import TritonDistError
from ..interpreter import scheduler
from ..interpreter.scheduler import Poll, Wait
from ..shmem import world
from . import blocked, process_group, sites
from .copies import Copies
from .detector import Detector
from .engine import LOOK, Engine
from .exhaustive import Redundant
from .findings import RESULTS, Finding
from .host_access import HostAccess
from .hosts import Hosts
from .platform import SimulatedPlatform
from .rank_state import Modes, RankStates
from .recorder import Recorder
from .tasks import Stuck, Task, TimeOver
from .watchdog import Interrupted
from .watcher import Watcher

TURNS = 300  # a poll loop that has read nothing new so often waits for a change; when nobody can make one, it is stuck
PLAIN_TURNS = 1000  # the same for loads that are not volatile
HOST_TURNS = 5_000  # the same for reads by a host's tensor operations
STILL = 5.0  # seconds without progress after which a schedule whose time is over was standing still
NESTED = (
    "rank {} waits inside of an operator of torch.ops (a custom op), in which it came after rank {}, which must leave its own "
    "first: the checker cannot do that. Check the functions that implement the operators"
)
_abandoned = []  # coroutines that nothing ends: they stand in a loop that takes every exception


class Simulation(Hosts, Engine):
    """One schedule of `program(*args)` on every rank.

    strategy: of strategies.py. resident: programs of a grid that run at a time (None: TRITON_DIST_RESIDENT, else all).
    max_steps: accesses to memory, or turns of coroutines, before the run counts as endless. watchdog: a Watchdog that is
    running, which ends loops without any access; None: nobody does. timeline: whether `recorders` get what happens. weak: a
    WeakMemory; None: memory is sequentially consistent. races: whether to report what is wrong with the program's orders, or
    what it does alone.
    """

    def __init__(
        self, world_size, strategy, resident=None, max_steps=2_000_000, watchdog=None, timeline=False, weak=None, races=True
    ):
        self.world_size, self.strategy, self.resident, self.max_steps = world_size, strategy, resident, max_steps
        self.watchdog = watchdog
        self.recorders = [Recorder(self.progress) for _ in range(world_size)] if timeline else []
        self.findings, self.results = [], [None] * world_size
        self.detector, self.races = Detector(world_size, self.heap_map, self.found, weak), races
        self.host_access = HostAccess(self._host_touched, self._host_done, self._host_watched)
        self.copies = Copies(self)
        self.operating = False  # whether a host's operation on memory is under way, which nobody comes between
        self.tasks, self.made, self.current, self.steps, self.streak = [], 0, None, 0, 0
        self.worlds, self.launches, self.meetings = [None] * world_size, [0] * world_size, {}
        self.states, self.modes = RankStates(world_size), Modes()
        self.groups = process_group.Groups(self)
        self.turns = 0  # of coroutines
        self.nested = []  # hosts that wait inside of an operator of torch, in the order in which they came
        self.redundant = False  # whether another schedule of an exhaustive search covers this one
        self.failed = False  # whether a rank has: the others go on as far as they can
        self.ending = False  # whether coroutines are being ended
        self.cut = ""  # who ran when the time was over before the schedule was

    # -- the run
    def run(self, program, args=()):
        """Runs the schedule to its end, or until nobody can move. What was found lies in `findings`."""
        if world.active() is not None:
            raise TritonDistError("the checker makes heaps of its own: call it where shmem is not initialised")
        if scheduler.current is not None or backends.in_process is not None:
            raise TritonDistError("the checker was called from inside a kernel or from inside itself")
        self.hub, self.ident = getcurrent(), threading.get_ident()
        self.states.begin()
        try:
            backends.in_process = SimulatedPlatform(self)
            scheduler.hand_over(self)
            scheduler.observer = Watcher(self)
            with self.host_access:  # for the hosts: the hub has no modes
                self.modes.leave()
                try:
                    self._run(program, args)
                finally:
                    self.modes.enter()
        finally:
            scheduler.hand_over(None)
            self._forget()
            backends.in_process = None
            scheduler.rank = 0
            world.set_active(None)
            self.states.end()

    def _run(self, program, args):
        for rank in range(self.world_size):
            task = self._task(rank)
            task.thread, task.modes = self.detector.threads.hosts[rank], Modes(self.modes)
            task.greenlet = greenlet(lambda task=task: self._host(task, program, args))
        if self.watchdog is not None:
            self.watchdog.watch(self)
        try:
            with self.groups:
                self._loop()
            if not self.failed:
                self.detector.ended()
        except Redundant:
            self.redundant = True
        except TimeOver:
            self.cut = f"{self.current} at {blocked.place(self.current)}: runs"
        except Interrupted as error:
            self._report_stuck(self._stall(sites.of_error(error)))
        except Stuck as stuck:
            self._report_stuck(stuck)
        finally:
            scheduler.observer = None
            self._end_tasks()
            if self.watchdog is not None:
                self.watchdog.release()

    def _report_stuck(self, stuck):
        if self.strategy.exhaustive:
            waiting = [task for task in self.tasks if isinstance(task.wait, Wait)]
            self.strategy.waiting = [(t.key, self.detector.places.word(t.rank, t.wait.address)) for t in waiting]
        places = blocked.places(self.tasks)
        lines = [str(stuck)] if str(stuck) else []
        if stuck.kind == "livelock" and not self.current.greenlet.dead:
            places = (blocked.place(self.current), *places)
            lines = [f"{self.current} at {places[0]}: {stuck}"]
        others = [task for task in self.tasks if stuck.kind != "livelock" or task is not self.current]
        lines.append(blocked.describe(others, self.heap_map))
        ranks = tuple(sorted({task.rank for task in self.tasks}))
        self.found(stuck.kind, "\n".join(line for line in lines if line), places, ranks)

    def _forget(self):
        """Frees the heaps and their shadows now: this object and its coroutines refer to one another."""
        backends.in_process.memory.clear()
        self.worlds = [None] * self.world_size
        self.meetings.clear()
        self.detector.forget()

    def _end_tasks(self):
        self.ending = True
        for task in [*reversed(self.nested), *self.tasks]:
            self._end(task)
        self.tasks = []

    def _end(self, task):
        if task.greenlet and not task.greenlet.dead:
            self.turns += 1
            self.current, self.rank = task, task.rank
            try:
                task.greenlet.throw(GreenletExit)
            except (Exception, Interrupted):  # what a rank's `finally` raises while the schedule is given up
                pass
            if not task.greenlet.dead:
                _abandoned.append(task.greenlet)

    def _host(self, task, program, args):
        rank = task.rank
        task.modes.enter()
        try:
            self.results[rank] = program(*args)
        except (GreenletExit, Stuck, Interrupted):
            raise
        except SystemExit as exit:
            if exit.code not in (None, 0):
                self._failed(rank, "rank-failed", f"rank {rank} exits: {exit.code}", exit)
        except Exception as error:
            kind = "bad-access" if type(error).__name__ == "SymmetricAccessError" else "rank-failed"
            cause = error
            while cause is not None:
                if isinstance(cause, AssertionError):
                    kind = "wrong-result"
                cause = cause.__cause__
            message = str(error) or sites.source_of_error(error)
            if len(message) > 600:
                message = message[:600] + " ..."
            self._failed(rank, kind, f"rank {rank}: {type(error).__name__}: {message}", error)
        finally:
            task.modes.end()

    def _failed(self, rank, kind, text, error=None):
        place = () if error is None else (sites.of_error(error),)
        if error is not None and place[0] not in text:
            text += f"\nat {place[0]}"
        self.found(kind, text, place, (rank,))
        self.failed = True

    def _loop(self):
        while self.tasks:
            writes = self.detector.written
            ready = [task for task in self.tasks if task.can_run(writes)]
            if not ready:
                ready = self._polls()[:1]
            if self.copies.late and self.copies.progress(not ready):
                continue
            if len(self.nested) > 1:
                ready = self._innermost(ready)
            if not ready and self.failed:
                return  # the others wait for the rank that has failed
            if not ready:
                raise Stuck("deadlock", "")
            self.turns += 1
            if self.turns > self.max_steps:
                raise Stuck("livelock", f"runs on after {self.turns} turns of ranks and programs")
            if not self.turns % LOOK and self._expired():
                raise TimeOver
            alone = len(ready) == 1 and not self.strategy.exhaustive
            task = ready[0] if alone else self.strategy.pick(ready)
            self._resume(task)
            self._host_done()
            if task.greenlet.dead:
                self.tasks.remove(task)

    def _innermost(self, ready):
        """Of the hosts inside of torch's operators the last one to come must be the first to leave: pybind11 keeps the calls
        of a thread on a stack."""
        left = [task for task in ready if task not in self.nested[:-1]]
        if ready and not left:
            self._failed(self.nested[-1].rank, "rank-failed", NESTED.format(self.nested[-1].rank, ready[0].rank))
        return left

    def _polls(self):
        """Poll loops that may still end by themselves: a loop of fewer tries does."""
        return [
            task
            for task in self.tasks
            if isinstance(task.wait, Poll)
            and task.turns < (HOST_TURNS if task.launch is None else PLAIN_TURNS if task.plain else TURNS)
        ]

    def _resume(self, task):
        if task is not self.current:
            self.streak = 0
        task.wait, task.last_run = None, self.made + self.steps
        self.current, self.rank = task, task.rank
        scheduler.rank = task.rank
        world.set_active(self.worlds[task.rank])
        if task.launch is None:
            self.states.enter(task.rank)
            scheduler.current = scheduler.kernel = None
            task.greenlet.switch()
            self.worlds[task.rank] = world.active()
            return
        scheduler.current, scheduler.kernel = task, task.launch.kernel
        if task.index is not None:
            scheduler.set_program(task.index, task.launch.grid)
        try:
            task.greenlet.switch()
        finally:
            scheduler.current = scheduler.kernel = None

    def _task(self, rank, launch=None, program=-1):
        task = Task(self.made, rank, launch, program)
        self.made += 1
        self.tasks.append(task)
        return task

    # -- the watchdog's part
    def progress(self):
        return self.steps + self.turns

    def _expired(self):
        return self.watchdog is not None and self.watchdog.expired()

    def _stall(self, place=None):
        seconds = f"{self.watchdog.idle:g} s"
        runs = f"runs for {seconds} without touching shared memory, launching a kernel or waiting for anybody"
        return Stuck("livelock", runs if place is None else f"{self.current} at {place}: {runs}")

    def interrupt(self, frame):
        """Called between two steps of Python code, in a schedule that goes on for too long."""
        if getcurrent() is not self.hub:
            if self.ending:
                self._switch()  # for good: it is left where it is
            else:
                still = self.watchdog.idle >= min(self.watchdog.stall_seconds, STILL)
                self._switch(self._stall() if still else TimeOver())

    # -- reports
    def heap_map(self, rank):
        made = world.active() if rank == self.rank else self.worlds[rank]
        return made.heap_map if made is not None else None

    def found(self, kind, text, places=(), ranks=()):
        if not self.races and kind not in RESULTS:
            return
        finding = Finding(kind, text, tuple(places), tuple(ranks))
        known = next((one for one in self.findings if one.key == finding.key), None)
        if known is not None:
            known.count += 1
        else:
            self.findings.append(finding)
