"""All ranks in one process and one thread: their hosts and the programs of their kernels are coroutines, and a strategy
says which goes on. A schedule depends on nothing but the strategy's seed.

While a simulation runs it stands in for three things: the scheduler's own way of running programs (`scheduler.hand_over`),
the platform under shmem (`backends.in_process`), and torch.distributed's functions (process_group.py). Per-rank state of
the process (shmem's world, rank_state.py) is exchanged whenever another rank's host goes on.
"""

import ctypes
import math
import threading

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from .. import backends
from ..errors import TritonDistError, UnsupportedError
from ..interpreter import scheduler
from ..interpreter.location import error_line
from ..interpreter.scheduler import COMPARE, Poll, Wait
from ..shmem import world
from . import blocked, process_group, sites
from .copies import Copies
from .detector import Detector
from .exhaustive import Redundant
from .findings import RESULTS, Finding
from .host_access import HostAccess
from .platform import SimulatedPlatform
from .rank_state import Modes, RankStates, in_operator
from .tasks import HostWait, Launch, Stuck, Task, TimeOver
from .timeline import Recorder
from .watchdog import Interrupted
from .watcher import Watcher

TURNS = 300  # a poll loop that has read nothing new so often waits for a change; when nobody can make one, it is stuck
PLAIN_TURNS = 1000  # the same for loads that are not volatile
HOST_TURNS = 5_000  # the same for reads by a host's tensor operations, after so many equal ones in a row:
HOST_PATIENCE, HOST_LANES = 50, 64  # reads of at most so many words
STREAK = 3000  # steps of one task while others could run, before it lets them
HOST_KINDS = {4: "int32", 8: "int64"}
STILL = 5.0  # seconds without progress after which a schedule whose time is over was standing still
LOOK = 256  # steps between two looks at the clock
NESTED = (
    "rank {} waits inside of an operator of torch.ops (a custom op), in which it came after rank {}, which must leave its own "
    "first: the checker cannot do that. Check the functions that implement the operators"
)
_abandoned = []  # coroutines that nothing ends: they stand in a loop that takes every exception

