"""Autotuning that all ranks do alike, and what it has found: the cache, the tables that come with this library.

    from triton_dist.tuning import autotune

    best = autotune(
        "my_kernel",
        [dict(BLOCK=block, num_warps=warps) for block in (1024, 4096) for warps in (4, 8)],
        lambda config: my_kernel[grid](x, inbox, signals, n, shmem.context(), **config),
        key=dict(n=n, dtype="float16"),
        source=[my_kernel],
    ).best

`triton.autotune` does not do for a kernel that waits for other ranks: each rank would time on its own, choose how often to call
from its own clock, leave out what fails on itself, and take its own winner, so that kernels which wait for one another would
not be the same ones, or not equally many. Here the ranks agree after each step, and what counts is the slowest rank's time.

Operators of `triton_dist.kernels` are tuned by `triton_dist.tune`; a context that is made with method=None looks here.
docs/tuning.md tells the whole.
"""

from .autotuner import Timing, Tuned, autotune
from .lookup import crossover, lookup, measured

__all__ = ["Timing", "Tuned", "autotune", "crossover", "lookup", "measured"]
