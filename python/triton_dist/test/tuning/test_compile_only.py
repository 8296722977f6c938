"""compile_only: launches of this thread become compilations until it ends, however it ends. On a stand-in for a launch."""

import threading

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist.kernels.launch import Launcher
from triton_dist.tuning.compile_only import compile_only

import triton


class Compiled:
    asm = {}

    def __init__(self, events, fits=True):
        self.events, self.fits = events, fits

    def __getitem__(self, grid):
        if not self.fits:
            raise RuntimeError("out of resource: shared memory")
        self.events.append("loaded")
        return lambda *arguments: self.events.append("launched")


@pytest.fixture
def events(monkeypatch):
    """What happens to `kernel`, a JITFunction that was never compiled."""
    seen = []

    def run(self, *args, grid, warmup, **options):
        seen.append("compiled" if warmup else "launched")
        return Compiled(seen, options.get("num_stages", 1) < 9)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    return seen


@pytest.fixture
def kernel(events):
    one = triton.JITFunction.__new__(triton.JITFunction)
    one.fn = None
    return one


def test_kernels_are_compiled_and_loaded_and_not_launched(kernel, events):
    run = triton.JITFunction.run
    with compile_only():
        kernel[(4,)](1, BLOCK=2)
        kernel.run(1, grid=(4,), warmup=True)
    assert events == ["compiled", "loaded", "compiled"] and triton.JITFunction.run is run
    kernel[(4,)](1, BLOCK=2)
    assert events[3:] == ["launched"]


def test_a_kernel_that_the_device_cannot_hold_raises_and_launches_come_back(kernel, events):
    with pytest.raises(RuntimeError, match="shared memory"):
        with compile_only():
            kernel[(1,)](1, num_stages=9)
    kernel[(1,)](1)
    assert events == ["compiled", "launched"]


def test_other_threads_launch(kernel, events):
    with compile_only():
        thread = threading.Thread(target=lambda: kernel[(1,)](1))
        thread.start()
        thread.join()
    assert events == ["launched"]


def test_a_launcher_of_the_operators_remembers_what_was_compiled(kernel, events):
    launch = Launcher(kernel)
    with compile_only():
        launch((1, 1, 1), (3,), dict(BLOCK=2))
    assert "launched" not in events
    events.clear()
    launch((1, 1, 1), (3,), dict(BLOCK=2))
    assert events[-1] == "launched" and "compiled" not in events
