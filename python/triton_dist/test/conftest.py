"""What all tests share: `triton_dist` before `triton`, and ranks to run a function on."""

import triton_dist  # isort: skip  # first: it decides whether triton interprets

import pytest

from triton_dist import backends
from triton_dist.testing import shared_ranks


@pytest.fixture(scope="session")
def ranks():
    """`ranks(world)`: the shared `Ranks` of that size; skips where the platform has fewer devices than ranks."""

    def of(world):
        devices = backends.platform().device_count()
        if devices is not None and devices < world:
            pytest.skip(f"needs {world} ranks, a device each; the platform {triton_dist.backend} has {devices} here")
        return shared_ranks(world)

    return of
