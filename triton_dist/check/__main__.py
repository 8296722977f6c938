"""The command: python -m triton_dist.check script.py [its arguments] --world-size 4 --schedules 200

The script is what torchrun would start. The checker's own options may stand before or after it; `--` ends them. Exit code 0:
nothing found, 1: something was, 2: it could not run."""

import argparse
import sys

import triton_dist  # noqa: F401  before triton

from . import explore
from .scripts import script


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m triton_dist.check",
        allow_abbrev=False,  # the script may have options of its own that begin alike
        description="Runs a script's ranks in one process under many schedules; reports races, missing orders, deadlocks.",
    )
    parser.add_argument("script", help="a script as torchrun would start it; other arguments are passed on to it")
    parser.add_argument("--world-size", type=int, default=2, help="ranks, 1 to 64 (default 2)")
    parser.add_argument("--schedules", type=int, default=200, help="the first is first-in first-out (default 200)")
    parser.add_argument("--triton-dist-seed", help="run one schedule alone, by a report's seed: 17, fifo, weak:3, path:0.1")
    parser.add_argument(
        "--exhaustive", action="store_true", help="every order of signals that can make a difference, at most --schedules runs"
    )
    parser.add_argument("--resident", type=int, help="programs of a grid that run at a time (default all)")
    parser.add_argument("--seconds", type=float, help="for all schedules together; the last one is given up")
    parser.add_argument(
        "--stall-seconds", type=float, default=60, help="without any access, launch or wait: endless (default 60)"
    )
    parser.add_argument("--timeline", metavar="FILE", help="write a trace of the schedule with the first fault, else the first")
    parser.add_argument("--keep-going", action="store_true", help="go on after the first schedule that shows a fault")
    weak = parser.add_mutually_exclusive_group()
    weak.add_argument("--weak", action="store_true", help="weak memory in every seeded schedule (default: in every fourth)")
    weak.add_argument("--no-weak", action="store_true", help="in none")
    parser.add_argument("--no-races", action="store_true", help="report wrong results and hangs alone, not missing orders")
    args, rest = parser.parse_known_args(argv)
    if rest and rest[0] == "--":
        rest = rest[1:]
    try:
        program = script(args.script, rest)
    except (OSError, SyntaxError) as error:
        parser.error(f"cannot read {args.script}: {error}")
    try:
        report = explore(
            program, world_size=args.world_size, schedules=args.schedules, seed=args.triton_dist_seed, init=False,
            exhaustive=args.exhaustive, resident=args.resident, keep_going=args.keep_going, seconds=args.seconds,
            stall_seconds=args.stall_seconds, timeline=args.timeline,
            weak=True if args.weak else False if args.no_weak else None, races=not args.no_races,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
