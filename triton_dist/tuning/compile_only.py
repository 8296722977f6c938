"""Compiling a call's kernels without launching them.

A rank whose kernel cannot be compiled or loaded (too much shared memory, say) while its peers launch theirs would leave them
waiting in a kernel, which nothing ends on a device. So all ranks compile first and agree before anybody launches.
"""

import contextlib
import threading

import triton

import triton_dist


@contextlib.contextmanager
def compile_only():
    """Within it, Triton kernels that this thread calls are compiled and loaded, and not launched; all else is as ever."""
    thread, launch = threading.get_ident(), triton.JITFunction.run

    def run(self, *args, grid, warmup, **options):
        if warmup or threading.get_ident() != thread:
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        if compiled is not None:
            compiled[(1, 1, 1)]  # loads it, which finds out whether the device can hold it
        return compiled

    triton.JITFunction.run = run
    try:
        yield
    finally:
        triton.JITFunction.run = launch


def compiles():
    """Whether kernels are compiled at all: an interpreter has nothing to do before a launch."""
    return triton_dist.backend != "cpu"
