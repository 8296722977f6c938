"""The simulator: schedules that repeat, ranks that do not see one another's state, torch.distributed, many ranks."""

import os
import random

import numpy as np
import pytest

import triton_dist
import triton_dist.language as dl
from triton_dist import backends, check, shmem
from triton_dist.check.simulator import Simulation
from triton_dist.check.strategies import strategy_of
from triton_dist.errors import TritonDistError
from triton_dist.interpreter import scheduler

import torch
import torch.distributed as dist
import triton
import triton.language as tl

@triton.jit
def arrive_kernel(counter, places, ctx):
    me, pid = dl.rank(ctx), tl.program_id(0)
    place = dl.atomic_add(counter, 1, 0, ctx)
    dl.remote_store(places + place, me * 10 + pid, 0, ctx)


def arrive():
    """In which order did the programs of all ranks come?"""
    counter, places = shmem.create_signals(1), shmem.aclshmem_create_tensor((64,), torch.int32)
    places.fill_(-1)
    shmem.barrier_all()
    arrive_kernel[(3,)](counter, places, shmem.context())
    shmem.barrier_all()
    return tuple(shmem.peer_tensor(places, 0)[: 3 * shmem.pe_count()].tolist())


def test_a_seed_gives_one_schedule_and_seeds_differ():
    def orders():
        return [check.explore(arrive, world_size=3, seed=seed).results[0] for seed in ["fifo", *range(12)]]

    first, again = orders(), orders()
    assert first == again
    assert len(set(first)) >= 8 and all(sorted(one) == [0, 1, 2, 10, 11, 12, 20, 21, 22] for one in first)


def test_a_replay_is_the_schedule_that_explore_ran():
    seen = []

    def record():
        result = arrive()
        if shmem.my_pe() == 0:
            seen.append(result)

    check.explore(record, world_size=2, schedules=9, weak=False)
    whole, seen[:] = list(seen), []
    for seed in range(8):
        check.explore(record, world_size=2, seed=seed)
    assert seen[1::2] == whole[1:]  # each replay runs the first-in first-out schedule before


def random_numbers():
    """Ranks take turns at every barrier; each has generators of its own."""
    torch.manual_seed(shmem.my_pe())
    random.seed(shmem.my_pe())
    np.random.seed(shmem.my_pe())
    numbers = []
    for _ in range(3):
        numbers += [torch.rand(1).item(), random.random(), np.random.rand()]
        shmem.barrier_all()
    return numbers


