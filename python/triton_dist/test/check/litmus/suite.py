"""All litmus programs, and how one is judged."""

from dataclasses import dataclass

import barriers  # noqa: F401
import custom_ops  # noqa: F401
import exchange  # noqa: F401
import host  # noqa: F401
import memory  # noqa: F401
import programs  # noqa: F401
import relaxed  # noqa: F401
import rounds  # noqa: F401
import users  # noqa: F401
from registry import CASES

from triton_dist import check

__all__ = ["CASES", "ORDERS", "run"]

ORDERS = {"missing-release", "missing-acquire", "narrow-scope"}  # verdicts of programs that lack an order of memory alone


@dataclass
class Verdict:
    """`flagged` of `schedules` showed something, of these `kinds`. `outcome` is "passed", "found", "missed", "false alarm" or
    "wrong kind"."""

    outcome: str
    kinds: list
    flagged: int
    schedules: int
    report: check.Report


def run(case, seeds, keep_going=True, **options):
    options = {**case.options, **options}
    report = check.explore(case.program, *case.args, schedules=seeds + 1, keep_going=keep_going, **options)
    kinds = report.kinds
    if not case.verdict:
        outcome = "false alarm" if kinds else "passed"
    elif not kinds:
        outcome = "missed"
    else:
        outcome = "found" if set(kinds) & set(case.verdict) else "wrong kind"
    return Verdict(outcome, kinds, report.flagged, report.schedules, report)
