"""The CPU platform's engine: Triton's interpreter, made cooperative, exact in every dtype, and able to explain a hang.

`install()` is called by `import triton_dist` on the cpu platform. `shmem` attaches the shared board at init.
"""

import numpy as np

from .board import Board
from .handles import atomic
from .launcher import install
from .location import source_line
from .scheduler import scheduler


def attach(board):
    """From now on waits see the other ranks of `board`."""
    scheduler.board, scheduler.rank = board, board.rank


def detach():
    scheduler.board, scheduler.rank = None, 0


def atomic_add(address, value, itemsize=4):
    """Adds to a signed word of 4 or 8 bytes in shared memory; returns the old value."""
    return atomic("add", address, value, np.dtype(f"i{itemsize}"))


__all__ = ["Board", "atomic", "atomic_add", "attach", "detach", "install", "scheduler", "source_line"]
