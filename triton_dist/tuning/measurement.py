"""One measurement of several candidates by all ranks of a team, who agree after each step: see `autotune`."""

from dataclasses import dataclass, field

import torch

from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError, DeadlockError, PeerLostError, TuningError
from triton_dist.shmem import codes

from . import timing
from .compile_only import compile_only, compiles
from .result import Timing

SAMPLE_US, MOST_CALLS = 1000.0, 10  # a sample's calls take about so long, but they are not more than so many
PROBLEM_LENGTH = 160  # characters of an error that the other ranks hear of
GATHERED = 64  # times that one exchange carries, of a rank
RETRIES = 10  # meetings that a rank which failed may be ahead of the others

LEFT_THE_OTHERS = (CollectiveMismatchError, DeadlockError, PeerLostError)  # what a rank meets when another one is elsewhere


@dataclass
class Held:
    """A candidate that works, ready to be timed; index None: the baseline."""

    index: int | None
    call: object
    context: object = None
    runs: dict = field(default_factory=dict)  # way: a function that makes one sample's calls


class Measurement:
    """`timings` of the candidates and times of the `baseline`, after `run()`. Arguments: those of `autotune`."""

    def __init__(self, what, candidates, call, make_context, reset, check, baseline, team, ways, calls, samples):
        self.what, self.candidates, self.call, self.make_context, self.reset = what, candidates, call, make_context, reset
        self.check, self.base, self.team, self.ways, self.calls, self.samples = check, baseline, team, ways, calls, samples
        self.timings, self.baseline = [Timing(candidate) for candidate in candidates], None

    def run(self):
        held = []
        if self.base is not None:
            base = Held(None, self.base)
            problem = self.try_out(base, "baseline")
            if problem:
                raise TuningError(f"rank {shmem.my_pe()}: {self.what}: the baseline fails: {problem}")
            held.append(base)
        kept = len(held)
        for index, candidate in enumerate(self.candidates):
            step = f"candidate {index}"
            one, problem, full = self.make(index, candidate, step)
            if full and len(held) > kept:  # no room beside the others: time those first
                self.time(held, kept)
                held = held[:kept]
                one, problem, full = self.make(index, candidate, step)
            if problem is None:
                problem = self.try_out(one, step)
                if problem:
                    self.free(one)
            if problem is None:
                held.append(one)
            else:
                self.timings[index].problem = problem
        if len(held) > kept:
            self.time(held, kept)

    def make(self, index, candidate, step):
        """(Held, None, False), or (None, problem, whether it is a lack of memory)."""
        if self.make_context is None:
            return Held(index, lambda: self.call(candidate)), None, False
        one, problem, full = Held(index, None), None, False
        try:
            one.context = self.make_context(candidate)
            one.call = lambda: self.call(one.context)
        except Exception as error:
            problem = _said(error)
            full = getattr(error, "code", None) == codes.MALLOC_FAILED or isinstance(error, torch.OutOfMemoryError)
        said = self.meet(f"{step}, made", [problem, full])
        problem = self.joined([one for one, _ in said])
        return one if problem is None else None, problem, any(full for _, full in said)

    def try_out(self, one, step):
        """Compiles, then makes one call and checks it; returns the problem, the same on all ranks, or None."""

        def compiling():
            with compile_only():
                one.call()

        problem = self.all_do(f"{step}, compiled", compiling) if compiles() else None
        if problem is None:
            self.fresh(step)
            problem = self.all_do(f"{step}, called", one.call)
        if problem is None and self.check is not None and one.index is not None:
            given = one.context if self.make_context else self.candidates[one.index]
            problem = self.all_do(f"{step}, checked", lambda: self.check(given))
        return problem

    def fresh(self, step):
        """Buffers as `reset` makes them, while no rank is in a call."""
        if self.reset is not None:
            timing.finish(f"rank {shmem.my_pe()}: {self.what}: {step}")
            shmem.barrier_all(self.team)
            self.reset()
            timing.finish(f"rank {shmem.my_pe()}: {self.what}: {step}")
            shmem.barrier_all(self.team)

    def all_do(self, step, function):
        """What went wrong on any rank in `function`, as one text, or None."""
        problem = None
        try:
            function()
        except Exception as error:
            problem = _said(error)
        timing.finish(f"rank {shmem.my_pe()}: {self.what}: {step}")
        return self.joined(self.meet(step, problem))

    def meet(self, step, value):
        """Every rank's value. A rank that failed comes here early: then it meets what the others do first, and tries again."""
        for tries in range(RETRIES):
            try:
                return shmem.gather(f"{self.what}: {step}", value, self.team)
            except LEFT_THE_OTHERS:
                if tries + 1 == RETRIES:
                    raise
        return None

    def joined(self, problems):
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        return "; ".join(wrong) or None

    def time(self, held, kept):
        """Times what is held, and frees all but the first `kept`."""
        for one in held:
            one.runs = {}
        calls = self.calls or (1 if self.reset is not None else self.agreed_calls(held))
        for way in self.ways:
            for one in held:
                if way == "queued":
                    one.runs[way] = timing.repeated(one.call, calls)
                    continue

                def capture(one=one, way=way):
                    one.runs[way] = timing.graphed(one.call, calls)

                problem = self.all_do(f"{self.step(one)}, captured", capture)
                if problem and one.index is None:
                    raise TuningError(f"rank {shmem.my_pe()}: {self.what}: the baseline cannot be captured: {problem}")
                if problem:
                    self.timings[one.index].problem = problem
        timed = [one for one in held if one.index is None or self.timings[one.index].problem is None]
        for way in self.ways:
            medians = self.medians(timed, way, calls)
            for start in range(0, len(timed), GATHERED):
                some = [round(us, 3) for us in medians[start : start + GATHERED]]
                said = shmem.gather(f"{self.what}: times", some, self.team)
                for one, us in zip(timed[start:], map(max, zip(*said))):
                    if one.index is None:
                        self.baseline = {**(self.baseline or {}), way: us}
                    else:
                        times = self.timings[one.index].microseconds or {}
                        self.timings[one.index].microseconds = {**times, way: us}
        for one in held:
            one.runs = {}
        for one in held[kept:]:
            self.free(one)

    def step(self, one):
        return "baseline" if one.index is None else f"candidate {one.index}"

    def agreed_calls(self, held):
        """Calls of a sample: the same on all ranks."""
        spans = []
        for one in held:
            first = timing.mark()
            one.call()
            last = timing.mark()
            timing.finish(f"rank {shmem.my_pe()}: {self.what}: {self.step(one)}")
            spans.append(timing.span(first, last))
        slowest = max(shmem.gather(f"{self.what}: calls", round(min(spans), 3), self.team))
        return max(1, min(MOST_CALLS, int(SAMPLE_US / max(slowest, 1e-3))))

    def medians(self, held, way, calls):
        rows = []
        for one in held:  # once untimed
            self.fresh("warm")
            one.runs[way]()
        for _ in range(self.samples):
            marks = []
            for one in held:
                self.fresh("sample")
                marks.append((timing.mark(), one.runs[way](), timing.mark()))
            rows.append(marks)
        timing.finish(f"rank {shmem.my_pe()}: {self.what}: timing")
        spans = [[timing.span(first, last) / calls for first, _, last in marks] for marks in rows]
        return [sorted(row[i] for row in spans)[self.samples // 2] for i in range(len(held))]

    def free(self, one):
        if hasattr(one.context, "free"):
            one.context.free()


def _said(error):
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text[:PROBLEM_LENGTH]
