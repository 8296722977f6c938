"""Runs lowering jobs in worker processes of the toolchain's environment, from any environment."""

import contextlib
import json
import os
import queue
import re
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from . import toolchain
from .arguments import encoded
from .cases import Case

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 300  # seconds of one kernel: its compilers have limits of their own


@dataclass
class Result:
    """What became of a case. checks: [(name, passed, reason)], passed None where it does not apply. error: what kept the
    case from being tried at all; usage: because what was asked for is wrong."""

    case: Case
    chip: str
    stage: str = "none"
    log: str = ""
    checks: list = field(default_factory=list)
    emitted: list = field(default_factory=list)
    error: str = ""
    usage: bool = False

    @property
    def failures(self):
        """What is wrong, a line each; empty when the case is right: final HIVM with no check failed, or refused in the
        words that it wants."""
        if self.error:
            return [self.error]
        if self.case.refused is not None:
            if self.stage != "none":
                return ["compiled, though it must be refused"]
            if self.case.refused not in self.log:
                return [f"refused, but not by {self.case.refused!r}: {self.reason}"]
            return []
        if self.stage != "hivm":
            told = [line for line in self.log.splitlines() if line.startswith("hint: ")]
            return [f"ended after stage {self.stage}: {self.reason}", *told]
        return [f"{name}: {reason}" for name, passed, reason in self.checks if passed is False]

    @property
    def reason(self):
        """The line of the log that says most."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip() and not line.startswith("hint: ")]
        raised = [line for line in lines if re.match(r"\w+(Error|Failure|Exception): (?!at \d+:\d+)", line)]
        where = [line for line in lines if re.match(r"/.*\.py:\d+: (?!error:)", line)]  # see hints.kernel_line
        full = [line[line.index("error: ") :] for line in lines if "error: " in line and " overflow, requires " in line]
        told = [line for line in lines if "error:" in line or "Assertion" in line]
        ended = [line for line in lines if " ended with " in line or " had not ended " in line]
        best = (raised[-1:] or full or told or ended or lines[-1:] or ["no message"])[0][:300]
        return f"{best}, at {where[-1][:200]}" if raised and where else best


class _Worker:
    """One worker process, started when it is first needed and again after it died."""

    def __init__(self, interpreter):
        self.interpreter, self.process = interpreter, None

    def start(self):
        unset = ("TRITON_INTERPRET", "TRITON_DEBUG", "PYTHONHOME")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        environment.update(TRITON_DIST_BACKEND="ascend", PYTHONPATH=str(ROOT))
        try:
            self.process = subprocess.Popen(
                [self.interpreter, "-m", "third_party.ascend.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
            )  # fmt: skip
        except OSError as error:
            raise toolchain.ToolchainError(f"the toolchain's interpreter does not start: {error}") from error

    def answer(self, job):
        if self.process is None:
            self.start()
        limit = threading.Timer(TIME_LIMIT, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        self.close()
        return {"error": f"the lowering process died or took more than {TIME_LIMIT} s; its last words are above"}

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            with contextlib.suppress(BrokenPipeError):  # what it had not read is flushed
                self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


def run(cases, chip="Ascend910B2", options=None, emit=None, processes=None):
    """Lowers and checks cases for a chip: a list of Result, in their order.

    Args:
        cases: of `Case`; a signature may also be a list of types, of the parameters that are no constants, in order.
        chip: one of `chips.CHIPS`, or `chips.SIMT_CHIP`.
        options: of triton-ascend's backend, by name.
        emit: folder for the IR of every stage, or None.
        processes: how many at a time; None: one a core.

    Errors: `toolchain.ToolchainError`; ValueError for less than one process; TypeError for a constant that `arguments.encoded`
    does not take. What goes wrong with a single case is in its Result.
    """
    cases = list(cases)
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}: give 1 or more")
    constants = [{name: encoded(value) for name, value in case.constants.items()} for case in cases]
    interpreter = toolchain.python()
    todo, results, broken = queue.SimpleQueue(), [None] * len(cases), []
    for item in enumerate(cases):
        todo.put(item)

    def work():
        worker = _Worker(interpreter)
        try:
            while True:
                try:
                    i, case = todo.get_nowait()
                except queue.Empty:
                    return
                path, _, kernel = case.source.rpartition(":")
                job = dict(
                    source=f"{ROOT / path}:{kernel}", signature=case.signature, constants=constants[i], chip=chip,
                    options=options or {}, emit=emit and str(Path(emit).absolute()), name=case.name,
                )  # fmt: skip
                results[i] = Result(case, chip, **worker.answer(job))
        except BaseException as error:  # raised below: a thread's own traceback would say nothing to the caller
            broken.append(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(processes or os.cpu_count() or 1, len(cases)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    return results
