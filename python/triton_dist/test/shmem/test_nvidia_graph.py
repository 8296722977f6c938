"""Recording CUDA graphs, on stand-ins for torch's."""

import contextlib
import gc

import pytest
import torch

from triton_dist.backends import nvidia_graph
from triton_dist.tuning import timing


class Graph:
    """A CUDA graph, and what captures one as torch.cuda.graph does."""

    def __init__(self, *arguments, **options):
        self.replay = self.capture_end = lambda: None

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"  # other threads allocate, and read signals, meanwhile

    def __enter__(self):
        pass

    def __exit__(self, *exc):
        pass


@pytest.mark.parametrize("recorder", ["operators", "timing"])
@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_work_is_recorded(monkeypatch, recorder, collects):
    """It may hold memory that the driver does not take back then."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    if recorder == "operators":
        one = nvidia_graph.Recorder.__new__(nvidia_graph.Recorder)
        one.queue, one.pool = contextlib.nullcontext(), None
        record = one.record
    else:

        def record(call):
            return timing.graphed(call, 1)

    seen = []

    def fails():
        seen.append(gc.isenabled())
        raise RuntimeError("cannot be recorded")

    collected = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert callable(record(lambda: seen.append(gc.isenabled()))) and gc.isenabled() == collects
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            record(fails)
        assert gc.isenabled() == collects and seen == [False, False]
    finally:
        (gc.enable if collected else gc.disable)()