class Simulation:
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

    # -- the engine's part: called on a program's coroutine, `launch` on a host's
    def launch(self, kernel, run_program, grid):
        self._check_thread(f"kernel {kernel} was launched")
        rank = self.rank
        self.moved()
        launch = Launch(rank, self.launches[rank], kernel, run_program, grid, self.resident)
        self.launches[rank] += 1
        self.note("give", ("launch", rank, launch.number))
        if scheduler.current is not None:
            raise TritonDistError(f"kernel {kernel} was launched from inside kernel {scheduler.kernel}")
        self.detector.launched(rank, self.arguments)
        for _ in range(launch.limit):
            self._start(launch)
        if not launch.over():
            self.wait_on_host(launch.over, lambda: f"its kernel {kernel} to end")
        self.detector.launch_ended(rank)
        self.note("take", ("end", rank, launch.number))
        if launch.error is not None:
            self._drop(launch)
            raise launch.error

    def _start(self, launch):
        number, launch.next = launch.next, launch.next + 1
        task = self._task(launch.rank, launch, number)
        task.index = launch.index(number)
        task.greenlet = greenlet(lambda: self._program(task, launch, number), parent=self.hub)

    def _program(self, task, launch, number):
        scheduler.set_program(task.index, launch.grid)
        task.thread = self.detector.threads.program(launch.rank, task.index, number)
        self.note("take", ("launch", launch.rank, launch.number))
        scheduler.observer.program(task.index, number)
        try:
            launch.run_program()
        except (GreenletExit, Stuck, Interrupted):
            raise
        except BaseException as error:
            error.program_place = f"rank {task.rank}, kernel {launch.kernel}, program {task.index}, {error_line(error)}"
            launch.error = launch.error or error
            return
        scheduler.observer.program_done(task.index, number)
        self.detector.program_ended(task.thread)
        self.note("give", ("end", launch.rank, launch.number))
        launch.ended += 1
        if launch.next < launch.programs:
            self._start(launch)

    def _drop(self, launch):
        """Ends the programs of a launch that has failed."""
        mine = [task for task in self.tasks if task.launch is launch]
        self.tasks = [task for task in self.tasks if task.launch is not launch]
        for task in mine:
            if task.greenlet and not task.greenlet.dead:
                task.greenlet.throw(GreenletExit)

    def note(self, kind, word, detail=None):
        if self.strategy.exhaustive:
            word = self.detector.places.word(self.rank, word) if isinstance(word, int) else word
            self.strategy.note(kind, word, detail)

    def step(self, sync=True):
        """Before an access to memory: others may run."""
        self.steps += 1
        self.streak += 1
        task = self.current
        if self.ending:
            raise GreenletExit
        if self.steps > self.max_steps:
            self._switch(Stuck("livelock", f"runs on after {self.steps} accesses to memory"))
        if not self.steps % LOOK and self._expired():
            self._switch(TimeOver())
        if self.streak > STREAK:
            self.streak = 0
            self.strategy.spins(task)
            self._switch()
        elif self.strategy.preempts(task, sync):
            self._switch()

    def _switch(self, stuck=None):
        """From the running coroutine to the hub, where `stuck` ends the schedule. It is raised there and not here, so that
        nothing in the program can take it."""
        task = self.current
        if task.launch is not None:
            self.hub.switch() if stuck is None else self.hub.throw(stuck)
            return
        nested = in_operator()
        if nested:
            self.nested.append(task)
        task.modes.leave()
        try:
            self.hub.switch() if stuck is None else self.hub.throw(stuck)
        finally:
            task.modes.enter()
            if nested:
                self.nested.remove(task)

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

    def block(self, wait):
        task = self.current
        self.moved()
        if self.strategy.exhaustive and task.launch is not None:
            task.wait, task.seen_writes = wait, -1
            self._switch()
            wait.ready()
            self.note("r", wait.address, lambda value: COMPARE[wait.compare](value, wait.value))
            return
        self.step()
        if not wait.ready():
            task.wait, task.seen_writes = wait, -1
            self._switch()
            wait.ready()

    def pause(self):
        self._switch()

    def moved(self):
        task = self.current
        if task.words:
            task.words, task.turns, task.plain = {}, 0, True

    def poll(self, words, kind, patience=1):
        task = self.current
        if task is None or not words:
            return
        known = task.words
        if any(known.get(address) != seen for address, seen in words.items()):
            if len(known) > 256:
                known.clear()
            known.update(words)
            task.turns, task.plain = 0, task.plain and patience > 1
            return
        task.turns += 1
        task.plain = task.plain and patience > 1
        if task.turns >= patience:
            task.wait, task.seen_writes = Poll(dict(known), kind), -1
            self._switch()

    # -- hosts
    def host_thread(self):
        return self.detector.threads.hosts[self.rank]

    def _check_thread(self, what):
        if threading.get_ident() != self.ident:
            text = f"rank {self.rank}: {what} in a Python thread of its own: the checker runs one thread of each rank"
            self._failed(self.rank, "rank-failed", text)
            raise UnsupportedError(text)

    def wait_on_host(self, ready, describe):
        """Blocks the running rank's host."""
        if self.ending:
            raise GreenletExit
        self.moved()
        task, start = self.current, self.progress()
        task.wait = HostWait(ready, describe)
        self._switch()
        if self.recorders:
            self.recorders[task.rank].host_waited(start, describe().partition(";")[0])

    def exchange(self, key, members, rank, value, describe):
        """Every member's value, in order; all meet here. `key` names the meeting, alike on all members."""
        self._check_thread("shmem or torch.distributed was called")
        said = self.meetings.setdefault(key, {})
        said[rank] = value
        self.note("give", key)
        members = list(members)
        if len(said) == len(members):
            self.detector.meet(members)
        else:

            def text():
                late = [member for member in members if member not in said]
                return f"{describe()}; not arrived yet: rank {', '.join(map(str, late))}"

            self.wait_on_host(lambda: len(said) == len(members), text)
        self.note("take", key)
        return [said[member] for member in members]

    def _host_touched(self, where, size, writes, word):
        """A tensor operation of host code is about to read or write symmetric memory."""
        task = self.current
        if task is None or task.launch is not None or self.ending:
            return
        if not self.operating:
            self.step(False)
        self._check_live(where, word)
        if writes:
            self.moved()
            self.operating = True
            self.detector.store(task.thread, where, size, word)
            return
        if math.prod(where.shape) <= HOST_LANES and not self.operating:
            addresses = where.array(np.uint64).ravel().tolist()
            words = {address: ctypes.string_at(address, size) for address in addresses}
            self.poll(words, HOST_KINDS.get(size, ""), HOST_PATIENCE)
        self.operating = True
        self.detector.load(task.thread, where, size, False, word)

    def _check_live(self, where, word):
        heap, (low, _) = self.heap_map(self.rank), where.bounds()
        place = heap.owner(low) if heap is not None else None
        if place is not None and heap.allocation(place[1]) is None:
            site = sites.text(sites.here())
            text = f"{heap.describe(low)}\n{word} by rank {self.rank} host at {site}"
            self.found("bad-access", text, (site,), (self.rank,))

    def _host_watched(self, tensor):
        places = self.detector.places
        if not places.copied:
            return False
        span = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape)) + 1
        return places.is_copied(self.rank, tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size())

    def _host_done(self):
        self.operating = False
        self.detector.load_done()

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
