"""The coroutines of a simulation: a rank's host, or a program of one of its kernels; what they wait for, what a launch is."""

from ..interpreter.scheduler import COMPARE, Wait, Worker, resident_limit


class HostWait:
    def __init__(self, ready, describe):
        self.ready, self.describe = ready, describe

    def __str__(self):
        return self.describe()


class Task(Worker):
    """A coroutine: a rank's host (`launch` is None) or a program. `wait` is None while it can run."""

    __slots__ = ("number", "rank", "launch", "key", "thread", "last_run", "seen_writes", "modes")

    def __init__(self, number, rank, launch=None, program=-1):
        super().__init__()
        self.number, self.rank, self.launch = number, rank, launch
        # alike in every schedule: rank, how many launches came before, program
        self.key = rank, -1 if launch is None else launch.number, program
        self.thread, self.last_run, self.seen_writes = None, number, -1
        self.modes = None  # of torch, of a host

    def can_run(self, writes):
        if self.wait is None:
            return True
        if isinstance(self.wait, HostWait) or self.seen_writes != writes:
            ready = true_now(self.wait)
            self.seen_writes = -1 if ready else writes
            return ready
        return False

    def __str__(self):
        if self.launch is None:
            return f"rank {self.rank} host"
        return f"rank {self.rank} program {self.index} of kernel {self.launch.kernel}"


def true_now(wait):
    """Unlike Wait.ready, this forgets: a peer that moves the word on before the waiter has looked is not seen."""
    if isinstance(wait, Wait):
        return COMPARE[wait.compare](wait.ctype.from_address(wait.address).value, wait.value)
    return wait.ready()


class Launch:
    def __init__(self, rank, number, kernel, run_program, grid, limit):
        self.number = number  # of this rank's launches
        self.rank, self.kernel, self.run_program, self.grid = rank, kernel, run_program, grid
        self.programs = grid[0] * grid[1] * grid[2]
        self.limit = min(limit or resident_limit(self.programs), self.programs)
        self.next = self.ended = 0
        self.error = None

    def over(self):
        return self.error is not None or self.ended == self.programs

    def index(self, number):
        _, ny, nz = self.grid
        return number // (ny * nz), number // nz % ny, number % nz


class Stuck(Exception):
    """A schedule cannot go on; `kind` says why."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


class TimeOver(Stuck):
    """There is no time left to go on with a schedule; the running coroutine is not known to be stuck."""

    def __init__(self):
        super().__init__(None, "")
