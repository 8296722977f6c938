"""On a machine without the device: everything imports, init returns a code and says what is missing."""

import importlib.util
import os

import pytest
import torch

from triton_dist import shmem
from triton_dist.shmem import codes
from triton_dist.testing import run_ranks


def init():
    from triton_dist import backend, language  # noqa: F401
    from triton_dist.backends import ascend, nvidia, platform  # noqa: F401

    rank = int(os.environ["RANK"])
    code = shmem.aclshmem_init(shmem.InitAttr(rank, int(os.environ["WORLD_SIZE"]), "", 1 << 20))
    return backend, platform().process_group, code, shmem.last_error(), shmem.my_pe()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nvidia_without_a_gpu():
    for backend, group, code, said, pe in run_ranks(init, 2, env={"TRITON_DIST_BACKEND": "nvidia"}, init=False):
        assert (backend, group, code, pe) == ("nvidia", "nccl", codes.NOT_SUPPORTED, -1)
        assert "without CUDA" in said or "no NVIDIA GPU is visible" in said
        assert "TRITON_DIST_BACKEND=cpu" in said


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="this machine has torch_npu")
def test_ascend_without_torch_npu():
    ((backend, group, code, said, pe),) = run_ranks(init, 1, env={"TRITON_DIST_BACKEND": "ascend"}, init=False)
    assert (backend, group, code, pe) == ("ascend", "hccl", codes.NOT_SUPPORTED, -1)
    assert "torch_npu: found none (torch " in said and "shmem: found neither" in said and "TRITON_DIST_BACKEND=cpu" in said


def test_more_ranks_than_gpus_names_both_numbers(monkeypatch):
    from triton_dist.backends import nvidia
    from triton_dist.errors import BackendError

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(BackendError, match="4 ranks run on this host but it has 2 GPUs.*--nproc-per-node=2.*=cpu"):
        nvidia.Platform().prepare(1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert nvidia.Platform().prepare(1) == torch.device("cuda", 1) and chosen == [1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")  # one device for each rank
    assert nvidia.Platform().prepare(1) == torch.device("cuda", 0)


# The host collectives of the devices run over the store alone, so they are tested on threads of this process.


def test_store_exchange_meets_in_order_and_cleans_up():
    from concurrent.futures import ThreadPoolExecutor

    from torch.distributed import HashStore

    from triton_dist.backends import processes
    from triton_dist.backends.store import StoreControl
    from triton_dist.shmem.teams import Team

    store = HashStore()
    identities = [{**processes.identity(), "pids": str(rank)} for rank in range(3)]

    def rank_body(rank):
        control, team = StoreControl(store, rank, identities), Team(0, 0, [0, 1, 2], rank)
        for turn in range(30):
            said = control.exchange(team, f"{turn}.{rank}", lambda: "in a test", 20)
            assert said == [f"{turn}.{peer}" for peer in range(3)]
        control.close()
        return team.epoch

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank_body, range(3))) == [30] * 3
    assert store.num_keys() <= 3 * 2 + 3


def test_store_exchange_ends_by_its_limit_and_names_who_is_missing():
    from torch.distributed import HashStore

    from triton_dist.backends import processes
    from triton_dist.backends.store import StoreControl
    from triton_dist.errors import PeerLostError, WaitTimeoutError
    from triton_dist.shmem.teams import Team

    me = processes.identity()
    control, team = StoreControl(HashStore(), 0, [me, {**me, "pids": "elsewhere"}]), Team(0, 0, [0, 1], 0)
    with pytest.raises(WaitTimeoutError, match="longer than 0.2 s(.|\n)*in a test; not arrived yet: rank 1"):
        control.exchange(team, "x", lambda: "in a test", 0.2)
    dead = StoreControl(HashStore(), 0, [me, {**me, "start": me["start"] - 1}])
    with pytest.raises(PeerLostError, match="rank 1 exited"):
        dead.exchange(team, "x", lambda: "in a test", 20)
    dead.close()
