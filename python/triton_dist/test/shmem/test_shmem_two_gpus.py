"""The host API on two NVIDIA GPUs. Skipped where there are fewer."""

import os

import pytest
import torch

from triton_dist import backend, shmem
from triton_dist import context as table
from triton_dist.errors import CollectiveMismatchError, PeerLostError, ShmemError, WaitTimeoutError
from triton_dist.shmem import codes
from triton_dist.testing import RanksFailed, run_ranks, shared_ranks

pytestmark = pytest.mark.skipif(
    backend != "nvidia" or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs and TRITON_DIST_BACKEND=nvidia"
)


def memory_and_copies():
    me, peer = shmem.my_pe(), 1 - shmem.my_pe()
    device = shmem.device()
    assert device == torch.device("cuda", me)
    x = shmem.aclshmem_create_tensor((4, 8), torch.bfloat16)
    assert x.device == device and x.data_ptr() % 512 == 0
    x.fill_(me)
    shmem.barrier_all()
    theirs = shmem.peer_tensor(x, peer)
    assert (theirs == peer).all()
    shmem.barrier_all()
    shmem.peer_tensor(x[1:3, ::2], peer).fill_(10 + me)
    shmem.barrier_all()
    expected = torch.full((4, 8), float(me))
    expected[1:3, ::2] = 10 + peer
    assert torch.equal(x.float().cpu(), expected)
    ctx = shmem.context()
    assert ctx.device == device
    words = ctx.tolist()
    assert words[table.RANK] == me and words[table.NUM_RANKS] == 2
    assert x.data_ptr() + words[table.DELTAS + peer] == shmem.aclshmem_ptr(x.data_ptr(), peer) == theirs.data_ptr()

    inbox, signals = shmem.aclshmem_create_tensor((1 << 20,), torch.int32), shmem.create_signals(2)
    local = torch.arange(1 << 20, dtype=torch.int32, device=device) + me
    for epoch in range(1, 20):
        shmem.aclshmemx_putmem_signal_nbi(
            inbox.data_ptr(), local.data_ptr(), inbox.nbytes, signals.data_ptr(), 1, shmem.SignalOp.SIGNAL_ADD, peer
        )
        shmem.aclshmem_signal_wait_until(signals.data_ptr(), shmem.CmpOp.CMP_GE, epoch)
        assert int(inbox[-1]) == (1 << 20) - 1 + peer
        shmem.barrier_all()
    back = torch.empty_like(local)
    shmem.aclshmem_getmem(back.data_ptr(), inbox.data_ptr(), back.nbytes, peer)
    assert torch.equal(back, local)
    wide = shmem.create_signals(1, torch.int64)
    shmem.aclshmemx_putmem_signal(wide.data_ptr(), wide.data_ptr(), 0, wide.data_ptr(), 1 << 40, 0, peer)
    shmem.aclshmem_signal_wait_until(wide.data_ptr(), shmem.CmpOp.CMP_EQ, 1 << 40)

    alone = shmem.team_split_2d(0, 1)[0]
    shmem.barrier_all(alone)
    assert shmem.context(alone).tolist()[table.NUM_RANKS] == 1
    with pytest.raises(CollectiveMismatchError):
        shmem.aclshmem_malloc(64 + 64 * me)
    with pytest.raises(ShmemError) as info:
        shmem.aclshmem_malloc(1 << 30)
    assert info.value.code == codes.MALLOC_FAILED


def test_memory_copies_signals_and_teams_on_gpus():
    for _ in range(3):  # init again in the same processes
        shared_ranks(2).run(memory_and_copies)


def wait_for_nobody():
    signals = shmem.create_signals(1)
    with pytest.raises(WaitTimeoutError, match="seen 0"):
        shmem.aclshmem_signal_wait_until(signals.data_ptr(), shmem.CmpOp.CMP_GE, 1)


def test_a_signal_that_nobody_sends_ends_by_the_limit():
    run_ranks(wait_for_nobody, 2, env={"TRITON_DIST_WAIT_TIMEOUT": "2"})


def die():
    if shmem.my_pe() == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(PeerLostError, match="rank 1 exited"):
        shmem.barrier_all()
    print("NAMED")


def test_a_killed_rank_is_named():
    with pytest.raises(RanksFailed) as info:
        run_ranks(die, 2)
    assert "NAMED" in info.value.outputs[0]


def too_many():
    rank = int(os.environ["RANK"])
    return shmem.aclshmem_init(shmem.InitAttr(rank, int(os.environ["WORLD_SIZE"]), "", 1 << 20)), shmem.last_error()


def test_more_ranks_than_gpus_are_refused_on_all():
    count = torch.cuda.device_count()
    for code, said in run_ranks(too_many, count + 1, init=False):
        assert code == codes.NOT_SUPPORTED and f"{count + 1} ranks run on this host but it has {count} GPUs" in said
