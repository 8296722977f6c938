"""The engine's part of a simulation: launches, and what a running program does that may let others run. Stands in for
interpreter/scheduler.py's own way of running programs.
"""

from greenlet import GreenletExit, greenlet

from ..errors import TritonDistError
from ..interpreter import scheduler
from ..interpreter.location import error_line
from ..interpreter.scheduler import COMPARE, Poll
from .rank_state import in_operator
from .tasks import Launch, Stuck, TimeOver
from .watchdog import Interrupted

STREAK = 3000  # steps of one task while others could run, before it lets them
WORDS, HOST_WORDS = 256, 64  # that a poll loop looks at; a host may well compute with more
LOOK = 256  # steps between two looks at the clock


class Engine:
    """What Simulation has for kernels. Called on a program's coroutine, `launch` on a host's."""

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
            if len(known) > (WORDS if task.launch is not None else HOST_WORDS):
                known.clear()
            known.update(words)
            task.turns, task.plain = 0, task.plain and patience > 1
            return
        task.turn(words, patience)
        if task.turns >= patience:
            task.wait, task.seen_writes = Poll(dict(task.words), kind), -1
            self._switch()
