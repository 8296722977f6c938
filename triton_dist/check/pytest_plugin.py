"""For pytest: a fixture that explores, a decorator for whole tests, and --triton-dist-seed to replay a failure.

    # conftest.py
    pytest_plugins = ["triton_dist.check.pytest_plugin"]

    # a test file
    def test_exchange(explore):
        explore(exchange, 64, world_size=3)          # fails with the report when something is found

    @explored(world_size=4)
    def test_ring():                                 # runs on every rank, under many schedules
        ...

    pytest test_file.py::test_exchange --triton-dist-seed 17
"""

import functools

import pytest

from . import explore as _explore

SCHEDULES = 20


def pytest_addoption(parser):
    group = parser.getgroup("triton_dist")
    group.addoption("--triton-dist-seed", default=None, help="the checker runs this schedule alone: the seed in a report")
    group.addoption(
        "--triton-dist-schedules", type=int, default=SCHEDULES, help=f"schedules of each check (default {SCHEDULES})"
    )
    group.addoption("--triton-dist-weak", action="store_true", help="weak memory in every seeded schedule of the checker")


def pytest_configure(config):
    config.addinivalue_line("markers", "check: runs under the checker, in one process")
    _options.update(
        seed=config.getoption("--triton-dist-seed"),
        schedules=config.getoption("--triton-dist-schedules"),
        weak=True if config.getoption("--triton-dist-weak") else None,
    )


_options = {"seed": None, "schedules": SCHEDULES, "weak": None}


def _checked(program, *args, **options):
    options = {**_options, **options}
    if options.get("exhaustive") and options["weak"] is _options["weak"]:
        options["weak"] = None  # --triton-dist-weak is for the tests that go by seeds
    report = _explore(program, *args, **options)
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return report


@pytest.fixture
def explore():
    """`explore(program, *args, **options)` as check.explore; fails the test with the report when something is found, and
    returns the Report otherwise. Schedules and seed come from the command line unless they are given."""
    return _checked


def explored(test=None, /, **options):
    """Decorates a test, which may have parameters and fixtures, of which all ranks get the same: its body is the program of
    every rank. `options` are those of check.explore; without any, `@explored` alone will do."""
    if test is None:
        return functools.partial(explored, **options)

    @functools.wraps(test)
    def checked(*args, **kwargs):
        _checked(functools.wraps(test)(lambda: test(*args, **kwargs)), **options)

    return pytest.mark.check(checked)
