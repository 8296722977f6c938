"""The order in which tiles are visited, so that a rank works on what is here while the rest is on its way.

All are pure integer arithmetic on scalars (or blocks) and end in no memory access.
"""

import triton.language as tl

from .device_function import device_function


@device_function()
def owner_first(i, rank, num_ranks):
    """The rank to serve in step `i`: this rank first, then rank + 1, and round. `(rank + i) % num_ranks`, int.

    Args:
        i: step, 0 .. num_ranks - 1 (any non-negative integer).
        rank, num_ranks: this rank and the size of the team.

    In step i every rank serves a different owner, so no link and no rank is the target of all.
    """
    # Not %: triton-ascend 3.2 has trouble with it.
    return rank + i - (rank + i) // num_ranks * num_ranks


@device_function()
def tile_of(pid, num_m, num_n, GROUP_M):
    """The tile that program `pid` computes: down GROUP_M rows of tiles, then one column on, so that what is loaded is
    still in cache.

    Args:
        pid: 0 .. num_m * num_n - 1.
        num_m, num_n: tiles along M and N; num_m need not be a multiple of GROUP_M.
        GROUP_M: rows of tiles in a group, at least 1.

    Returns: (pid_m, pid_n). Every tile is visited exactly once.
    """
    group = pid // (GROUP_M * num_n)
    first = group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)  # the last group may be lower
    i = pid - group * (GROUP_M * num_n)
    return first + i - i // height * height, i // height


@device_function()
def rank_first_tile(pid, tiles_m_per_rank, num_n, rank, num_ranks, GROUP_M):
    """The tile that program `pid` computes when the rows of the result are sharded by rank.

    All tiles of this rank's own shard come first, then those of rank + 1, and round; within a shard `tile_of`'s order.

    Args:
        pid: 0 .. num_ranks * tiles_m_per_rank * num_n - 1.
        tiles_m_per_rank: tiles along M in one rank's shard, the same on every rank (cdiv of a shard's rows).
        num_n: tiles along N.
        rank, num_ranks: this rank and the size of the team.
        GROUP_M: see `tile_of`.

    Returns: (owner rank, pid_m within the owner's shard, pid_n).
    """
    step = pid // (tiles_m_per_rank * num_n)
    pid_m, pid_n = tile_of(pid - step * (tiles_m_per_rank * num_n), tiles_m_per_rank, num_n, GROUP_M)
    return owner_first(step, rank, num_ranks), pid_m, pid_n
