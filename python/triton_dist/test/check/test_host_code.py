"""Host code that is not only shmem and kernels: point-to-point messages, calls that are not simulated, threads, torch's
defaults, operators."""

import threading

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import check, kernels, shmem

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.distributed import all_gather_object as imported


def messages():
    dist.init_process_group("gloo")
    me, world = dist.get_rank(), dist.get_world_size()
    right, left = (me + 1) % world, (me - 1) % world
    x, y = torch.full((4,), float(me)), torch.empty(4)
    works = [dist.irecv(y, left), dist.isend(x, right)]
    assert not works[0].is_completed()
    for work in works:
        work.wait()
    assert (y == left).all()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x + 1, right), dist.P2POp(dist.irecv, y, left)]):
        work.wait()
    assert (y == left + 1).all()
    objects = [None, None]
    dist.send_object_list([{"from": me}, 7], right)
    assert dist.recv_object_list(objects, left) == left and objects == [{"from": left}, 7]
    if me == 0:
        assert sorted(dist.recv(y) for _ in range(world - 1)) == list(range(1, world))  # from anybody
    else:
        dist.send(x, 0)
    some = dist.new_group([0, 1])
    dist.barrier(group=some)  # no call at all on the other ranks
    assert dist.get_rank(some) == (me if me < 2 else -1) and dist.get_world_size(some) == (2 if me < 2 else -1)
    dist.all_reduce(x, group=dist.group.WORLD)


@pytest.mark.filterwarnings("ignore:torch.distributed.barrier. this rank is not in the group")
@pytest.mark.parametrize("seed", ["fifo", 0, 1, 2])
def test_point_to_point_messages(seed):
    check.explore(messages, world_size=3, seed=seed).raise_if_found()


def pending_receive():
    """Only the wait orders."""
    dist.init_process_group("gloo")
    data, token = shmem.aclshmem_create_tensor((4,), torch.float32), torch.zeros(1)
    if shmem.my_pe() == 0:
        data.fill_(1)
        dist.isend(token, 1)
    else:
        work = dist.irecv(token, 0)
        shmem.peer_tensor(data, 0).sum()
        work.wait()


def test_an_irecv_orders_nothing_before_its_wait():
    assert check.explore(pending_receive, schedules=3).kinds == ["data-race"]


