"""What all tests share: `triton_dist` before `triton`, and ranks to run a function on."""

import triton_dist  # isort: skip  # first: it decides whether triton interprets

from pathlib import Path

import pytest

from triton_dist import backends
from triton_dist.testing import shared_ranks

HERE = Path(__file__).parent
# The interpreter, the checker, and the host API as the cpu platform has it: its memory that the host reads, its segments, its
# ranks that need no devices.
OF_CPU = [
    "check",
    "interpreter",
    *(f"shmem/test_{name}.py" for name in ("lost_ranks", "ranks", "rendezvous", "shmem_one_rank", "shmem_two_ranks", "teams")),
]


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
def ranks():
    """`ranks(world)`: the shared `Ranks` of that size; skips where the platform has fewer devices than ranks."""

    def of(world):
        devices = backends.platform().device_count()
        if devices is not None and devices < world:
            pytest.skip(f"needs {world} ranks, a device each; the platform {triton_dist.backend} has {devices} here")
        return shared_ranks(world)

    return of
