"""What all tests share: `triton_dist` before `triton`, and ranks to run a function on."""

import triton_dist  # isort: skip  # first: it decides whether triton interprets

import pytest

from triton_dist import backends
from triton_dist.testing import shared_ranks


def pytest_addoption(parser):
    parser.addoption(
        "--delayed-calls", type=int, metavar="N", help="calls in a row of each test with ranks delayed at random, e.g. 1000"
    )


@pytest.fixture(scope="session")
def many(pytestconfig):
    """`many(calls)`: how many calls a test with delayed ranks makes: `calls`, or what --delayed-calls says."""
    return lambda calls: pytestconfig.getoption("--delayed-calls") or calls


@pytest.fixture(scope="session")
def ranks():
    """`ranks(world)`: the shared `Ranks` of that size; skips where the platform has fewer devices than ranks."""

    def of(world):
        devices = backends.platform().device_count()
        if devices is not None and devices < world:
            pytest.skip(f"needs {world} ranks, a device each; the platform {triton_dist.backend} has {devices} here")
        return shared_ranks(world)

    return of
