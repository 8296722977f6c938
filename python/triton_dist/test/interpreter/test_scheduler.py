"""Programs of one grid wait for one another: in Triton's own words, without a symmetric heap."""

import re
import sys
import threading

import pytest
import torch

import triton_dist
from triton_dist.errors import BackendError, DeadlockError
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton_dist.interpreted, reason="checks the CPU engine; kernels are compiled here")


@triton.jit
def wait_for_later_program(flag_ptr, out_ptr, HOW: tl.constexpr):
    if tl.program_id(0) == 0:
        if HOW == "volatile":
            while tl.load(flag_ptr, volatile=True) < 1:
                pass
        elif HOW == "plain":
            while tl.load(flag_ptr) < 1:
                pass
        elif HOW == "atomic":
            while tl.atomic_add(flag_ptr, 0) < 1:
                pass
        elif HOW == "cas":
            while tl.atomic_cas(flag_ptr, 1, 1) != 1:
                pass
        elif HOW == "block":
            seen = tl.max(tl.load(flag_ptr + tl.arange(0, 1), volatile=True), 0)
            while seen < 1:
                tl.debug_barrier()
                seen = tl.max(tl.load(flag_ptr + tl.arange(0, 1), volatile=True), 0)
        else:
            while tl.load(flag_ptr, volatile=True) < 1 or tl.load(flag_ptr + 1, volatile=True) < 1:
                pass
        tl.store(out_ptr, tl.load(flag_ptr + 2))
    else:
        tl.store(flag_ptr + 2, 42)
        tl.atomic_xchg(flag_ptr + 1, 1)
        tl.atomic_xchg(flag_ptr, 1)


@pytest.mark.parametrize("how", ["volatile", "plain", "atomic", "cas", "block", "two"])
def test_a_program_can_wait_for_a_later_one(how):
    flag, out = torch.zeros(3, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    wait_for_later_program[(2,)](flag, out, how)
    assert out.item() == 42


@triton.jit
def spin_for_ever(flag_ptr):
    if tl.program_id(0) == 1:
        while tl.load(flag_ptr, volatile=True) < 7:  # the line that the report must name
            pass


def test_a_spin_that_nobody_ends_is_reported_with_its_line():
    flag = torch.full((1,), 3, dtype=torch.int32)
    with pytest.raises(DeadlockError) as caught:
        spin_for_ever[(3,)](flag)
    text = str(caught.value)
    with open(__file__) as source:
        line = next(i for i, s in enumerate(source, 1) if "# the line that the report must name" in s)
    assert re.search(rf"test_scheduler\.py:{line}\b", text), text
    assert "kernel spin_for_ever" in text and "program (1, 0, 0)" in text and "sees 3" in text, text


@triton.jit
def bounded_spin(flag_ptr, out_ptr, LIMIT):
    turns = 0
    while (turns < LIMIT) & (tl.load(flag_ptr, volatile=True) == 0):
        turns += 1
    tl.store(out_ptr, turns)


def test_a_bounded_spin_ends_by_itself():
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    bounded_spin[(1,)](flag, out, 900)
    assert out.item() == 900


@triton.jit
def need_two(counter_ptr, P: tl.constexpr):
    tl.atomic_add(counter_ptr, 1)
    while tl.atomic_add(counter_ptr, 0) < P:
        pass


def test_a_grid_larger_than_the_residents_deadlocks(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_RESIDENT", "4")
    need_two[(4,)](torch.zeros(1, dtype=torch.int32), 4)
    with pytest.raises(DeadlockError, match=r"1 not started \(TRITON_DIST_RESIDENT=4"):
        need_two[(5,)](torch.zeros(1, dtype=torch.int32), 5)
    monkeypatch.delenv("TRITON_DIST_RESIDENT")
    need_two[(5,)](torch.zeros(1, dtype=torch.int32), 5)


def test_residents_must_be_a_positive_number(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_RESIDENT", "none")
    with pytest.raises(BackendError, match="TRITON_DIST_RESIDENT='none'"):
        need_two[(1,)](torch.zeros(1, dtype=torch.int32), 1)


@triton.jit
def asserting(x_ptr):
    tl.device_assert(tl.load(x_ptr + tl.program_id(0)) == 0, "x must be zero")


def test_device_assert_fires_and_names_the_program():
    asserting[(3,)](torch.zeros(3, dtype=torch.int32))
    with pytest.raises(Exception, match=r"program \(2, 0, 0\).*test_scheduler.py.*x must be zero"):
        asserting[(3,)](torch.tensor([0, 0, 5], dtype=torch.int32))


@triton.jit
def count_programs(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    tl.atomic_add(out_ptr + (x * ny + y) * nz + z, 1 + 0 * nx)


@pytest.mark.parametrize("grid", [(5,), (2, 3), (2, 3, 4), (1, 1, 7)], ids=str)
def test_every_program_runs_once(grid):
    x, y, z = (*grid, 1, 1)[:3]
    out = torch.zeros(x * y * z, dtype=torch.int32)
    count_programs[grid](out)
    assert torch.equal(out, torch.ones_like(out))


def test_an_empty_grid_runs_nothing():
    out = torch.zeros(1, dtype=torch.int32)
    count_programs[(0,)](out)
    assert out.item() == 0


@triton.jit
def chain(flags_ptr, ROUNDS):
    me, n = tl.program_id(0), tl.num_programs(0)
    for i in range(1, ROUNDS + 1):
        while tl.load(flags_ptr + me, volatile=True) < i:
            pass
        tl.atomic_xchg(flags_ptr + (me + 1) % n, i + tl.where(me == n - 1, 1, 0))


def test_many_hand_overs_give_no_false_report():
    flags = torch.zeros(8, dtype=torch.int32)
    flags[0] = 1
    chain[(8,)](flags, 200)
    assert flags[0].item() == 201


def test_a_failed_kernel_leaves_the_engine_usable():
    with pytest.raises(DeadlockError):
        spin_for_ever[(2,)](torch.zeros(1, dtype=torch.int32))
    test_every_program_runs_once((4,))


def test_a_tensor_of_another_device_is_refused_by_name():
    with pytest.raises(BackendError, match=r"'out_ptr' is a tensor on meta"):
        count_programs[(1,)](torch.zeros(1, dtype=torch.int32, device="meta"))


@triton.jit
def add_one(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


def test_threads_that_launch_kernels_do_not_disturb_each_other():
    cells = [torch.zeros(1, dtype=torch.int32) for _ in range(3)]
    errors = []

    def run(cell):
        try:
            for _ in range(60):
                add_one[(1,)](cell)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(cell,)) for cell in cells]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors and [cell.item() for cell in cells] == [60, 60, 60]
