"""Records what is given to streams as a CUDA graph."""

import contextlib
import gc

import torch

from .nvidia_queue import Queue


@contextlib.contextmanager
def uncollected():
    """No garbage is collected meanwhile: what is in it may be memory of an earlier heap, which the driver does not take back
    while work is recorded, and torch ends the process then."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Recorder:
    """A heap's `recorder()`, see backends.

    It records on a stream of its own, and its graphs share a memory pool of their own: so the workspace that a library's
    product is recorded with belongs to these graphs alone, whatever else runs at the same time or gives workspaces back.
    """

    def __init__(self, queues):
        self.queue, self.pool = Queue(queues, urgent=False), torch.cuda.graph_pool_handle()

    def nested(self):
        return torch.cuda.is_current_stream_capturing()

    def record(self, give):
        graph = torch.cuda.CUDAGraph()
        with uncollected(), self.queue:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                give()
            finally:
                graph.capture_end()
        return graph.replay
