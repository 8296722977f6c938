"""The device language: `import triton_dist.language as dl`.

A kernel receives `ctx` (the context table of a team, `shmem.context(team)`); ranks are ranks of that team. Addresses
in the symmetric heap are written with this rank's own pointers and a peer; signals say when data is ready:

    dl.put(dst, src, n, peer, ctx)          # rank 0: my data to the peer's copy of dst
    dl.notify(sig, peer, ctx, epoch)        # release
    token = dl.wait(sig, epoch, ctx)        # rank 1: acquire
    x = tl.load(dl.consume_token(dst, token) + offsets)

Importing this needs Triton alone, neither torch nor numpy, unless kernels run in Triton's interpreter.
"""

from . import target
from .atomic import atomic_add, atomic_cas, atomic_max, atomic_min, atomic_xchg
from .barrier import barrier_all, barrier_clear, barrier_grid
from .device_function import device_function
from .rma import get, get_2d, num_ranks, put, put_2d, rank, remote_load, remote_store, symm_at
from .signal import consume_token, fence, fence_dot, notify, notify_all, put_signal, quiet, signal_at, test, wait
from .swizzle import owner_first, rank_first_tile, tile_of

__all__ = [
    "atomic_add",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_xchg",
    "barrier_all",
    "barrier_clear",
    "barrier_grid",
    "consume_token",
    "device_function",
    "fence",
    "fence_dot",
    "get",
    "get_2d",
    "notify",
    "notify_all",
    "num_ranks",
    "owner_first",
    "put",
    "put_2d",
    "put_signal",
    "quiet",
    "rank",
    "rank_first_tile",
    "remote_load",
    "remote_store",
    "signal_at",
    "symm_at",
    "target",
    "test",
    "tile_of",
    "wait",
]
