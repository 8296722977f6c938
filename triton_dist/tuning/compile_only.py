"""Compiling a call's kernels without launching them.

A rank whose kernel cannot be compiled or loaded (too much shared memory, say) while its peers launch theirs would leave them
waiting in a kernel, which nothing ends on a device. So all ranks compile first and agree before anybody launches.

Words that ranks set and take back in the order of streams (shmem.Handoffs) are left alone meanwhile, too. Some of them are
taken back by kernels, which do not run: a word that was set would stay so, and every later call would take its peer's last
handoff for the one of this call. And a rank would wait for words of a peer whose kernels do not compile.
"""

import contextlib
import threading

import triton

import triton_dist
from triton_dist.backends import nvidia_stream


@contextlib.contextmanager
def compile_only():
    """Within it, Triton kernels that this thread calls are compiled and loaded, and not launched, and it gives streams no words
    to set or to wait for; all else is as ever. So what the call leaves in buffers, also in peers', means nothing."""
    thread, launch, give = threading.get_ident(), triton.JITFunction.run, nvidia_stream.give

    def run(self, *args, grid, warmup, **options):
        if warmup or threading.get_ident() != thread:
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        if compiled is not None:
            compiled[(1, 1, 1)]  # loads it, which finds out whether the device can hold it
        return compiled

    def hold_back(stream, operations):
        if threading.get_ident() != thread:
            give(stream, operations)

    triton.JITFunction.run, nvidia_stream.give = run, hold_back
    try:
        yield
    finally:
        triton.JITFunction.run, nvidia_stream.give = launch, give


def compiles():
    """Whether kernels are compiled at all: an interpreter has nothing to do before a launch."""
    return triton_dist.backend != "cpu"
