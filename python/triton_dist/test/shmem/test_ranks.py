"""The harness itself: results, reports, time limits, nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from triton_dist import shmem
from triton_dist.testing import Ranks, RanksFailed, run_ranks, shared_ranks

pytestmark = pytest.mark.usefixtures("two_devices")


class Value:
    def __init__(self, number):
        self.number = number


def environment(value):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EXTRA")
    return [os.environ.get(name) for name in names], os.getpid(), shmem.my_pe(), Value(value.number + 1)


def test_fresh_ranks_get_their_environment_and_end():
    one, other = run_ranks(environment, 2, Value(4), env={"EXTRA": "7"}, init=False)
    assert one[0] == ["0", "0", "2", "2", "7"] and other[0] == ["1", "1", "2", "2", "7"]
    assert one[2] == other[2] == -1 and one[3].number == 5
    for pid in (one[1], other[1]):
        assert not os.path.exists(f"/proc/{pid}")


def view_of_the_heap():
    x = shmem.aclshmem_create_tensor((4,), torch.float32)
    x.fill_(shmem.my_pe())
    print("seen by rank", shmem.my_pe())
    return x, os.getpid()


def test_a_pool_keeps_its_processes_and_returns_small_tensors():
    ranks = shared_ranks(2)
    first, second = ranks.run(view_of_the_heap), ranks.run(view_of_the_heap)
    assert [pid for _, pid in first] == [pid for _, pid in second]
    assert [x.tolist() for x, _ in first] == [[0.0] * 4, [1.0] * 4]
    assert first[1][0].untyped_storage().nbytes() == 16
    assert ranks.outputs == ["seen by rank 0\n", "seen by rank 1\n"]
    assert shared_ranks(2) is ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def fail_on_one():
    print("before")
    if shmem.my_pe() == 1:
        raise KeyError("the cause")
    shmem.barrier_all()


def test_a_failure_reports_every_rank(ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as info:
        ranks.run(fail_on_one)
    text = str(info.value)
    assert time.monotonic() - start < 20  # no waiting for the time limit
    assert "KeyError: 'the cause'" in text and "PeerLostError" in text and "rank 1 exited" in text
    assert text.count("\nbefore") == 2 and set(info.value.failures) == {0, 1}
    assert ranks.run(view_of_the_heap)[0][0].tolist() == [0.0] * 4  # fresh ranks


def hang_on_one():
    if shmem.my_pe() == 1:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
        time.sleep(600)
    return 5


def test_a_hang_ends_at_the_limit_with_its_stack_and_without_children(ranks):
    ranks.run(view_of_the_heap)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as info:
        ranks.run(hang_on_one, timeout=1, init=True)
    assert time.monotonic() - start < 60  # not the 600 s that it would sleep
    assert "still running after 1 s; ended by SIGABRT" in info.value.failures[1]
    assert "in hang_on_one" in info.value.outputs[1]
    child = info.value.outputs[1].split()[1]
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}") and open(f"/proc/{child}/stat").read().split()[2] != "Z":
        assert time.monotonic() < end


def segfault():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)
    return "fine"


def test_a_crash_is_named_and_the_others_results_are_kept(ranks):
    with pytest.raises(RanksFailed) as info:
        ranks.run(segfault, init=False)
    assert info.value.failures == {1: "killed by SIGSEGV"} and info.value.results == {0: "fine"}
    assert "in segfault" in info.value.outputs[1]


def unpicklable():
    return lambda: None


def test_what_cannot_cross_processes_is_said(ranks):
    with pytest.raises(RanksFailed, match="[Pp]ickle"):
        ranks.run(unpicklable)

    def local():
        pass

    with pytest.raises(TypeError, match="not a module-level function"):
        ranks.run(local)


def left_initialised():
    attributes = shmem.InitAttr(int(os.environ["RANK"]), 2, "", 1 << 20)
    return shmem.aclshmem_init(attributes), os.getpid()


def test_state_left_behind_does_not_reach_the_next_run(ranks):
    first = ranks.run(left_initialised, init=False)
    second = ranks.run(left_initialised, init=False)
    assert [code for code, _ in first + second] == [0] * 4
    assert first[0][1] != second[0][1]


PARENT = """
import os, sys, time
from triton_dist.testing import Ranks
sys.path.insert(0, {folder!r})
import test_ranks
ranks = Ranks(2)
print(*[pid for _, pid in ranks.run(test_ranks.view_of_the_heap)], flush=True)
ranks.run(test_ranks.hang_on_one, timeout=600)
"""


def test_ranks_end_with_a_parent_that_is_killed():
    code = PARENT.format(folder=os.path.dirname(__file__))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = parent.stdout.readline().split()
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().split()[2] != "Z" for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)
