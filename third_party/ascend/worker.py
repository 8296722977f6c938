"""Lowers and checks job after job, in the toolchain's environment: one JSON line in on stdin, one out on stdout.

A job: {"source": "path:kernel", "signature": {parameter: type} or [type, ...], "constants": {}, "chip": "", "options": {},
"emit": folder or null, "name": ""}. The answer: {"stage", "log", "checks": [[name, passed, reason]], "emitted": [path]}, or
{"error": what went wrong, "usage": true where the job itself is wrong}. Constants are as `arguments.encoded` makes them.
"""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_DIST_BACKEND"] = "ascend"

import triton.language as tl
from triton.runtime.jit import JITFunction

from third_party.ascend import sources
from third_party.ascend.arguments import decoded, unknown_type
from third_party.ascend.checks import run_checks
from third_party.ascend.chips import SIMT_CHIP
from third_party.ascend.lowering import STAGES, known_options, lower


class WrongJob(ValueError):
    """The job does not fit the kernel; the text says how."""


def kernel_of(source):
    """The kernel that "path:kernel" names."""
    path, _, name = source.rpartition(":")
    if not Path(path).is_file():
        raise WrongJob(f"there is no file {path!r}: give path.py:kernel")
    module = sources.load(path, name)
    kernel = sources.unwrapped(getattr(module, name, None))
    if not isinstance(kernel, JITFunction):
        known = [n for n, value in vars(module).items() if isinstance(sources.unwrapped(value), JITFunction)]
        raise WrongJob(f"{path} has no triton.jit function {name!r}; it has {', '.join(known) or 'none'}")
    return kernel


def options_of(options):
    """The options, or WrongJob: the compiler's backend drops a name that it does not know."""
    if unknown := sorted(set(options) - set(known_options())):
        raise WrongJob(f"triton-ascend has no option {', '.join(unknown)}; it has {', '.join(known_options())}")
    return options


def fit(kernel, signature, constants):
    """(signature by name, in the kernel's order; constants with defaults), or WrongJob."""
    try:
        constants = {name: decoded(value, tl) for name, value in constants.items()}
    except ValueError as error:
        raise WrongJob(str(error)) from None
    for kind in signature.values() if isinstance(signature, dict) else signature:
        if wrong := unknown_type(kind):
            raise WrongJob(wrong)
    names = kernel.arg_names
    defaults = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    constants = {**{n: getattr(v, "value", v) for n, v in defaults.items()}, **constants}
    if isinstance(signature, list):
        free = [n for n in names if n not in constants]
        if len(signature) != len(free):
            raise WrongJob(
                f"{kernel.__name__} takes {', '.join(free)}: {len(free)} types are needed, {len(signature)} were given. "
                "Name constants with --constexpr"
            )
        signature = dict(zip(free, signature))
    unknown = [n for n in (*signature, *constants) if n not in names]
    missing = [n for n in names if n not in signature and n not in constants]
    if unknown or missing:
        wrong = [f"has no parameter {', '.join(unknown)}"] if unknown else []
        wrong += [f"needs a type (or a constant) for {', '.join(missing)}"] if missing else []
        raise WrongJob(f"{kernel.__name__} {' and '.join(wrong)}; its parameters are {', '.join(names)}")
    typeless = [p.name for p in kernel.params if p.is_constexpr and p.name not in constants]
    if typeless:
        raise WrongJob(f"{kernel.__name__}: {', '.join(typeless)} are constexpr: give values with --constexpr")
    return {n: signature[n] for n in names if n in signature and n not in constants}, constants


def write(lowered, folder, label):
    """The IR of every stage reached, one file each."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{label}.{lowered.chip}")
    paths = []
    for stage in STAGES[1:]:
        if text := getattr(lowered, stage):
            path = Path(folder, f"{stem}.{stage}.mlir")
            path.write_text(text)
            paths.append(str(path))
    return paths


def work(job):
    kernel = kernel_of(job["source"])
    signature, constants = fit(kernel, job["signature"], job["constants"])
    lowered = lower(kernel, signature, constants, job["chip"], options_of(job["options"]))
    checks = []
    if lowered.stage == "hivm" and job["chip"] != SIMT_CHIP:  # whose final module is of another kind
        checks = [(check.name, check.passed, check.reason) for check in run_checks(lowered)]
    emitted = write(lowered, job["emit"], job["name"]) if job["emit"] else []
    lowered = replace(lowered, log=lowered.log[-20000:])
    return {"stage": lowered.stage, "log": lowered.log, "checks": checks, "emitted": emitted}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a source prints goes elsewhere
    for line in sys.stdin:
        try:
            answer = work(json.loads(line))
        except (WrongJob, sources.HostCodeError) as error:
            answer = {"error": str(error), "usage": True}
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
