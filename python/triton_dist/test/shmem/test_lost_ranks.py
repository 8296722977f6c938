"""A rank that dies: the others name it within seconds, and nothing of the run is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from triton_dist import shmem
from triton_dist.errors import PeerLostError
from triton_dist.shmem import codes
from triton_dist.testing import Ranks, RanksFailed


@pytest.fixture(scope="module")
def ranks(need_devices):
    need_devices(3)
    with Ranks(3) as ranks:
        yield ranks


def die_in_a_barrier():
    start = time.monotonic()
    shmem.aclshmem_create_tensor((1 << 20,), torch.uint8).fill_(1)
    if shmem.my_pe() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as info:
        shmem.barrier_all()
    code = shmem.aclshmem_finalize()
    return str(info.value), code, shmem.my_pe(), time.monotonic() - start


def test_kill_9_in_a_barrier_is_named_by_all_others(ranks):
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RanksFailed) as info:
        ranks.run(die_in_a_barrier, init=True)
    failures, outputs = info.value.failures, info.value.outputs
    assert failures[1] == "killed by SIGKILL"
    assert set(os.listdir("/dev/shm")) <= before
    # ranks 0 and 2 have parted by themselves, which the harness reports as a finalize too many
    for rank in (0, 2):
        assert "aclshmem_finalize returned -5" in failures[rank]
        assert "rank 1 exited (pid " in outputs[rank]


def catch_and_tell():
    if shmem.my_pe() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        shmem.aclshmem_malloc(64)
    except PeerLostError as error:
        text = str(error)
    assert shmem.aclshmem_finalize() == codes.BOOTSTRAP and shmem.my_pe() == -1
    print("TOLD", text.replace("\n", " | "))
    os._exit(0)


def test_the_report_names_the_call_and_the_dead_rank(ranks):
    with pytest.raises(RanksFailed) as info:
        ranks.run(catch_and_tell)
    for rank in (0, 2):
        output = info.value.outputs[rank]
        assert "TOLD" in output and "rank 1 exited (pid " in output
        assert "aclshmem_malloc(64) on team 0 (world), called at " in output and "test_lost_ranks.py:" in output


def part_at_different_times():
    if shmem.my_pe() != 0:
        time.sleep(0.1 * shmem.my_pe())
    return shmem.my_pe()


def test_ranks_that_part_in_order_lose_nobody(ranks):
    assert ranks.run(part_at_different_times) == [0, 1, 2]


def test_a_reused_process_id_is_not_taken_for_the_peer():
    from triton_dist.backends.processes import Process, identity

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{child.pid}/stat") as file:
        start = int(file.read().rpartition(")")[2].split()[19])
    alive, reused = Process({"pid": child.pid, "start": start}), Process({"pid": child.pid, "start": start - 1})
    assert not alive.gone() and reused.gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but a zombie
    assert alive.gone()
    child.communicate()
    assert alive.gone() and not Process(identity()).gone()


def test_without_pidfd_the_process_table_tells(monkeypatch):
    from triton_dist.backends import processes

    def refuse(pid):
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{child.pid}/stat") as file:
        start = int(file.read().rpartition(")")[2].split()[19])
    one = processes.Process({"pid": child.pid, "start": start})
    assert not one.gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert one.gone()
    child.communicate()


def exit_all():
    if shmem.my_pe() == 0:
        shmem.aclshmem_global_exit(3)
    signal.pause()


def test_global_exit_ends_every_rank(ranks):
    with pytest.raises(RanksFailed) as info:
        ranks.run(exit_all, timeout=20)
    assert info.value.failures == {0: "ended with exit status 3", 1: "killed by SIGTERM", 2: "killed by SIGTERM"}


def test_a_wrong_segment_is_refused(monkeypatch):
    from triton_dist.backends import processes, segments
    from triton_dist.errors import ShmemError

    fd, other = segments.create(4096, "one"), segments.create(4096, "other")
    me = processes.identity()
    published = segments.describe(fd)
    os.close(segments.open_peer(1, me, published))
    with pytest.raises(ShmemError, match="is not what that rank published") as info:
        segments.open_peer(1, me, {**published, "fd": other})
    assert info.value.code == codes.SMEM
    os.close(fd)
    with pytest.raises(ShmemError, match="Has it died"):
        segments.open_peer(1, me, published)
    with pytest.raises(OSError):
        os.ftruncate(other, 0)  # sealed: no peer can shrink it under the others
    os.close(other)
