"""Teams on four ranks, all in one run."""

import os

import pytest
import torch

from triton_dist import context as table
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.shmem import codes
from triton_dist.testing import run_ranks, shared_ranks


def body():
    me = shmem.my_pe()
    x = shmem.aclshmem_create_tensor((1,), torch.int32)
    x.fill_(me)

    odd = shmem.team_split_strided(0, 1, 2, 2)  # ranks 1, 3
    assert odd == (1 if me % 2 else -1)
    assert shmem.team_my_pe(odd) == {0: -1, 1: 0, 2: -1, 3: 1}[me]
    assert shmem.team_n_pes(odd) == (2 if me % 2 else -1)
    if me % 2:
        assert [shmem.team_translate_pe(odd, pe, 0) for pe in (-1, 0, 1, 2)] == [-1, 1, 3, -1]
        assert [shmem.team_translate_pe(0, pe, odd) for pe in range(4)] == [-1, 0, -1, 1]
        for _ in range(50):
            shmem.barrier_all(odd)  # ranks 0 and 2 are elsewhere
        ctx = shmem.context(odd)
        assert ctx[table.RANK] == shmem.team_my_pe(odd) and ctx[table.NUM_RANKS] == 2 and len(ctx) == table.DELTAS + 2
        assert ctx[table.DELTAS + shmem.team_my_pe(odd)] == 0
        other = 1 - shmem.team_my_pe(odd)
        theirs = shmem.peer_tensor(x, other, odd)
        assert int(theirs) == (3 if me == 1 else 1)
        assert x.data_ptr() + int(ctx[table.DELTAS + other]) == theirs.data_ptr()
    shmem.barrier_all()

    rows, columns = shmem.team_split_2d(0, 3)  # rows 0 1 2 | 3, columns 0 3 | 1 | 2
    assert rows != columns and rows > 0 and columns > 0
    assert [shmem.team_n_pes(team) for team in (rows, columns)] == {0: [3, 2], 1: [3, 1], 2: [3, 1], 3: [1, 2]}[me]
    assert [shmem.team_my_pe(team) for team in (rows, columns)] == {0: [0, 0], 1: [1, 0], 2: [2, 0], 3: [0, 1]}[me]
    for team in (rows, columns, rows, columns):
        shmem.barrier_all(team)

    inner = shmem.team_split_strided(rows, 0, 1, 1)  # a team of a team: ranks 0 and 3, each alone
    assert shmem.team_n_pes(inner) == (1 if me in (0, 3) else -1)

    if me % 2:
        table_of_odd = shmem.context(odd)
        shmem.team_destroy(odd)
        assert table_of_odd[table.MAGIC_WORD] == 0 and shmem.team_n_pes(odd) == -1
    all_again = [shmem.team_split_strided(0, 0, 1, 4) for _ in range(2)]
    assert len(set(all_again)) == 2 and -1 not in all_again
    for team in all_again:
        shmem.barrier_all(team)
        shmem.team_destroy(team)
    # the freed ids come again, although the ranks have met under them differently often
    once_more = shmem.team_split_strided(0, 3, 1, 1), shmem.team_split_strided(0, 0, 1, 4)
    shmem.barrier_all(once_more[1])
    assert shmem.team_split_strided(0, 0, 2, 3) == codes.INVALID_PARAM  # ranks 0, 2, 4
    mixed = shmem.team_split_strided(0, 2, 1, 2), shmem.team_split_strided(0, 1, 1, 3)  # ranks 2 3, then 1 2 3
    for team in mixed:
        if team != -1:
            for _ in range(20):
                shmem.barrier_all(team)
    everybody = shmem.context()
    assert everybody[table.MAGIC_WORD] == table.MAGIC and everybody[table.NUM_RANKS] == 4
    return all_again


def body_over_the_store():
    """The same on the host collectives of the device platforms, which meet over the store."""
    from triton_dist.backends import cpu
    from triton_dist.backends.store import StoreControl

    class StoreHeap(cpu.Heap):
        def connect(self, descriptors, store, timeout):
            super().connect(descriptors, store, timeout)
            self.over_store = StoreControl(store, self.rank, [one["process"] for one in descriptors])

        def exchange(self, team, text, describe, timeout=None):
            return self.over_store.exchange(team, text, describe, timeout)

        def counter(self, team_id):
            return 0

        def close(self):
            self.over_store.close()
            super().close()

    cpu.Heap = StoreHeap
    rank, ids = int(os.environ["RANK"]), []
    for _ in range(2):
        assert shmem.aclshmem_init(shmem.InitAttr(rank, 4, "", 1 << 20)) == 0, shmem.last_error()
        ids.append(body())
        with pytest.raises(CollectiveMismatchError, match="rank 3: aclshmem_malloc"):
            shmem.aclshmem_malloc(64 * (rank + 1))
        assert shmem.aclshmem_finalize() == 0
    return ids


def test_teams_over_the_store_of_the_device_platforms():
    ids = run_ranks(body_over_the_store, 4, init=False)
    assert ids[0] == ids[1] == ids[2] == ids[3]


def test_teams_split_translate_meet_and_end():
    ids = run_ranks(body, 4)
    assert ids[0] == ids[1] == ids[2] == ids[3]


def all_teams_there_are():
    made = []
    while (team := shmem.team_split_strided(0, 0, 1, 2)) > 0:
        made.append(team)
        if len(made) == 1700:  # as many ids as an exchange of plain numbers could not hold
            break
    return len(made), shmem.barrier_all(made[-1])


def test_many_teams_at_a_time():
    assert shared_ranks(2).run(all_teams_there_are, timeout=120) == [(1700, None)] * 2
