"""How ranks meet: ports given and taken, process groups, unique ids, torchrun, strangers."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

import triton_dist
from triton_dist import shmem
from triton_dist.errors import ShmemError
from triton_dist.shmem import codes, rendezvous
from triton_dist.testing import shared_ranks

HEAP = 1 << 20
two_ranks = pytest.mark.usefixtures("two_devices")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("tcp://127.0.0.1:8666", ("127.0.0.1", 8666)),
        ("tcp://node-7.cluster:65535", ("node-7.cluster", 65535)),
        ("tcp6://[::1]:2000", ("::1", 2000)),
    ],
)
def test_addresses_that_are_understood(text, expected):
    assert rendezvous.parse_ip_port(text) == expected


@pytest.mark.parametrize(
    "text", ["127.0.0.1:80", "tcp://:2000", "tcp://h:1024", "tcp://h:65536", "tcp6://::1:2000", "udp://h:2000"]
)
def test_addresses_that_are_not(text):
    with pytest.raises(ShmemError) as info:
        rendezvous.parse_ip_port(text)
    assert info.value.code == codes.INVALID_PARAM


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(ip_port, environ, timeout=30, delay=(0, 0)):
    rank = int(os.environ["RANK"])
    time.sleep(delay[rank])
    kept = {name: os.environ.get(name) for name in environ}
    for name, value in environ.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    start = time.monotonic()
    attributes = shmem.InitAttr(rank, 2, ip_port, HEAP, shmem.OptionalAttr(shm_init_timeout=timeout))
    code = shmem.aclshmem_init(attributes)
    seconds = time.monotonic() - start
    said = shmem.last_error() if code else ""
    if not code:
        shmem.barrier_all()
        assert shmem.aclshmem_finalize() == 0
    for name, value in kept.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    return code, said, seconds


NO_ENV = {"MASTER_ADDR": None, "MASTER_PORT": None}


@two_ranks
@pytest.mark.skipif(triton_dist.backend == "nvidia", reason="torch keeps a symmetric memory's store, so the port stays served")
def test_a_given_port_is_used():
    port = free_port()
    for _ in range(2):  # the port is free again afterwards
        assert [one[0] for one in shared_ranks(2).run(meet, f"tcp://127.0.0.1:{port}", NO_ENV, init=False)] == [0, 0]
    environ = {**NO_ENV, "G_IP_PORT": f"tcp://127.0.0.1:{free_port()}"}
    assert [one[0] for one in shared_ranks(2).run(meet, "", environ, init=False)] == [0, 0]


@two_ranks
def test_a_late_rank_zero_is_waited_for():
    address = f"tcp://localhost:{free_port()}"
    assert [one[0] for one in shared_ranks(2).run(meet, address, NO_ENV, 30, (0.7, 0), init=False)] == [0, 0]


@two_ranks
def test_a_port_that_another_run_serves_is_refused_with_the_way_out():
    other = rendezvous.serve("127.0.0.1", 0, 10)
    address = f"127.0.0.1:{other.port}"
    zero, one = shared_ranks(2).run(meet, f"tcp://{address}", NO_ENV, 1, init=False)
    assert zero[0] == codes.BOOTSTRAP and address in zero[1] and "another port" in zero[1]
    assert one[0] == codes.TIMEOUT and "rank 0 has not come" in one[1] and one[2] < 20


def strangers(port, mine):
    """Rank 1 meets a run whose rank 0 has another launch identity."""
    rank = int(os.environ["RANK"])
    environ = {**NO_ENV, "TORCHELASTIC_RUN_ID": f"run-{rank if mine else 7}"}
    return meet(f"tcp://127.0.0.1:{port}", environ, 60 if rank else 3)


@two_ranks
def test_a_rank_of_another_launch_is_turned_away_at_once():
    zero, one = shared_ranks(2).run(strangers, free_port(), True, init=False)
    assert one[0] == codes.BOOTSTRAP and one[2] < 30  # it would wait 60 s for the rank 0 of its own
    assert "serves another run" in one[1] and "TORCHELASTIC_RUN_ID 'run-0' there, 'run-1' here" in one[1]
    assert zero[0] == codes.TIMEOUT and "rank 1 has not come" in zero[1]


def same_rank():
    attributes = shmem.InitAttr(1, 2, "", HEAP, shmem.OptionalAttr(shm_init_timeout=1))
    if os.environ["RANK"] == "0":
        attributes.my_rank = 0
    code = shmem.aclshmem_init(attributes)
    return code, shmem.last_error()


@two_ranks
def test_two_processes_with_one_rank_are_both_refused():
    from triton_dist.testing import run_ranks

    results = run_ranks(same_rank, 3, init=False)
    assert codes.BOOTSTRAP in {code for code, _ in results[1:]}
    for code, said in results:
        if code == codes.BOOTSTRAP:
            assert "rank 1 is claimed twice" in said and "pid " in said


def late(told):
    """Rank 0 gives up and tells so by a file, then both come."""
    rank = int(os.environ["RANK"])
    quick = shmem.InitAttr(rank, 2, "", HEAP, shmem.OptionalAttr(shm_init_timeout=0.3))
    if rank == 0:
        first = shmem.aclshmem_init(quick)
        told.touch()
    else:
        first, end = None, time.monotonic() + 60
        while not told.exists() and time.monotonic() < end:
            time.sleep(0.01)
    code, said, _ = meet("", {}, 60)
    return first, code, said


@two_ranks
def test_a_retry_after_a_time_out_meets(tmp_path):
    zero, one = shared_ranks(2).run(late, tmp_path / "told", init=False)
    assert zero == (codes.TIMEOUT, 0, "") and one == (None, 0, "")


@two_ranks
def test_without_any_place_to_meet_the_way_out_is_named():
    for code, said, _ in shared_ranks(2).run(meet, "", NO_ENV, init=False):
        assert code == codes.BOOTSTRAP
        for way in ("torchrun", "torch.distributed", "ip_port", "MASTER_ADDR and MASTER_PORT not set"):
            assert way in said


def through_a_process_group():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    kept = {name: os.environ.pop(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    seen = []
    for _ in range(2):
        seen.append(shmem.aclshmem_init(shmem.InitAttr(rank, 2, "", HEAP)))
        shmem.barrier_all()
        seen.append(shmem.aclshmem_finalize())
    os.environ.update(kept)
    return seen


@two_ranks
def test_an_initialised_process_group_is_enough():
    assert shared_ranks(2).run(through_a_process_group, init=False) == [[0] * 4, [0] * 4]


def by_unique_id():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    box = [shmem.aclshmem_get_unique_id() if rank == 0 else None]
    dist.broadcast_object_list(box)
    seen = []
    for _ in range(2):
        seen.append(shmem.aclshmem_init_using_unique_id(rank, 2, HEAP, box[0]))
        seen.append(shmem.aclshmem_finalize())
    return seen


@two_ranks
def test_unique_id_meets_again_and_again():
    assert shared_ranks(2).run(by_unique_id, init=False) == [[0] * 4, [0] * 4]


SCRIPT = """
import os, torch
from triton_dist import shmem
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert shmem.aclshmem_init(shmem.InitAttr(rank, world, "", 1 << 20)) == 0, shmem.last_error()
x = shmem.aclshmem_create_tensor((1,), torch.int32); x.fill_(int(os.environ["MARK"]) * 10 + rank)
shmem.barrier_all()
assert int(shmem.peer_tensor(x, 1 - rank)) == int(os.environ["MARK"]) * 10 + 1 - rank
shmem.barrier_all()
assert shmem.aclshmem_finalize() == 0
os.write(1, f"done {rank}\\n".encode())
"""


@two_ranks
def test_three_torchruns_at_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    shm = set(os.listdir("/dev/shm"))
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
            env={**os.environ, "MARK": str(mark), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mark in range(3)
    ]
    try:
        for run in runs:
            out, err = run.communicate(timeout=120)
            assert run.returncode == 0, err
            assert sorted(out.split("\n")) == ["", "done 0", "done 1"]
    finally:
        for run in runs:
            run.kill()
    assert not [name for name in set(os.listdir("/dev/shm")) - shm if "triton_dist" in name]
