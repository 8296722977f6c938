"""compile_only: launches of this thread become compilations until it ends, however it ends. On stand-ins for a launch and for
the CUDA driver's operations on words."""

import ctypes
import threading
from types import SimpleNamespace

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist.backends import nvidia, nvidia_signal, nvidia_stream
from triton_dist.kernels.launch import Launcher
from triton_dist.tuning.compile_only import compile_only

import torch
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


@pytest.fixture
def driver(monkeypatch):
    """A driver that does at once what streams are given; a wait in vain is an error."""

    def give(stream, count, operations, flags):
        for one in operations:
            word = ctypes.c_int32.from_address(one.address)
            if one.operation == nvidia_stream.WRITE:
                word.value = one.value
            elif word.value < one.value:
                raise AssertionError("the stream waits for ever")
        return 0

    monkeypatch.setattr(nvidia_stream, "_driver", lambda: give)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("polls", [True, False])
def test_words_of_handoffs_stay_as_they_were(kernel, driver, monkeypatch, polls):
    """As in a call of the method streams: a word that was published while kernels are not launched would never be taken back,
    and the next call would take it for its own."""

    def run(self, *args, grid, warmup, **options):
        if not warmup:
            word = ctypes.c_int32.from_address(args[0])
            if self is nvidia_signal.tell:
                word.value = 1
                return
            assert word.value == 1, "the program waits for ever"
            word.value = 0

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(nvidia_signal, "take", kernel)
    monkeypatch.setattr(nvidia_signal, "tell", triton.JITFunction.__new__(triton.JITFunction))
    heap = nvidia.Heap.__new__(nvidia.Heap)
    heap.waits, heap.device = None, "cuda"
    words = torch.tensor([0, 1], dtype=torch.int32)  # full, free
    full, free = words.data_ptr(), words.data_ptr() + 4
    claim, release = heap.word_taker(None, free), heap.word_setter(free)
    publish = (heap.word_teller if polls else heap.word_setter)(full)
    receive = (heap.word_poller if polls else heap.word_taker)(None, full)
    with compile_only():
        receive()  # of a peer that published nothing: nobody waits
        for step in (claim, publish, receive, release):
            step()
        assert words.tolist() == [0, 1]
    claim()
    assert words.tolist() == [0, 0]
    publish()
    assert words.tolist() == [1, 0]
    receive()
    release()
    assert words.tolist() == [0, 1]


def test_other_threads_set_words(driver):
    word = torch.zeros(1, dtype=torch.int32)
    operations = nvidia_stream.batch((nvidia_stream.WRITE, word.data_ptr(), 1))
    with compile_only():
        thread = threading.Thread(target=lambda: nvidia_stream.give(0, operations))
        thread.start()
        thread.join()
        assert word.item() == 1