def test_ranks_have_random_generators_of_their_own():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    expected = []
    for rank in range(3):
        t, r, n = torch.Generator().manual_seed(rank), random.Random(rank), np.random.RandomState(rank)
        expected.append([f() for _ in range(3) for f in (lambda t=t: torch.rand(1, generator=t).item(), r.random, n.rand)])
    for seed in ("fifo", 0, 1):
        assert check.explore(random_numbers, world_size=3, seed=seed).results == expected
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def collectives():
    """Everything that process_group.py offers, against what it means."""
    dist.init_process_group(shmem.process_group_backend())
    me, world = dist.get_rank(), dist.get_world_size()
    assert (me, world) == (shmem.my_pe(), shmem.pe_count()) and dist.is_initialized() and dist.get_backend() == "gloo"
    mine = torch.arange(4) + 10 * me
    everybody = [torch.arange(4) + 10 * rank for rank in range(world)]
    parts = [torch.empty(4, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(parts, mine)
    assert all(torch.equal(a, b) for a, b in zip(parts, everybody))
    flat = torch.empty(4 * world, dtype=torch.int64)
    dist.all_gather_into_tensor(flat, mine)
    assert torch.equal(flat, torch.cat(everybody))
    for op, expected in (
        (dist.ReduceOp.SUM, sum(everybody)),
        (dist.ReduceOp.MAX, everybody[-1]),
        (dist.ReduceOp.MIN, everybody[0]),
        (dist.ReduceOp.PRODUCT, torch.stack(everybody).prod(0)),
        (dist.ReduceOp.AVG, sum(everybody) // world),
    ):
        y = mine.clone()
        work = dist.all_reduce(y, op=op, async_op=True)
        work.wait()
        assert torch.equal(y, expected), op
    y = mine.clone()
    dist.broadcast(y, 1)
    assert torch.equal(y, everybody[1])
    rows = torch.arange(world * 2).view(world, 2) + 100 * me
    out = torch.empty(world, 2, dtype=torch.int64)
    dist.all_to_all_single(out, rows)
    assert torch.equal(out, torch.stack([torch.arange(2 * me, 2 * me + 2) + 100 * rank for rank in range(world)]))
    outs = [torch.empty(2, dtype=torch.int64) for _ in range(world)]
    dist.all_to_all(outs, list(rows))
    assert torch.equal(torch.stack(outs), out)
    piece = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_tensor(piece, torch.arange(2 * world) + me)
    assert torch.equal(piece, world * torch.arange(2 * me, 2 * me + 2) + sum(range(world)))
    y = mine.clone()
    dist.reduce(y, 0)
    assert torch.equal(y, sum(everybody) if me == 0 else mine)
    gathered = [torch.empty(4, dtype=torch.int64) for _ in range(world)] if me == 1 else None
    dist.gather(mine, gathered, 1)
    assert me != 1 or all(torch.equal(a, b) for a, b in zip(gathered, everybody))
    dist.scatter(y, everybody if me == 0 else None, 0)
    assert torch.equal(y, mine)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": rank} for rank in range(world)]
    said = [me, "x"] if me == 2 else [None, None]
    dist.broadcast_object_list(said, 2)
    assert said == [2, "x"]
    box = [None]
    dist.scatter_object_list(box, list("abc") if me == 0 else None, 0)
    assert box == ["abc"[me]]
    dist.send(mine, (me + 1) % world) if me == 0 else dist.recv(y, (me - 1) % world)
    dist.send(mine, (me + 1) % world) if me != 0 else dist.recv(y, (me - 1) % world)
    assert torch.equal(y, everybody[(me - 1) % world])
    pair = dist.new_group([0, 2])
    if me in (0, 2):
        y = mine.clone()
        dist.all_reduce(y, group=pair)
        assert torch.equal(y, everybody[0] + everybody[2]) and dist.get_rank(pair) == (0, None, 1)[me]
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("seed", ["fifo", 0, 1, 2, 3])
def test_torch_distributed(seed):
    before = dist.all_reduce
    check.explore(collectives, world_size=3, seed=seed).raise_if_found()
    assert dist.all_reduce is before and not dist.is_initialized()


def mixed_collectives():
    dist.init_process_group("gloo")
    dist.barrier() if shmem.my_pe() == 0 else dist.all_reduce(torch.ones(1))


def test_ranks_that_make_different_calls_are_told():
    report = check.explore(mixed_collectives, world_size=2)
    assert report.kinds == ["rank-failed"] and "rank 0: barrier, rank 1: all_reduce" in str(report)


@triton.jit
def all_to_one_kernel(inbox, sig, out, ctx):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    dl.remote_store(inbox + me, me, 0, ctx)
    dl.notify(sig, 0, ctx, 1, "add")
    if me == 0:
        _ = dl.wait(sig, world, ctx)
        total = 0
        for rank in range(0, world):
            total += tl.load(inbox + rank)
        tl.store(out, total)


def all_to_one():
    inbox, sig, out = shmem.aclshmem_create_tensor((64,), torch.int32), shmem.create_signals(1), torch.zeros(1)
    all_to_one_kernel[(1,)](inbox, sig, out, shmem.context())
    if shmem.my_pe() == 0:
        assert out.item() == sum(range(shmem.pe_count()))


def test_sixty_four_ranks():
    check.explore(all_to_one, world_size=64, schedules=3, heap_bytes=1 << 16).raise_if_found()


@triton.jit
def grids_kernel(sig, ctx):
    _ = dl.wait(sig, 1, ctx)


def never():
    grids_kernel[(2,)](shmem.create_signals(1), shmem.context())


def failing():
    if shmem.my_pe() == 1:
        raise ValueError("no such thing")
    shmem.barrier_all()


def unfinished():
    shmem.barrier_all()
    if shmem.my_pe() == 0:
        shmem.barrier_all()


@pytest.mark.parametrize("program, kind", [(never, "deadlock"), (failing, "rank-failed"), (unfinished, "rank-failed")])
def test_nothing_is_left_behind(program, kind):
    environment = dict(os.environ)
    report = check.explore(program, world_size=2, schedules=3)
    assert kind in report.kinds, str(report)
    assert not shmem.aclshmemx_init_status() and scheduler.current is None and scheduler.observer is None
    assert backends.in_process is None and dict(os.environ) == environment
    assert "launch" not in vars(scheduler) and "poll" not in vars(scheduler)
    x = torch.zeros(4, dtype=torch.int32)
    plain_kernel[(4,)](x)  # kernels run as ever
    assert x.tolist() == [1, 2, 3, 4]


@triton.jit
def plain_kernel(x):
    tl.store(x + tl.program_id(0), tl.program_id(0) + 1)


def test_every_rank_of_a_deadlock_is_named_with_its_line_and_signal():
    text = str(check.explore(never, world_size=2, schedules=1))
    for rank in range(2):
        assert f"rank {rank} program (1, 0, 0) of kernel grids_kernel at" in text
        assert f"waits for rank {rank}'s 1 signals, element [0, 0] (heap+0x0): wants >= 1, sees 0" in text
    assert "test_simulator.py" in text and "seed='fifo'" in text


def test_it_cannot_run_inside_itself():
    def inner():
        check.explore(arrive)

    report = check.explore(inner, world_size=2, schedules=1, init=False)
    assert report.kinds == ["rank-failed"] and "inside itself" in str(report)


@pytest.mark.parametrize(
    "options", [dict(world_size=0), dict(world_size=65), dict(schedules=0), dict(resident=0), dict(schedules=2.5)]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        check.explore(arrive, **options)


def test_the_simulation_refuses_where_shmem_is_up():
    attr = shmem.InitAttr(0, 1, "", 1 << 16)
    assert shmem.aclshmem_init(attr) == 0
    try:
        with pytest.raises(TritonDistError, match="not initialised"):
            Simulation(2, strategy_of(None, 0)).run(arrive)
    finally:
        assert shmem.aclshmem_finalize() == 0
    assert triton_dist.backend == "cpu"


def teams_and_teams():
    """Init, finalize and init again; teams; all in one schedule."""
    for generation in range(2):
        attr = shmem.InitAttr(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "", 1 << 16)
        assert shmem.aclshmem_init(attr) == 0, shmem.last_error()
        x = shmem.aclshmem_create_tensor((4,), torch.int32)
        x.fill_(shmem.my_pe() + 10 * generation)
        shmem.barrier_all()
        assert shmem.peer_tensor(x, 1)[0] == 1 + 10 * generation
        shmem.aclshmem_free_tensor(x)
        assert shmem.aclshmem_finalize() == 0


def test_init_and_finalize_twice():
    check.explore(teams_and_teams, world_size=3, schedules=5, init=False).raise_if_found()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def touch_heap():
    shmem.aclshmem_create_tensor((16 << 20,), torch.uint8).fill_(1)


def test_heaps_of_past_schedules_are_freed():
    check.explore(touch_heap, world_size=2, schedules=2)
    before = resident_bytes()
    check.explore(touch_heap, world_size=2, schedules=12).raise_if_found()
    assert resident_bytes() - before < 120 << 20  # twelve schedules touch 32 MiB of heaps each, and the shadow of them
