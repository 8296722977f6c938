"""Runs the litmus suite: python python/triton_dist/test/check/litmus [--seeds 200] [--only TEXT] [--weak | --results] [-v]

Each program runs under the first-in first-out schedule and the given number of seeds. A program that is right must show
nothing in any of them; a wrong one must be reported, and with a kind that its verdict names. --results instead turns the
reports of missing orders off and counts the programs that give a wrong result, with weak memory and without."""

import argparse
import collections
import itertools
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from suite import CASES, run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", default="", help="only programs whose name has this in it")
    parser.add_argument("--weak", action="store_true", help="weak memory in every seeded schedule (default: in every fourth)")
    parser.add_argument("--results", action="store_true", help="wrong results with weak memory and without, by kind of fault")
    parser.add_argument("-v", action="store_true", help="print every program's reports")
    args = parser.parse_args()
    chosen = sorted((case for case in CASES if args.only in case.name), key=lambda case: case.group)
    if args.results:
        return results(chosen, args.seeds)
    total, failed = collections.Counter(), False
    print("| group | right | false alarms | wrong | found | missed | wrong kind | schedules | flagged of faulty | s |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for group, some in itertools.groupby(chosen, key=lambda case: case.group):
        row = collections.Counter()
        for case in some:
            began = time.perf_counter()
            verdict = run(case, args.seeds, weak=args.weak or None)
            row["seconds"] += time.perf_counter() - began
            row["schedules"] += verdict.schedules
            row["faulty" if case.verdict else "right"] += 1
            row[verdict.outcome] += 1
            row["flagged"] += verdict.flagged if case.verdict else 0
            row["faulty schedules"] += verdict.schedules if case.verdict else 0
            bad = verdict.outcome not in ("passed", "found")
            failed |= bad
            if args.v or bad:
                shown = f"{case.name}: {verdict.outcome}, flagged {verdict.flagged} of {verdict.schedules}: {verdict.kinds}"
                print(f"{shown}\n{verdict.report}", file=sys.stderr, flush=True)
        show(group, row)
        total.update(row)
    show("all", total)
    found, false = total["found"] + total["wrong kind"], total["false alarm"]
    print(f"precision {found / max(found + false, 1):.3f}, recall {found / max(total['faulty'], 1):.3f}")
    sys.exit(1 if failed else 0)


def results(chosen, seeds):
    """How many programs, by their verdicts, give a wrong result (or fail, or hang) within so many seeds."""
    print("| verdict | programs | wrong results, weak memory | of its schedules | ordinary memory | of its schedules | s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    kinds = collections.defaultdict(list)
    for case in chosen:
        kinds[case.verdict[0] if case.verdict else "right"].append(case)
    for kind in sorted(kinds):
        began, row = time.perf_counter(), []
        for weak in (True, False):
            verdicts = [run(case, seeds, weak=weak, races=False) for case in kinds[kind]]
            share = sum(one.flagged for one in verdicts) / sum(one.schedules for one in verdicts)
            row += [f"{sum(bool(one.kinds) for one in verdicts)}", f"{share:.0%}"]
        print(f"| {kind} | {len(kinds[kind])} | {' | '.join(row)} | {time.perf_counter() - began:.1f} |", flush=True)


def show(group, row):
    share = row["flagged"] / max(row["faulty schedules"], 1)
    print(
        f"| {group} | {row['right']} | {row['false alarm']} | {row['faulty']} | {row['found']} | {row['missed']} "
        f"| {row['wrong kind']} | {row['schedules']} | {share:.1%} | {row['seconds']:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
