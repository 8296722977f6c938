"""All schedules of a small program that can differ: stateless search with dynamic partial-order reduction.

The choices are made at atomics, signals and waits alone. Plain accesses commute as long as they do not race, and if they do,
the detector says so whatever their order. Of two schedules that differ only in the order of steps that do not touch a common
word one is enough: after each run, every step that conflicts with an earlier one of another task, and was not ordered after
it by others, gives a choice to try there (Flanagan and Godefroid, POPL 2005); sleep sets (Godefroid, 1996) cut off what an
earlier run has covered.
"""


class Redundant(Exception):
    """Every continuation of this schedule is covered by another one."""


class Node:
    """A point at which a task was chosen. `enabled`: keys of the tasks that could run, in order; `todo`: those to try;
    `done`: those tried here, with the steps that they then made; `sleep`: those that need not be tried, likewise."""

    __slots__ = ("enabled", "todo", "done", "sleep", "choice", "steps", "details")

    def __init__(self, enabled, sleep, choice):
        self.enabled, self.sleep, self.choice = enabled, sleep, choice
        self.todo, self.done, self.steps, self.details = {choice}, {}, [], {}


def _conflict(some, others):
    """Whether two lists of steps (kind, word) touch a word in common that one of them writes."""
    for kind, word in some:
        if kind in ("r", "w"):
            for other, their_word in others:
                if word == their_word and "w" in (kind, other) and other in ("r", "w"):
                    return True
    return False


class Exhaustive:
    """A strategy for all runs of one search. `begin` each run, `finish` it; `over` when there are no others."""

    exhaustive = True

    def __init__(self):
        self.nodes, self.depth, self.over = [], 0, False
        self.waiting = []  # (task, word) of waits that the run left unsatisfied

    def begin(self):
        self.depth, self.waiting = 0, []

    # -- during a run
    def preempts(self, task, sync):
        return sync

    def spins(self, task):
        pass

    def note(self, kind, word, detail=None):
        """The running task reads ("r") or writes ("w") a word, gives its past to ("give") or takes it from ("take") a
        meeting. `detail` of a write: the value before; of a wait: whether a value ends it (a function)."""
        if self.depth:
            node = self.nodes[self.depth - 1]
            if (kind, word) not in node.steps:
                node.steps.append((kind, word))
            if detail is not None:
                node.details.setdefault((kind, word), detail)

    def pick(self, ready):
        by_key = {task.key: task for task in ready}
        if self.depth < len(self.nodes):
            node = self.nodes[self.depth]
        else:
            sleep, last = {}, None
            if self.nodes:
                parent = self.nodes[-1]
                last = parent.choice
                asleep = {**parent.sleep, **parent.done}
                sleep = {key: steps for key, steps in asleep.items() if key != last and not _conflict(steps, parent.steps)}
            enabled = sorted(by_key)
            awake = [key for key in enabled if key not in sleep]
            if not awake:
                raise Redundant
            node = Node(enabled, sleep, last if last in awake else awake[0])
            self.nodes.append(node)
        node.steps, node.details = [], {}
        self.depth += 1
        return by_key[node.choice]

    def path(self):
        """This run's choices, for `Path`."""
        return ".".join(str(node.enabled.index(node.choice)) for node in self.nodes if len(node.enabled) > 1)

    # -- between runs
    def finish(self):
        self._analyse()
        while self.nodes:
            node = self.nodes[-1]
            node.done[node.choice] = node.steps
            left = [key for key in node.enabled if key in node.todo and key not in node.done and key not in node.sleep]
            if left:
                node.choice = left[0]
                return
            self.nodes.pop()
        self.over = True

    def _analyse(self):
        """Finds the conflicts of the run that could come in the other order."""
        clocks = {}  # task -> {task: index of its latest step that happened before, plus one}
        all_writes = {}  # word -> [index]
        writes, reads, meetings = {}, {}, {}
        for index, node in enumerate(self.nodes):
            key = node.choice
            clock = clocks.setdefault(key, {})
            for kind, word in node.steps:
                if kind == "take":
                    _join(clock, meetings.get(word, {}))
            before = dict(clock)
            for kind, word in node.steps:
                if kind in ("r", "w"):
                    earlier = [writes[word]] if word in writes else []
                    if kind == "w":
                        earlier += list(reads.get(word, {}).values())
                    for there, whose, their_clock in earlier:
                        if whose != key and before.get(whose, 0) <= there and self._could(node, kind, word, there):
                            self._reverse(there, index, key, before)
                        _join(clock, their_clock)
            for kind, word in node.steps:
                if kind == "r":
                    self._overtaken(key, all_writes.get(word, ()), clock.get(key, 0))
            clock[key] = index + 1
            for kind, word in node.steps:
                if kind == "w":
                    writes[word], reads[word] = (index, key, dict(clock)), {}
                    all_writes.setdefault(word, []).append(index)
                elif kind == "r":
                    reads.setdefault(word, {})[key] = index, key, dict(clock)
                elif kind == "give":
                    _join(meetings.setdefault(word, {}), clock)

        for key, word in self.waiting:
            self._overtaken(key, all_writes.get(word, ()), clocks.get(key, {}).get(key, 0))

    def _could(self, node, kind, word, there):
        """Whether a read could have come before the write of step `there`: a wait only if it was over already."""
        ends, value = node.details.get((kind, word)), self.nodes[there].details.get(("w", word))
        return kind == "w" or ends is None or value is None or ends(value)

    def _overtaken(self, key, writes, since):
        """A wait of `key`, ready from time to time since step `since`, could have ended before the latest write that came
        when it was."""
        for there in reversed(writes):
            if there < since:
                return
            if self.nodes[there].choice != key and key in self.nodes[there].enabled:
                self.nodes[there].todo.add(key)
                return

    def _reverse(self, there, index, key, before):
        """Step `index` of `key` could come before step `there`: something must be tried there instead."""
        node = self.nodes[there]
        if key in node.enabled:
            node.todo.add(key)
            return
        for other in node.enabled:
            if other != node.choice and before.get(other, 0) > there + 1:
                node.todo.add(other)
                return
        if before.get(key, 0) <= there:  # it could not run then, and nobody else's step has let it: this one has
            return
        node.todo.update(node.enabled)


def _join(clock, other):
    for key, time in other.items():
        if clock.get(key, 0) < time:
            clock[key] = time


class Path:
    """Repeats a run of a search from its path."""

    exhaustive = True

    def __init__(self, text):
        self.choices = [int(choice) for choice in text.split(".") if choice]

    def preempts(self, task, sync):
        return sync

    def spins(self, task):
        pass

    def note(self, kind, word, detail=None):
        pass

    def pick(self, ready):
        ready = sorted(ready, key=lambda task: task.key)
        if len(ready) == 1 or not self.choices:
            return ready[0]
        return ready[min(self.choices.pop(0), len(ready) - 1)]
