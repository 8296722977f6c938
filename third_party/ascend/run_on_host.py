"""Runs what triton-ascend made of this library's kernels on the host's CPU, with several ranks, and compares with the reference.

    python -m third_party.ascend.run_on_host --all                  every word of the language, every operator
    python -m third_party.ascend.run_on_host all_gather dl.wait     these cases
    python -m third_party.ascend.run_on_host --list
"""

import argparse
import sys
import time


def main():
    parser = argparse.ArgumentParser(prog="python -m third_party.ascend.run_on_host", description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", help="names of cases, see --list")
    parser.add_argument("--all", action="store_true", help="all cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, default 2,4")
    parser.add_argument("--seed", type=int, help="of the random inputs; default: a fresh one for each run")
    parser.add_argument("--verbose", action="store_true", help="the whole of every reason")
    options = parser.parse_args()

    import triton_dist  # noqa: F401  before triton

    from .host_execution.cases import CASES
    from .host_execution.run import Execution

    if options.list:
        print("\n".join(CASES))
        return 0
    chosen = list(CASES) if options.all else options.cases
    unknown = [name for name in chosen if name not in CASES]
    if unknown or not chosen:
        parser.error(f"no case {', '.join(unknown)}; see --list" if unknown else "name cases, or give --all")
    bad, begin = 0, time.monotonic()
    print(f"{'case':46s} {'ranks':>5s}  {'result':8s} {'error':>9s} {'of bound':>9s}")
    with Execution() as execution:
        for name in chosen:
            for world in (int(n) for n in options.ranks.split(",")):
                result = execution.run(name, world, options.seed)
                numbers = "" if result.error is None else f"{result.error:9.2g} {result.used:9.2g}"
                reason = result.reason if options.verbose else result.reason[:300]
                more = f"  {result.stage} {reason}  (seed {result.seed})" if result.reason else ""
                print(f"{name:46s} {world:5d}  {result.verdict:8s} {numbers}{more}", flush=True)
                bad += result.verdict in ("WRONG", "FAILED")
    print(f"{len(chosen)} cases, {bad} wrong or failed, {time.monotonic() - begin:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
