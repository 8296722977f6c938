"""barrier: what was stored before it, on any rank, is there after it."""

import random
import time

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem
from triton_dist.kernels.barrier import barrier, create_barrier_context, reference

import torch
import torch.distributed as dist
import triton

pytestmark = pytest.mark.dist


@triton.jit
def tell_all(cells, value, ctx):
    """Stores `value` into cell `rank` of every rank, with no signal."""
    for peer in range(0, dl.num_ranks(ctx)):
        dl.remote_store(cells + dl.rank(ctx), value, peer, ctx)


def meet(calls, team=0):
    """Every call: all ranks' stores before the barrier are seen after it, and none of those after the next one."""
    rank, world = shmem.team_my_pe(team), shmem.team_n_pes(team)
    context = create_barrier_context(team)
    cells = shmem.aclshmem_create_tensor((world,), torch.int32)
    cells.zero_()
    shmem.barrier_all()
    rng = random.Random(rank)
    for call in range(1, calls + 1):
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.01)
        tell_all[(1,)](cells, call * world + rank, context.table)
        barrier(context)
        seen = cells.clone()
        barrier(context)  # nobody stores the next call's values before all have looked
        assert seen.tolist() == [call * world + r for r in range(world)], call
    context.free()
    shmem.aclshmem_free_tensor(cells)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_stores_before_it_are_seen_after_it(world, ranks):
    ranks(world).run(meet, 40, timeout=120)


def test_many_calls_with_ranks_delayed_at_random(ranks, many):
    ranks(3).run(meet, many(100), timeout=600)  # two calls a turn


def in_a_team(calls):
    me = shmem.my_pe()
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    meet(calls + 10 * (me % 2), teams[me % 2])


def test_disjoint_teams_do_not_wait_for_each_other(ranks):
    ranks(4).run(in_a_team, 20, timeout=120)


def against_torch_distributed():
    dist.init_process_group(shmem.process_group_backend(), rank=shmem.my_pe(), world_size=shmem.pe_count())
    try:
        context = create_barrier_context()
        for _ in range(3):
            barrier(context)
            reference()
    finally:
        dist.destroy_process_group()


def test_it_mixes_with_torch_distributed(ranks):
    ranks(2).run(against_torch_distributed)


def freed():
    context = create_barrier_context()
    context.free()
    for use in (lambda: barrier(context), context.free):
        with pytest.raises(ValueError, match=f"rank {shmem.my_pe()}: barrier: the context was freed"):
            use()


def test_a_freed_context_is_refused(ranks):
    ranks(2).run(freed)