CALLS = {
    "init_device_mesh": lambda x: dist.init_device_mesh("cpu", (2,)),
    "split_group": lambda x: dist.split_group(None, [[0], [1]]),
    "all_gather_object": lambda x: imported([None, None], 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_simulated_is_refused_by_name(name):
    def program():
        dist.init_process_group("gloo")
        CALLS[name](torch.ones(2))

    report = check.explore(program, schedules=1, stall_seconds=20)
    assert report.kinds == ["rank-failed"], report
    assert f"torch.distributed.{name} is not what the checker simulates: it has all_gather" in str(report), report


WRONG = {
    "broadcast": (lambda x, me: dist.broadcast(x, 5), "rank 5 is not in the group of ranks [0, 1]"),
    "shapes": (lambda x, me: dist.all_reduce(torch.ones(2 + me)), "rank 0: [2] torch.float32, rank 1: [3] torch.float32"),
    "op": (lambda x, me: dist.all_reduce(x, op="sum"), "does not simulate the reduction 'sum'"),
    "scatter": (lambda x, me: dist.scatter(x, None, 0), "rank 0 gives 0 tensors"),
    "outputs": (lambda x, me: dist.all_gather([x], x), "1 outputs for 2 ranks"),
    "rows": (lambda x, me: dist.all_to_all_single(torch.empty(3), torch.ones(3)), "3 rows do not split over 2 ranks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_collectives_are_named(name):
    call, text = WRONG[name]

    def program():
        dist.init_process_group("gloo")
        call(torch.ones(2), shmem.my_pe())

    report = check.explore(program, schedules=1)
    assert "rank-failed" in report.kinds and text in str(report), report


@triton.jit
def store_kernel(x):
    tl.store(x, 1)


def launching_in_a_thread():
    thread = threading.Thread(target=lambda: store_kernel[(1,)](torch.zeros(1)))
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kernel_in_a_thread_is_refused():
    report = check.explore(launching_in_a_thread, schedules=1)
    assert report.kinds == ["rank-failed"] and "kernel store_kernel was launched in a Python thread of its own" in str(report)


def defaults():
    me = shmem.my_pe()
    torch.set_default_dtype(torch.float64 if me else torch.float32)
    torch.set_default_device("cpu")
    torch.set_grad_enabled(bool(me))
    x = shmem.aclshmem_create_tensor((4,), torch.float32)
    shmem.barrier_all()
    assert torch.ones(1).dtype == (torch.float64 if me else torch.float32) and torch.is_grad_enabled() == bool(me)
    torch.set_default_device("meta" if me else "cpu")
    shmem.barrier_all()
    assert torch.ones(1).device.type == ("meta" if me else "cpu")
    if me == 0:
        x.fill_(1)  # seen, in spite of the other mode


def test_torch_defaults_are_those_of_a_rank_and_end_with_it():
    check.explore(defaults, schedules=4).raise_if_found()
    assert torch.ones(1).dtype == torch.float32 and torch.ones(1).device.type == "cpu" and torch.is_grad_enabled()


@triton.jit
def swap_kernel(sig, value, ctx):
    dl.notify(sig, 1 - dl.rank(ctx), ctx, value)
    _ = dl.wait(sig, value, ctx)


@torch.library.custom_op("triton_dist_test::swap", mutates_args=("sig",))
def swap(sig: torch.Tensor, ctx: torch.Tensor, value: int) -> None:
    swap_kernel[(1,)](sig, value, ctx)


def operators(direct, times):
    sig, ctx = shmem.create_signals(1), shmem.context()
    for time in range(times):
        (swap if direct else torch.ops.triton_dist_test.swap)(sig, ctx, time + 1)


def test_ranks_meet_inside_of_custom_ops():
    check.explore(operators, True, 5, schedules=12).raise_if_found()
    check.explore(operators, False, 1, schedules=12).raise_if_found()


def test_what_cannot_be_simulated_inside_of_torch_ops_is_said():
    report = check.explore(operators, False, 3, schedules=12)
    assert report.kinds in ([], ["rank-failed"]) and (report.ok or "waits inside of an operator of torch.ops" in str(report))


def test_an_assertion_without_a_message_shows_its_line():
    def program():
        raise AssertionError  # pytest gives an assert a message

    report = check.explore(program, schedules=1)
    assert "AssertionError: raise AssertionError  # pytest gives an assert a message\n  at " in str(report)
    assert "test_host_code.py" in report.findings[0].places[0]


def compiled():
    """An operator inside of code that torch compiles: its graph calls the operator, and the ranks meet inside."""
    dist.init_process_group("gloo")
    context = kernels.create_all_reduce_context(16, torch.float32, programs=1, block=16)
    layer = torch.compile(lambda x: kernels.all_reduce(x * 2, context) + 1, backend="eager")
    assert (layer(torch.full((16,), 1.0 + shmem.my_pe())) == 2 * 6 + 1).all()
    context.free()


def test_an_operator_in_compiled_code():
    check.explore(compiled, world_size=3, schedules=6).raise_if_found()


def forgetful():
    context = kernels.create_all_reduce_context(16, torch.float32, programs=1, block=16)
    if shmem.my_pe() == 0:
        kernels.all_reduce(torch.ones(16), context)  # the other rank does not
    shmem.barrier_all()


def test_a_deadlock_inside_of_an_operator_names_the_line_that_called_it():
    text = str(check.explore(forgetful, schedules=1))
    assert "deadlock" in text and "all_reduce.py" in text
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if "# the other rank does not" in text)
    assert f"test_host_code.py:{line} in forgetful: waits: its kernel mesh_kernel to end" in text
