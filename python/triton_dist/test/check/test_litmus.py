"""Every litmus program gets its verdict. The whole suite, with 200 seeds and a table: python .../test/check/litmus"""

import os
import sys

import pytest

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "litmus")
sys.path.insert(0, HERE)
try:
    from suite import CASES, run
finally:
    sys.path.remove(HERE)

SEEDS = 3
RARE = "programs/two_locks-crossed", "memory/dekker-fence"  # one schedule in twenty shows it


def test_there_are_as_many_wrong_programs_as_right_ones_within_a_fifth():
    wrong = sum(bool(case.verdict) for case in CASES)
    assert len(CASES) >= 100 and abs(2 * wrong - len(CASES)) <= len(CASES) / 5
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_verdict(case):
    seeds = 100 if case.name in RARE else SEEDS
    verdict = run(case, seeds, keep_going=False)
    assert verdict.outcome in ("passed", "found"), f"{verdict.outcome}: {verdict.kinds}\n{verdict.report}"
