"""All ranks in one process and one thread: their hosts and the programs of their kernels are coroutines, and a strategy
says which goes on. A schedule depends on nothing but the strategy's seed.

While a simulation runs it stands in for three things: the scheduler's own way of running programs (`scheduler.hand_over`),
the platform under shmem (`backends.in_process`), and torch.distributed's functions (process_group.py). Per-rank state of
the process (shmem's world, RANK and LOCAL_RANK, random generators) is exchanged whenever another rank's host goes on.
"""

import os
import random

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from .. import backends, context
from ..errors import TritonDistError
from ..interpreter import scheduler
from ..interpreter.location import error_line
from ..interpreter.scheduler import COMPARE, Poll, Wait
from ..shmem import world
from . import process_group, sites
from .detector import Detector
from .exhaustive import Redundant
from .findings import Finding
from .host_access import HostAccess
from .platform import SimulatedPlatform
from .tasks import HostWait, Launch, Task
from .watcher import Watcher

TURNS = 300  # a poll loop that has read nothing new so often waits for a change; when nobody can make one, it is stuck
PLAIN_TURNS = 1000  # the same for loads that are not volatile
STREAK = 3000  # steps of one task while others could run, before it lets them
HOST_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Stuck(Exception):
    """A schedule cannot go on; `kind` says why."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


class Simulation:
    """One schedule of `program(*args)` on every rank.

    strategy: of strategies.py. resident: programs of a grid that run at a time (None: TRITON_DIST_RESIDENT, else all).
    max_steps: accesses to memory before the run counts as endless.
    """

    def __init__(self, world_size, strategy, resident=None, max_steps=2_000_000):
        self.world_size, self.strategy, self.resident, self.max_steps = world_size, strategy, resident, max_steps
        self.findings, self.results = [], [None] * world_size
        self.detector = Detector(world_size, self.heap_map, self.found)
        self.host_access = HostAccess(self._host_touched)
        self.tasks, self.made, self.current, self.steps, self.streak = [], 0, None, 0, 0
        self.worlds, self.randoms, self.meetings = [None] * world_size, [None] * world_size, {}
        self.grad, self.launches = [True] * world_size, [0] * world_size
        self.groups = process_group.Groups(self)
        self.host_rank = None  # the rank whose host's state the process has
        self.redundant = False  # whether another schedule of an exhaustive search covers this one
        self.failed = False  # whether a rank has: the others go on as far as they can

    # -- the run
    def run(self, program, args=()):
        """Runs the schedule to its end, or until nobody can move. What was found lies in `findings`."""
        if world.active() is not None:
            raise TritonDistError("the checker makes heaps of its own: call it where shmem is not initialised")
        if scheduler.current is not None or backends.in_process is not None:
            raise TritonDistError("the checker was called from inside a kernel or from inside itself")
        self.hub = getcurrent()
        saved, grad = _state_of_process(), torch.is_grad_enabled()
        outer = {name: os.environ.get(name) for name in HOST_VARIABLES}
        try:
            backends.in_process = SimulatedPlatform(self)
            scheduler.hand_over(self)
            scheduler.observer = Watcher(self)
            os.environ.update(WORLD_SIZE=str(self.world_size), LOCAL_WORLD_SIZE=str(self.world_size))
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29500")
            torch.manual_seed(0), random.seed(0), np.random.seed(0)
            for rank in range(self.world_size):
                self.randoms[rank] = _state_of_process()
                task = self._task(rank)
                task.thread = self.detector.threads.hosts[rank]
                task.greenlet = greenlet(lambda rank=rank: self._host(rank, program, args))
            with self.groups:
                self._loop()
            if not self.failed:
                self.detector.ended()
        except Redundant:
            self.redundant = True
        except Stuck as stuck:
            if self.strategy.exhaustive:
                waiting = [task for task in self.tasks if isinstance(task.wait, Wait)]
                self.strategy.waiting = [(t.key, self.detector.word(t.rank, t.wait.address)) for t in waiting]
            ranks = tuple(sorted({task.rank for task in self.tasks}))
            self.found(stuck.kind, str(stuck), self._blocked_places(), ranks)
        finally:
            scheduler.observer = None
            self._end_tasks()
            scheduler.hand_over(None)
            self._forget()
            backends.in_process = None
            scheduler.rank = 0
            world.set_active(None)
            for name, value in outer.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
            _restore(saved)
            torch.set_grad_enabled(grad)

    def _forget(self):
        """Frees the heaps and their shadows now: this object and its coroutines refer to one another."""
        backends.in_process.memory.clear()
        self.worlds = [None] * self.world_size
        self.meetings.clear()
        self.detector.forget()

    def _end_tasks(self):
        for task in self.tasks:
            if task.greenlet and not task.greenlet.dead:
                try:
                    task.greenlet.throw(GreenletExit)
                except Exception:  # what a rank's `finally` raises while the schedule is given up
                    pass
        self.tasks = []

    def _host(self, rank, program, args):
        try:
            self.results[rank] = program(*args)
        except (GreenletExit, Stuck):
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
            message = str(error)
            if len(message) > 600:
                message = message[:600] + " ..."
            self._failed(rank, kind, f"rank {rank}: {type(error).__name__}: {message}", error)

    def _failed(self, rank, kind, text, error):
        place = error_line(error)
        if place not in text:
            text += f"\nat {place}"
        self.found(kind, text, (place,), (rank,))
        self.failed = True

    def _loop(self):
        while self.tasks:
            writes = self.detector.written
            ready = [task for task in self.tasks if task.can_run(writes)]
            if not ready:
                ready = self._polls()[:1]
            if not ready and self.failed:
                return  # the others wait for the rank that has failed
            if not ready:
                raise Stuck("deadlock", self.describe())
            alone = len(ready) == 1 and not self.strategy.exhaustive
            task = ready[0] if alone else self.strategy.pick(ready)
            self._resume(task)
            if task.greenlet.dead:
                self.tasks.remove(task)

    def _polls(self):
        """Poll loops that may still end by themselves: a loop of fewer tries does."""
        return [
            task
            for task in self.tasks
            if isinstance(task.wait, Poll) and task.turns < (PLAIN_TURNS if task.plain else TURNS)
        ]

    def _resume(self, task):
        if task is not self.current:
            self.streak = 0
        task.wait, task.last_run = None, self.made + self.steps
        self.current, self.rank = task, task.rank
        scheduler.rank = task.rank
        world.set_active(self.worlds[task.rank])
        if task.launch is None:
            self._enter_host(task.rank)
            scheduler.current = scheduler.kernel = None
            with self.host_access:
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

    def _enter_host(self, rank):
        if rank == self.host_rank:  # no other host ran in between, and programs change none of this
            return
        if self.host_rank is not None:
            self.randoms[self.host_rank] = _state_of_process()
            self.grad[self.host_rank] = torch.is_grad_enabled()
        self.host_rank = rank
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        _restore(self.randoms[rank])
        torch.set_grad_enabled(self.grad[rank])

    def _task(self, rank, launch=None, program=-1):
        task = Task(self.made, rank, launch, program)
        self.made += 1
        self.tasks.append(task)
        return task

    # -- the engine's part: called on a program's coroutine, `launch` on a host's
    def launch(self, kernel, run_program, grid):
        rank = self.rank
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
        task.greenlet = greenlet(lambda: self._program(task, launch, number), parent=self.hub)

    def _program(self, task, launch, number):
        task.index = launch.index(number)
        scheduler.set_program(task.index, launch.grid)
        task.thread = self.detector.threads.program(launch.rank, task.index, number)
        self.note("take", ("launch", launch.rank, launch.number))
        try:
            launch.run_program()
        except (GreenletExit, Stuck):
            raise
        except BaseException as error:
            error.program_place = f"rank {task.rank}, kernel {launch.kernel}, program {task.index}, {error_line(error)}"
            launch.error = launch.error or error
            return
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
            word = self.detector.word(self.rank, word) if isinstance(word, int) else word
            self.strategy.note(kind, word, detail)

    def step(self, sync=True):
        """Before an access to memory: others may run."""
        self.steps += 1
        self.streak += 1
        if self.steps > self.max_steps:
            raise Stuck("livelock", f"after {self.steps} accesses to memory:\n{self.describe()}")
        task = self.current
        if self.streak > STREAK:
            self.streak = 0
            self.strategy.spins(task)
            self.hub.switch()
        elif self.strategy.preempts(task, sync):
            self.hub.switch()

    def block(self, wait):
        task = self.current
        self.moved()
        if self.strategy.exhaustive and task.launch is not None:
            task.wait, task.seen_writes = wait, -1
            self.hub.switch()
            wait.ready()
            self.note("r", wait.address, lambda value: COMPARE[wait.compare](value, wait.value))
            return
        self.step()
        if not wait.ready():
            task.wait, task.seen_writes = wait, -1
            self.hub.switch()
            wait.ready()

    def pause(self):
        self.hub.switch()

    def moved(self):
        task = self.current
        if task.words:
            task.words, task.turns, task.plain = {}, 0, True

    def poll(self, words, kind, patience=1):
        task = self.current
        if task is None or task.launch is None or not words:
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
            self.hub.switch()

    # -- hosts
    def host_thread(self):
        return self.detector.threads.hosts[self.rank]

    def wait_on_host(self, ready, describe):
        """Blocks the running rank's host."""
        task = self.current
        task.wait = HostWait(ready, describe)
        self.hub.switch()

    def exchange(self, key, members, rank, value, describe):
        """Every member's value, in order; all meet here. `key` names the meeting, alike on all members."""
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
        task = self.current
        if task is not None and task.launch is None:
            (self.detector.store if writes else lambda t, a, s, w: self.detector.load(t, a, s, False, w))(
                task.thread, where, size, word
            )

    # -- reports
    def heap_map(self, rank):
        made = world.active() if rank == self.rank else self.worlds[rank]
        return made.heap_map if made is not None else None

    def found(self, kind, text, places=(), ranks=()):
        key = (kind, *places)
        known = next((one for one in self.findings if one.key == key), None)
        if known is not None:
            known.count += 1
            return
        self.findings.append(Finding(kind, text, tuple(places), tuple(ranks)))

    def _blocked_places(self):
        return tuple(sorted({self._place(task) for task in self.tasks if task.wait is not None}))

    def _place(self, task):
        frame = task.greenlet.gr_frame
        return sites.text(sites.of(frame)) if frame is not None else "not started"

    def describe(self):
        lines = []
        unstarted = {id(t.launch): t.launch for t in self.tasks if t.launch is not None and t.launch.next < t.launch.programs}
        for task in self.tasks[:24]:
            context.heap_map = self.heap_map(task.rank)
            what = f"waits: {task.wait}" if isinstance(task.wait, HostWait) else str(task.wait or "could run")
            lines.append(f"{task} at {self._place(task)}: {what}")
        if len(self.tasks) > 24:
            lines.append(f"... and {len(self.tasks) - 24} more")
        for launch in unstarted.values():
            lines.append(
                f"rank {launch.rank} kernel {launch.kernel}: {launch.programs - launch.next} of {launch.programs} programs "
                f"not started ({launch.limit} run at a time)"
            )
        return "\n".join(lines)


def _state_of_process():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore(state):
    torch.set_rng_state(state[0]), random.setstate(state[1]), np.random.set_state(state[2])
