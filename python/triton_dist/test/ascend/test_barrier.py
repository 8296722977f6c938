"""Barriers: nobody passes before everybody has come, round after round, launch after launch, team beside team.

Every round writes the epoch into one of two halves of memory (here, and at every peer), meets, and reads all ranks' epochs.
A half is written again only two rounds on, when this rank has met once more, so each value must be exactly this round's:
a barrier that lets a rank through early shows a value of two rounds ago, one that lets it back in twice a value too new.
"""

import random
import time

import pytest
import torch
import triton_dist
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

pytestmark = pytest.mark.dist

ROWS, LANES, POISON = 8, 32, -1
TURN = 24  # iterations that a program comes late by, now and then


@triton.jit
def meet(a, b, epoch, ctx, KIND: tl.constexpr):
    if KIND == "all":
        dl.barrier_all(a, ctx)
    elif KIND == "clear":
        dl.barrier_clear(b, ctx)
    elif KIND == "grid":
        dl.barrier_grid(a, ctx)
    else:
        if (epoch & 1) == 1:
            dl.barrier_all(a, ctx)
        else:
            dl.barrier_clear(b, ctx)


@triton.jit
def one_round(
    a, b, cells, inbox, late, epoch, base, step, ctx, KIND: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Returns the number of wrong values seen. Rank r's grid has base + r * step programs, a row of memory each."""
    me, world, pid = dl.rank(ctx), dl.num_ranks(ctx), tl.program_id(0)
    rows = tl.arange(0, ROWS * LANES)
    own = pid * LANES + tl.arange(0, LANES)
    cells += (epoch & 1) * (ROWS * LANES)
    inbox += (epoch & 1) * (world * ROWS * LANES)
    if ((epoch * 5 + me * 3 + pid * 7) & 15) == 0:
        for _turn in range(0, TURN):
            tl.atomic_add(late + pid, 1)
    tl.store(cells + own, epoch)
    for peer in range(0, world):
        dl.remote_store(inbox + me * (ROWS * LANES) + own, epoch, peer, ctx)
    meet(a, b, epoch, ctx, KIND)
    bad = 0
    for peer in range(0, world):
        live = rows < (base + peer * step) * LANES
        pulled = dl.remote_load(cells + rows, peer, ctx, live, epoch)
        pushed = tl.load(inbox + peer * (ROWS * LANES) + rows, mask=live, other=epoch)
        bad += tl.sum(((pulled != epoch) | (pushed != epoch)).to(tl.int32), 0)
    return bad


@triton.jit
def rounds_of(
    a, b, cells, inbox, late, wrong, first, rounds, base, step, ctx, KIND: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    bad = 0
    for i in range(0, rounds):
        bad += one_round(a, b, cells, inbox, late, first + i, base, step, ctx, KIND, ROWS, LANES, TURN)
    tl.store(wrong + tl.program_id(0), bad)


class Memory:
    """What the rounds of one team of `size` ranks use. Made collectively by all ranks of the world."""

    def __init__(self, size, dtype=torch.int32):
        self.a, self.b = shmem.create_signals(size + 3, dtype), shmem.create_signals(1, dtype)
        self.cells = shmem.aclshmem_create_tensor((2, ROWS, LANES), torch.int32)
        self.inbox = shmem.aclshmem_create_tensor((2, size, ROWS, LANES), torch.int32)
        self.cells.fill_(POISON)
        self.inbox.fill_(POISON)
        self.late = torch.zeros(ROWS, dtype=torch.int32, device=shmem.device())
        self.wrong = torch.full((ROWS,), POISON, dtype=torch.int32, device=shmem.device())
        shmem.barrier_all()

    def play(self, kind, first, rounds, team=0, base=1, step=0):
        """Epochs first .. first + rounds - 1 in one launch, checked."""
        programs = base + shmem.team_my_pe(team) * step
        self.wrong.fill_(POISON)
        rounds_of[(programs,)](
            self.a, self.b, self.cells, self.inbox, self.late, self.wrong, first, rounds, base, step,
            shmem.context(team), KIND=kind, ROWS=ROWS, LANES=LANES, TURN=TURN,
        )  # fmt: skip
        bad = self.wrong.cpu()[:programs].tolist()
        assert bad == [0] * programs, f"{kind}, epochs {first} to {first + rounds - 1}: wrong values by program: {bad}"
        return first + rounds

    def free(self):
        for tensor in (self.a, self.b, self.cells, self.inbox):
            shmem.aclshmem_free_tensor(tensor)


def barrier_rounds(kind, rounds):
    world = shmem.pe_count()
    for dtype in (torch.int32, torch.int64):
        memory = Memory(world, dtype)
        if triton_dist.backend == "ascend" and dtype == torch.int64 and kind != "all":
            with pytest.raises(Exception, match="64-bit atomics"):
                memory.play(kind, 1, 1)
            continue
        part = rounds if dtype == torch.int32 else rounds // 5
        epoch = memory.play(kind, 1, part)
        time.sleep(random.random() * 0.01)
        epoch = memory.play(kind, epoch, part)
        shmem.barrier_all()
        calls = epoch - 1
        a, b = memory.a[:, 0].cpu().tolist(), memory.b[:, 0].cpu().tolist()
        if kind == "all":
            assert a[: world + 1] == [calls] * (world + 1)
        assert b == [0], "barrier_clear leaves its signal as it found it"
        memory.free()


@pytest.mark.parametrize("kind", ["all", "clear", "alternating"])
@pytest.mark.parametrize("world, rounds", [(1, 20), (2, 150), (3, 60), (4, 25)])
def test_no_rank_passes_before_all_have_come_and_a_second_launch_goes_on(ranks, world, rounds, kind):
    ranks(world).run(barrier_rounds, kind, rounds)


def grid_rounds(rounds):
    world = shmem.pe_count()
    for dtype in (torch.int32, torch.int64):
        memory = Memory(world, dtype)
        if triton_dist.backend == "ascend" and dtype == torch.int64:
            with pytest.raises(Exception, match="64-bit atomics"):
                memory.play("grid", 1, 1)
            continue
        epoch = 1
        for base, step in ((4, 0), (1, 0), (1, 1), (8, 0)):  # in the third, ranks have grids of different sizes
            part = rounds if dtype == torch.int32 else 5
            epoch = memory.play("grid", epoch, part, base=base, step=step)
        shmem.barrier_all()
        signals = memory.a[:, 0].cpu().tolist()
        assert signals == [epoch - 1] * (world + 1) + [0, epoch - 1], "epochs, no arrival left, the gate's epoch"
        memory.free()


@pytest.mark.parametrize("world, rounds", [(1, 10), (2, 40), (3, 15)])
def test_no_program_of_any_rank_passes_before_all_programs_have_come(ranks, world, rounds):
    ranks(world).run(grid_rounds, rounds)


def grid_of_three_dimensions():
    world = shmem.pe_count()
    sig = shmem.create_signals(world + 3)
    arrived = shmem.create_signals(1)
    seen = torch.full((8,), POISON, dtype=torch.int32, device=shmem.device())
    arrive_3d[(2, 2, 2)](sig, arrived, seen, shmem.context())
    assert seen.cpu().tolist() == [8 * world] * 8


@triton.jit
def arrive_3d(sig, arrived, seen, ctx):
    pid = (tl.program_id(0) * 2 + tl.program_id(1)) * 2 + tl.program_id(2)
    for peer in range(0, dl.num_ranks(ctx)):
        dl.notify(arrived, peer, ctx, 1, "add")
    dl.barrier_grid(sig, ctx)
    token = dl.wait(arrived, 0, ctx, "ne")
    tl.store(seen + pid, token)


def test_barrier_grid_counts_the_programs_of_all_three_grid_axes(ranks):
    ranks(2).run(grid_of_three_dimensions)


# -- teams


def strided_team():
    team = shmem.team_split_strided(0, 0, 2, 2)  # ranks 0 and 2 of 3
    for kind in ("all", "clear", "grid"):
        memory = Memory(2)
        if team != -1:
            epoch = memory.play(kind, 1, 30, team)
            memory.play(kind, epoch, 30, team)
        shmem.barrier_all()


def test_a_strided_team_meets_without_the_ranks_outside_of_it(ranks):
    ranks(3).run(strided_team)


def disjoint_teams():
    row, _ = shmem.team_split_2d(0, 2)  # {0, 1} and {2, 3}
    first_row = shmem.my_pe() < 2
    for kind in ("all", "clear"):
        memory = Memory(2)
        epoch = 1
        if first_row:  # while the other team is elsewhere: a barrier that counted it would never end
            epoch = memory.play(kind, epoch, 40, row)
        shmem.barrier_all()
        epoch = memory.play(kind, epoch, 30 if first_row else 80, row)  # now side by side
        shmem.barrier_all()
        assert not first_row or epoch == 71


def test_disjoint_teams_on_the_same_signals_do_not_disturb_each_other(ranks):
    ranks(4).run(disjoint_teams)


@triton.jit
def two_teams(
    a1, b1, cells1, inbox1, ctx1, a2, b2, cells2, inbox2, ctx2, late, wrong, rounds, KIND: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    bad = 0
    for i in range(0, rounds):
        bad += one_round(a1, b1, cells1, inbox1, late, 1 + i, 1, 0, ctx1, KIND, ROWS, LANES, TURN)
        bad += one_round(a2, b2, cells2, inbox2, late, 1 + i, 1, 0, ctx2, KIND, ROWS, LANES, TURN)
    tl.store(wrong, bad)


def overlapping_teams():
    row, column = shmem.team_split_2d(0, 2)  # 4 ranks: {0, 1} {2, 3} and {0, 2} {1, 3}
    for kind in ("all", "clear", "alternating"):
        one, two = Memory(2), Memory(2)
        wrong = torch.full((1,), POISON, dtype=torch.int32, device=shmem.device())
        two_teams[(1,)](
            one.a, one.b, one.cells, one.inbox, shmem.context(row), two.a, two.b, two.cells, two.inbox,
            shmem.context(column), one.late, wrong, 40, KIND=kind, ROWS=ROWS, LANES=LANES, TURN=TURN,
        )  # fmt: skip
        assert wrong.cpu().tolist() == [0], kind
        shmem.barrier_all()


def test_a_rank_meets_its_row_and_its_column_in_turns(ranks):
    ranks(4).run(overlapping_teams)


# -- the host's barrier


def host_rounds(rounds):
    teams = [0]
    if shmem.pe_count() == 3:
        teams += [shmem.team_split_strided(0, 0, 2, 2), shmem.team_split_strided(0, 1, 1, 2)]  # they overlap in rank 2
    for team in teams:
        cells = shmem.aclshmem_create_tensor((2, 16), torch.int64)
        cells.fill_(POISON)
        shmem.barrier_all()
        if team == -1:
            continue
        me, size = shmem.team_my_pe(team), shmem.team_n_pes(team)
        theirs = [shmem.peer_tensor(cells, peer, team) for peer in range(size)]
        for epoch in range(1, rounds + 1):
            cells[epoch & 1].fill_(epoch * 10 + me)
            if random.random() < 0.05:
                time.sleep(random.random() * 0.002)
            shmem.barrier_all(team)
            for peer in range(size):
                seen = theirs[peer][epoch & 1].cpu()
                assert (seen == epoch * 10 + peer).all(), f"team {team}, epoch {epoch}, peer {peer}: {seen}"


@pytest.mark.parametrize("world, rounds", [(1, 50), (2, 300), (3, 150)])
def test_no_rank_leaves_the_host_barrier_before_all_have_come(ranks, world, rounds):
    ranks(world).run(host_rounds, rounds)


@triton.jit
def write_cell(cells, epoch, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(cells + lanes, (epoch * 8 + dl.rank(ctx)) * LANES + lanes)


def host_barrier_between_launches(rounds):
    me, world, ctx = shmem.my_pe(), shmem.pe_count(), shmem.context()
    memory = Memory(world)
    cells = shmem.aclshmem_create_tensor((2, LANES), torch.int32)
    cells.fill_(POISON)
    device_epoch = 1
    for epoch in range(1, rounds + 1):
        write_cell[(1,)](cells[epoch & 1], epoch, ctx, LANES=LANES)
        shmem.barrier_all()
        for peer in range(world):
            seen = shmem.peer_tensor(cells, peer)[epoch & 1].cpu()
            want = (epoch * 8 + peer) * LANES + torch.arange(LANES, dtype=torch.int32)
            assert torch.equal(seen, want), f"rank {me}, epoch {epoch}, peer {peer}"
        if epoch % 8 == 0:
            device_epoch = memory.play("all", device_epoch, 5)


def test_the_host_barrier_completes_the_kernels_before_it_and_mixes_with_device_barriers(ranks):
    ranks(2).run(host_barrier_between_launches, 100)
