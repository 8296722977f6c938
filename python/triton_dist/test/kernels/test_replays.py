"""When a context makes a call, records it, and replays it. Recording itself needs a device: see test_cuda_graphs.py."""

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist.kernels import replays
from triton_dist.kernels.replays import Replays


class Recorder:
    """Records calls of Python."""

    def __init__(self):
        self.recorded, self.is_nested, self.fails = [], False, False

    def nested(self):
        return self.is_nested

    def record(self, give):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded.append(give)
        return lambda: done.append(("replay", self.recorded.index(give)))


done = []


@pytest.fixture
def recorder(monkeypatch):
    done.clear()
    one = Recorder()
    monkeypatch.setattr(replays.shmem, "recorder", lambda: one)
    return one


def call(*tensors):
    done.append(("call", *tensors))


def test_operands_that_come_again_are_recorded_once_and_replayed(recorder):
    run = Replays(call)
    for _ in range(4):
        run([1, 2], "a")
        run([3, 4], "b")
    assert done == [("call", "a"), ("call", "b"), *[("replay", 0), ("replay", 1)] * 3]


def test_what_cannot_be_recognised_or_is_being_recorded_is_called(recorder):
    run = Replays(call)
    for _ in range(3):
        run(None, "a")
    recorder.is_nested = True
    for _ in range(3):
        run([1], "a")
    assert done == [("call", "a")] * 6 and not recorder.recorded


def test_only_the_operands_used_last_are_remembered(recorder, monkeypatch):
    monkeypatch.setattr(replays, "MOST", 2)
    run = Replays(call)
    for operands in ([1], [1], [2], [1], [3], [1], [2], [3]):
        run(operands, *operands)
    expected = [("call", 1), ("replay", 0), ("call", 2), ("replay", 0), ("call", 3), ("replay", 0), ("call", 2), ("call", 3)]
    assert done == expected and len(run.replays) == 2


def test_where_recording_fails_calls_go_on(recorder):
    run = Replays(call)
    run([1], "a")
    recorder.fails = True
    with pytest.warns(UserWarning, match="could not be recorded and will not be replayed: operation not permitted"):
        run([1], "a")
    run([1], "a")
    assert done == [("call", "a")] * 3


def test_replaying_can_be_turned_off(recorder, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_REPLAY", "0")
    run = Replays(call)
    for _ in range(3):
        run([1], "a")
    assert done == [("call", "a")] * 3
