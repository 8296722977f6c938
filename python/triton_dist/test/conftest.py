"""What all tests share: `triton_dist` before `triton`, and ranks to run a function on."""

import triton_dist  # isort: skip  # first: it decides whether triton interprets

from pathlib import Path

import pytest

from triton_dist import backends
from triton_dist.testing import shared_ranks

HERE = Path(__file__).parent
# The interpreter, the checker, and the host API as the cpu platform has it, with memory that the host reads
OF_CPU = ["check", "interpreter", "shmem/test_shmem_one_rank.py", "shmem/test_shmem_two_ranks.py", "shmem/test_teams.py"]


class SkippedModule(pytest.Module):
    """A file that is not imported: what it imports may refuse this platform."""

    def collect(self):
        reason = f"{self.path.name} tests the cpu platform, this is {triton_dist.backend}: TRITON_DIST_BACKEND=cpu runs it"
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if triton_dist.backend != "cpu" and any(module_path.is_relative_to(HERE / name) for name in OF_CPU):
        return SkippedModule.from_parent(parent, path=module_path)


def pytest_addoption(parser):
    parser.addoption(
        "--delayed-calls", type=int, metavar="N", help="calls in a row of each test with ranks delayed at random, e.g. 1000"
    )


@pytest.fixture(scope="session")
def many(pytestconfig):
    """`many(calls)`: how many calls a test with delayed ranks makes: `calls`, or what --delayed-calls says."""
    return lambda calls: pytestconfig.getoption("--delayed-calls") or calls


@pytest.fixture(scope="session")
def need_devices():
    """`need_devices(world)` skips where the platform has fewer devices than that many ranks need."""

    def need(world):
        devices = backends.platform().device_count()
        if devices is not None and devices < world:
            pytest.skip(f"needs {world} ranks, a device each; the platform {triton_dist.backend} has {devices} here")

    return need


@pytest.fixture(scope="session")
def two_devices(need_devices):
    """For tests that start two ranks by themselves."""
    need_devices(2)


@pytest.fixture(scope="session")
def ranks(need_devices):
    """`ranks(world)`: the shared `Ranks` of that size; skips where the platform has fewer devices than ranks."""

    def of(world):
        need_devices(world)
        return shared_ranks(world)

    return of
