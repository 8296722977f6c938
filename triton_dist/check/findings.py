"""What the checker has found, as text that a person can act on."""

from dataclasses import dataclass, field

from ..errors import TritonDistError

# kind -> what it is, what to do
KINDS = {
    "data-race": (
        "two accesses that nothing orders",
        "add the notify and the wait that order them (for a host's operations a barrier), or fix the one that should",
    ),
    "missing-release": (
        "the signal does not publish the data",
        "use dl.notify, or give the atomic sem='release' and scope='sys'; a plain or relaxed store publishes nothing",
    ),
    "missing-acquire": (
        "the signal was seen, but not by an acquire",
        "use dl.wait or dl.test, or an atomic with sem='acquire' and scope='sys'",
    ),
    "narrow-scope": (
        "the scope of an atomic does not reach the other rank",
        "give both sides scope='sys' (the default is 'gpu')",
    ),
    "buffer-reuse": (
        "a buffer is overwritten while it may still be read",
        "let the reader notify when it is done and wait for that before writing again, or use another buffer in turns",
    ),
    "lost-update": (
        "a set overwrites what another program signalled, before anybody must have seen it",
        "let all writers add, or give each a signal of its own",
    ),
    "shared-line": (
        "two signals lie in one 64-byte line, which Ascend reads and writes as a whole",
        "make signals with shmem.create_signals and address them with dl.signal_at",
    ),
    "unwaited-signal": (
        "a signal is sent that nobody ever looks at",
        "wait for it, or do not send it; is the index or the rank right?",
    ),
    "deadlock": (
        "nobody can move any more",
        "look for a notify that was never sent, or sent to another rank or index, or with less",
    ),
    "livelock": ("the run does not end", "look for a loop whose condition nobody can make true"),
    "bad-access": ("an address, a peer or a signal that is not valid in the symmetric heap", "see the message"),
    "wrong-result": ("an assertion of the program failed", "see the assertion"),
    "rank-failed": ("a rank failed", "see the message"),
}


SYMPTOMS = {"wrong-result", "rank-failed", "deadlock", "livelock", "unwaited-signal"}


RESULTS = {"wrong-result", "rank-failed", "deadlock", "livelock", "bad-access"}  # what a device would show, too


@dataclass
class Finding:
    """`kind` is one of KINDS. `places` are the source lines, `ranks` the ranks that it is about, `seed` the schedule that
    shows it, for `explore(seed=...)`: "fifo", a number, "weak:..." of one with weak memory, or "path:..." of an exhaustive
    search."""

    kind: str
    text: str
    places: tuple = ()
    ranks: tuple = ()
    seed: int | str | None = None
    replay: str = ""
    count: int = 1  # times seen, over all schedules

    def __str__(self):
        what, todo = KINDS[self.kind]
        lines = [f"{self.kind}: {what}", *("  " + line for line in self.text.splitlines())]
        return "\n".join([*lines, f"  To do: {todo}", f"  Replay: {self.replay}"])

    @property
    def key(self):
        """What it is about, whichever access came first."""
        return (self.kind, *sorted(self.places))


class CheckFailed(TritonDistError, AssertionError):
    """The checker found something; `report` has it all."""

    def __init__(self, report):
        super().__init__(str(report))
        self.report = report


@dataclass
class Report:
    """What `explore` returns. `schedules` were run; `complete` says that there are no others."""

    program: str
    world_size: int
    schedules: int = 0
    steps: int = 0
    seconds: float = 0.0
    flagged: int = 0  # schedules that showed something
    complete: bool = False
    cut: bool = False  # whether the time given was over inside of a schedule
    redundant: int = 0  # further runs of an exhaustive search, given up because others cover them
    findings: list = field(default_factory=list)
    outputs: str = ""  # what the ranks printed in the schedule that failed first, else in the first one
    timeline: str = ""  # summary of the schedule of which `explore(timeline=...)` wrote a trace
    results: list = None  # what `program` returned, by rank, in the latest schedule that ended

    @property
    def ok(self):
        return not self.findings

    @property
    def kinds(self):
        return sorted({one.kind for one in self.findings})

    def raise_if_found(self):
        if self.findings:
            raise CheckFailed(self)

    def __str__(self):
        run = f"all {self.schedules} schedules" if self.complete else f"{self.schedules} schedules"
        head = f"{self.program}, {self.world_size} ranks, {run} explored in {self.seconds:.1f} s"
        head += ", then the time given was over: " if self.cut else ": "
        if self.ok:
            return "\n\n".join(filter(None, [head + "nothing found", self.timeline]))
        parts = [head + f"{len(self.findings)} finding(s)", *map(str, self.findings)]
        if self.outputs.strip():
            parts.append("Printed:\n" + "\n".join("  " + line for line in self.outputs.strip().splitlines()[-20:]))
        if self.timeline:
            parts.append(self.timeline)
        return "\n\n".join(parts)
