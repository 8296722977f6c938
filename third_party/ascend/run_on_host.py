"""Runs what triton-ascend makes of kernels on this machine's CPU, with several ranks.

    python -m third_party.ascend.run_on_host --all                  every word of the language and operator, against references
    python -m third_party.ascend.run_on_host all_gather dl.wait     these cases; --list names them
    python -m third_party.ascend.run_on_host --script my.py -- --its-own options     a script that torchrun could start

Exit status: 0 all is as it should be, 1 it is not, 2 wrong arguments, 3 the toolchain or a C compiler is missing.
The last form runs the script as __main__ in every rank. Its kernels are defined at the top level, before it does anything.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from .host_execution.compiler import CompilerError
from .toolchain import ToolchainError


def main(arguments=None):
    head, _, more = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m third_party.ascend.run_on_host",
        description=head,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", help="names of cases; with --script the script's arguments")
    parser.add_argument("--all", action="store_true", help="all cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--script", metavar="FILE", help="run this script instead of cases")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, default 2,4")
    parser.add_argument("--seed", type=int, help="of the random inputs; default: a fresh one for each run")
    parser.add_argument("--limit", type=float, default=30, help="seconds after which a launch gives up, default 30")
    parser.add_argument("--verbose", action="store_true", help="the whole of every reason")
    options = parser.parse_args(arguments)
    try:
        worlds = [int(n) for n in options.ranks.split(",")]
        if min(worlds) < 1:
            raise ValueError
    except ValueError:
        parser.error(f"--ranks is {options.ranks!r}: give numbers of ranks, such as 2,4")

    if options.script and not Path(options.script).is_file():
        parser.error(f"--script: there is no file {options.script!r}")

    import triton_dist  # noqa: F401  before triton

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as Ctrl-C: everything is cleaned up
    try:
        return run_script(options, worlds) if options.script else select_cases(parser, options, worlds)
    except (CompilerError, ToolchainError) as error:
        print(error, file=sys.stderr)
        return 3
    finally:
        signal.signal(signal.SIGTERM, before)


def select_cases(parser, options, worlds):
    from .host_execution.cases import CASES

    if options.list:
        print("\n".join(CASES))
        return 0
    chosen = list(CASES) if options.all else options.cases
    unknown = [name for name in chosen if name not in CASES]
    if unknown or not chosen:
        parser.error(f"no case {', '.join(unknown)}; see --list" if unknown else "name cases, or give --all or --script")
    return run_cases(options, chosen, worlds)


def run_cases(options, chosen, worlds):
    from .host_execution.run import problem, run_all

    bad, counts, begin = 0, {}, time.monotonic()
    print(f"{'case':46s} {'ranks':>5s}  {'result':8s} {'error':>9s} {'of bound':>9s}")
    for result in run_all(chosen, worlds, options.seed, options.limit):
        numbers = "" if result.error is None else f"{result.error:9.2g} {result.used:9.2g}"
        wrong = problem(result)
        text = result.reason if options.verbose else result.summary()
        more = f"  {result.stage}: {text}" if result.stage else f"  {text}" if text else ""
        print(f"{result.case:46s} {result.world:5d}  {result.verdict:8s} {numbers}{more}", flush=True)
        if wrong:
            print(f"    {wrong} (seed {result.seed})", flush=True)
        bad += wrong is not None
        counts[result.verdict] = counts.get(result.verdict, 0) + 1
    summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    print(f"{sum(counts.values())} runs: {summary}; {bad} not as they should be; {time.monotonic() - begin:.0f} s")
    return 1 if bad else 0


def run_script(options, worlds):
    from triton_dist.testing import RanksFailed

    from .host_execution import script

    for world in worlds:
        try:
            ran, outputs = script.run(options.script, options.cases, world, options.limit, timeout=60 * options.limit)
        except RanksFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        for rank, output in enumerate(outputs):
            print("".join(f"rank {rank}: {line}\n" for line in output.splitlines()), end="")
        launches = ", ".join(f"{name} x {n}" for name, n in ran.items()) or "no kernel"
        print(f"{world} ranks: ran as lowered code on rank 0: {launches}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
