"""Times of calls on this rank: by the device's events where there is a device, by the host's clock on cpu."""

import time

import torch

import triton_dist
from triton_dist.backends.nvidia_graph import uncollected
from triton_dist.errors import WaitTimeoutError
from triton_dist.limits import wait_timeout


def mark():
    """A point in the order of the current stream."""
    if triton_dist.backend == "cpu":
        return time.perf_counter() * 1e6
    event = torch.get_device_module().Event(enable_timing=True)
    event.record()
    return event


def span(first, last):
    """Microseconds between two marks that were passed."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) * 1e3


def finish(what):
    """Waits for the current stream, at most TRITON_DIST_WAIT_TIMEOUT seconds: WaitTimeoutError then names `what`."""
    if triton_dist.backend == "cpu":
        return
    here, limit, start = mark(), wait_timeout(), time.monotonic()
    while not here.query():
        if time.monotonic() - start > limit:
            raise WaitTimeoutError(
                f"{what} did not end within {limit:g} s (TRITON_DIST_WAIT_TIMEOUT sets the limit). Its kernel waits for a "
                "peer, or its grid is larger than what the device runs at a time. A device cannot give it up: end the process"
            )
        time.sleep(0 if time.monotonic() - start < 1e-3 else 1e-4)


def repeated(call, calls):
    def run():
        for _ in range(calls):
            call()

    return run


def graphed(call, calls):
    """A function that replays a CUDA graph of `calls` calls in a row, which leaves the host's time out."""
    graph = torch.cuda.CUDAGraph()
    with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        repeated(call, calls)()
    return graph.replay
