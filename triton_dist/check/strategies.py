"""Which task goes on next. A strategy is made anew for every schedule, from its seed alone.

    preempts(task, sync)    asked before every access to memory; `sync`: of an atomic, a signal or a wait. True: others may run
    pick(ready)             the next of the tasks that can run, listed in the order in which they were made
    spins(task)             `task` has run very long while others could have
    exhaustive              whether every choice is to be made there, so that a wait is no choice before it can end; then also
                            note(kind, word): see exhaustive.py
"""

import random


class Fifo:
    """A task runs until it waits; then the one that has not run for longest."""

    exhaustive = False

    def preempts(self, task, sync):
        return False

    def pick(self, ready):
        return min(ready, key=lambda task: task.last_run)

    def spins(self, task):
        pass


class Random:
    """Any task that can run, all with equal chance, whenever a coin of a weight of this schedule's own says so."""

    exhaustive = False
    WEIGHTS = (0.02, 0.1, 0.3, 0.7)

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.weight = self.rng.choice(self.WEIGHTS)

    def preempts(self, task, sync):
        return self.rng.random() < self.weight

    def pick(self, ready):
        return ready[self.rng.randrange(len(ready))]

    def spins(self, task):
        pass


class Priorities:
    """PCT (Burckhardt et al., ASPLOS 2010): tasks have random priorities and the highest runs; at `changes` random steps of
    about `length` the running task's becomes the lowest. Finds a bug of depth d with chance 1 / (n * length^(d-1)) or more."""

    exhaustive = False

    def __init__(self, seed, changes, length):
        self.rng = random.Random(seed)
        self.priority, self.lowest, self.step = {}, 0, 0
        self.changes = {self.rng.randrange(max(length, 1)) for _ in range(changes)}

    def _of(self, task):
        found = self.priority.get(task.number)
        if found is None:
            found = self.priority[task.number] = 1 + self.rng.random()
        return found

    def preempts(self, task, sync):
        self.step += 1
        if self.step in self.changes:
            self.spins(task)
            return True
        return sync

    def pick(self, ready):
        return max(ready, key=self._of)

    def spins(self, task):
        self.lowest -= 1
        self.priority[task.number] = self.lowest


def strategy_of(seed, length):
    """FIFO without a seed; random for even seeds, priorities with 0 to 3 changes for odd ones. `length`: steps of the FIFO
    schedule, which is the first to run; it is part of what a replay needs, and does so itself."""
    if seed is None:
        return Fifo()
    if seed % 2 == 0:
        return Random(seed)
    return Priorities(seed, seed // 2 % 4, length)
