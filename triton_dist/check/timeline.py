"""A timeline of an ordinary run on the cpu platform, for Perfetto (ui.perfetto.dev) or chrome://tracing, and a summary.

    torchrun --nproc-per-node=4 -m triton_dist.check.timeline trace.json script.py its arguments

or, around a part of a rank's own code, on every rank:

    with timeline("trace.json"):
        ...

`check.explore(..., timeline="trace.json")` and `python -m triton_dist.check --timeline trace.json` record a simulated schedule
in the same way; its time is counted in steps, which all ranks take in turn (a microsecond of the trace is a step).

A process is a rank, a thread a program of its grid. Slices: programs, waits, puts and gets (up to the program's next access
to memory), notifies; an arrow leads from a notify to the wait that saw its value. Every rank prints a summary on stderr:
bytes by peer, the signals that it was blocked on for longest, its longest wait. Recording costs a few microseconds an access.
"""

import argparse
import contextlib
import os
import runpy
import sys

from ..interpreter import scheduler
from .recorder import Recorder


@contextlib.contextmanager
def timeline(path):
    """Records this rank's kernels until the block ends, then adds them to the trace at `path` and prints the summary.

    All ranks give the same path. A trace of an earlier run is replaced; blocks one after another in one process are not: give
    each a path of its own.
    """
    if scheduler.observer is not None:
        raise RuntimeError("timeline: this rank is being recorded or checked already")
    if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        raise OSError(f"timeline: {path} cannot be written: give a file in a folder that exists and may be written")
    if os.environ.get("RANK", "0") == "0" and os.path.exists(path):
        os.unlink(path)
    recorder = scheduler.observer = Recorder()
    recorder.rank = int(os.environ.get("RANK", "0"))
    try:
        yield recorder
    finally:
        scheduler.observer = None
        recorder.write(path)
        sys.stderr.write(recorder.summary() + "\n")
        sys.stderr.flush()


def main():
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node=2 -m triton_dist.check.timeline",
        description="Runs a script and writes a timeline of its kernels on all ranks.",
    )
    parser.add_argument("trace", help="the file to write, for Perfetto or chrome://tracing")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
    with timeline(args.trace):
        runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
