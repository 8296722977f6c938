"""Runs cases on ranks: the lowered code of their kernels against the reference.

    with Execution() as execution:
        results = execution.run("all_gather", world=2)
"""

import json
import os
import queue
import random
import threading
from dataclasses import dataclass
from pathlib import Path

from .compiler import Compiler

# {case: what is known not to run on the host}: the stage that refuses, a text that its words contain, and why.
NOT_EXECUTABLE = json.loads(Path(__file__).with_name("not_executable.json").read_text())

_REFUSED = "not executable: "
LIMIT_S = 30  # of a launch: a wait that is never satisfied ends so


@dataclass
class Result:
    """What became of a case on `world` ranks.

    verdict: "exact" (equal bits), "close" (within the tolerance), "WRONG", "refused" (a kernel cannot be compiled for the
    host; `stage` says by what), "FAILED" (a rank raised, hung or died).
    error: the largest difference over all ranks, 0.0 for equal bits; used: its largest part of what is allowed, at most 1 when
    right. kernels: those that ran as lowered code.
    """

    case: str
    world: int
    verdict: str
    error: float | None = None
    used: float | None = None
    kernels: tuple = ()
    stage: str = ""
    reason: str = ""
    seed: int = 0

    def summary(self):
        """The line of `reason` that says most: the last one of Python's, the first one of a tool's or a failure."""
        lines = [line for line in self.reason.splitlines() if line.strip()]
        return lines[-1 if self.stage == "ttir" else 0][:300] if lines else ""


def problem(result):
    """None, or what is not as it should be: wrong data, a failure, a refusal that is not in NOT_EXECUTABLE, or an entry there
    that has come to run."""
    known = NOT_EXECUTABLE.get(result.case)
    if result.verdict in ("exact", "close"):
        return f"{result.case} runs now: take it out of not_executable.json and of the docs" if known else None
    if result.verdict == "refused" and known:
        if known["stage"] == result.stage and known["reason"] in result.reason:
            return None
        return f"not_executable.json says that {known['stage']} refuses it with {known['reason']!r}, but: {result.reason}"
    return f"{result.verdict}: {result.reason}"


def in_rank(address, case, seed, limit_s):
    """The rank's part: (worst difference, its tolerance, kernels that ran, what was wrong) or a refusal's (stage, reason)."""
    import torch

    from triton_dist import shmem

    from . import engine
    from .cases import CASES

    torch.set_num_threads(1)
    engine.install(address, limit_s)
    engine.ran.clear()
    try:
        found = CASES[case](seed)
    except engine.NotExecutable as refusal:
        # Raises on this rank, too, when the others go on: they would wait for what this one does not do.
        shmem.check_alike(f"{_REFUSED}{refusal.stage}: {refusal.kernel}: {refusal.reason}")
        return {"stage": refusal.stage, "reason": f"{refusal.kernel}: {refusal.reason}"}
    shmem.check_alike("every kernel ran")
    worst, used, wrong = 0.0, 0.0, []
    for what, got, expected, tolerance in found:
        difference, part = compare(got, expected, tolerance)
        worst, used = max(worst, difference), max(used, part)
        if not part <= 1:
            wrong.append(f"{what}: differs by {difference:g}, {part:g} times what is allowed")
    return {"error": worst, "used": used, "kernels": tuple(sorted(engine.ran)), "wrong": wrong}


def compare(got, expected, tolerance):
    """(largest absolute difference, largest quotient of it and the tolerance); zeros for equal bits.

    tolerance: a number, or a tensor of the shape; 0: equal bits. Infinite for another shape or dtype and for a stray NaN.
    """
    import torch

    infinite = float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return infinite, infinite
    expected = expected.contiguous()
    if not got.numel() or torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        return 0.0, 0.0
    gap = (got.double() - expected.double()).abs().nan_to_num(infinite)
    gap[got.isnan() & expected.isnan()] = 0
    allowed = torch.as_tensor(tolerance, dtype=torch.float64).expand_as(gap)
    if not allowed.any():
        return float(gap.max()), infinite
    return float(gap.max()), float(torch.where(gap > 0, gap / allowed, 0.0).max())


def run_all(cases, worlds, seed=None, limit_s=LIMIT_S):
    """Yields a Result for each case and each number of ranks, as they come: the numbers of ranks run side by side."""
    results = queue.SimpleQueue()

    def run_world(world):
        try:
            with Execution(limit_s, compiler) as execution:
                executions.append(execution)
                for case in cases:
                    if stop.is_set():
                        break
                    results.put(execution.run(case, world, seed))
        except BaseException as error:
            results.put(error)
        finally:
            results.put(None)

    stop, executions = threading.Event(), []
    with Compiler() as compiler:  # one for all: most kernels are the same for any number of ranks
        threads = [threading.Thread(target=run_world, args=(world,)) for world in worlds]
        for thread in threads:
            thread.start()
        try:
            running = len(threads)
            while running:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    running -= 1
                else:
                    yield result
        finally:
            stop.set()
            for thread in threads:
                while thread.is_alive():  # only when the caller ends early: ranks that are at work are not waited for
                    for execution in executions:
                        execution.abort()
                    thread.join(0.2)


class Execution:
    """A compile server and ranks, for case after case. `compiler`: one that runs already."""

    def __init__(self, limit_s=LIMIT_S, compiler=None):
        self.limit_s = limit_s
        self._compiler, self._own = compiler or Compiler(), compiler is None
        self._ranks = {}

    def __enter__(self):
        if self._own:
            self._compiler.__enter__()
        return self

    def __exit__(self, *exc):
        for ranks in self._ranks.values():
            ranks.close()
        if self._own:
            self._compiler.__exit__(*exc)

    def abort(self):
        """Ends the ranks at once, from any thread: a case that is running fails."""
        for ranks in list(self._ranks.values()):
            ranks.kill()

    def ranks(self, world):
        from triton_dist.testing import Ranks

        if world not in self._ranks:
            self._ranks[world] = Ranks(world, env={"TRITON_DIST_BACKEND": "cpu"})
        return self._ranks[world]

    @property
    def address(self):
        return self._compiler.address

    def run(self, case, world, seed=None):
        """A Result. `seed`: of the random inputs; None: a fresh one."""
        from triton_dist.testing import RanksFailed

        seed = random.Random(os.urandom(8)).randrange(1 << 20) if seed is None else seed
        try:
            answers = self.ranks(world).run(in_rank, self.address, case, seed, self.limit_s, timeout=4 * self.limit_s)
        except RanksFailed as failure:
            return Result(case, world, "FAILED", reason=str(failure), seed=seed)
        refused = [answer for answer in answers if "stage" in answer]
        if refused:
            return Result(case, world, "refused", stage=refused[0]["stage"], reason=refused[0]["reason"], seed=seed)
        error = max(answer["error"] for answer in answers)
        used = max(answer["used"] for answer in answers)
        wrong = [f"rank {r}: {text}" for r, answer in enumerate(answers) for text in answer["wrong"]]
        kernels = answers[0]["kernels"]
        verdict = "WRONG" if wrong else "exact" if error == 0 else "close"
        if not kernels:
            verdict, wrong = "FAILED", ["no kernel was launched"]
        return Result(case, world, verdict, error, used, kernels, reason="\n".join(wrong), seed=seed)
