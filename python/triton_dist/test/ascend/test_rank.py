"""rank, num_ranks: who a kernel is, in the world and in teams; a context that is none is refused."""

import pytest
import torch
import triton_dist
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem
from triton_dist.context import MAGIC_WORD

from .refusals import refusal

pytestmark = pytest.mark.dist

POISON = -77


@triton.jit
def who(out, ctx):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    tl.static_assert(me.dtype == tl.int32)
    tl.static_assert(world.dtype == tl.int32)
    pid = tl.program_id(0)
    tl.store(out + 2 * pid, me)
    tl.store(out + 2 * pid + 1, world)


def asked(ctx, programs=3):
    """(rank, num_ranks), as all programs of a kernel agree."""
    out = torch.full((programs, 2), POISON, dtype=torch.int32, device=shmem.device())
    who[(programs,)](out, ctx)
    answers = {tuple(row) for row in out.cpu().tolist()}
    assert len(answers) == 1, f"programs disagree: {answers}"
    return answers.pop()


def in_the_world():
    ctx = shmem.context()
    assert shmem.context() is ctx, "the context of a team is made once"
    return asked(ctx)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_kernel_knows_its_rank_and_the_number_of_ranks(ranks, world):
    assert ranks(world).run(in_the_world) == [(rank, world) for rank in range(world)]


def in_teams():
    """{name: (rank, num_ranks) by the kernel, the same by the host}, for the teams that this rank is in."""
    rows, columns = shmem.team_split_2d(0, 2)
    teams = {
        "world": 0,
        "odd": shmem.team_split_strided(0, 1, 2, 2),
        "last": shmem.team_split_strided(0, 3, 1, 1),
        "row": rows,
        "column": columns,
    }
    teams["of row"] = shmem.team_split_strided(rows, 1, 1, 1)
    mine = {name: team for name, team in teams.items() if team != -1}
    return {name: (asked(shmem.context(team)), (shmem.team_my_pe(team), shmem.team_n_pes(team))) for name, team in mine.items()}


def test_in_a_team_ranks_are_team_ranks(ranks):
    answers = ranks(4).run(in_teams)
    expected = [
        {"world": (0, 4), "row": (0, 2), "column": (0, 2)},
        {"world": (1, 4), "odd": (0, 2), "row": (1, 2), "column": (0, 2), "of row": (0, 1)},
        {"world": (2, 4), "row": (0, 2), "column": (1, 2)},
        {"world": (3, 4), "odd": (1, 2), "last": (0, 1), "row": (1, 2), "column": (1, 2), "of row": (0, 1)},
    ]
    for rank, answer in enumerate(answers):
        assert {name: by_kernel for name, (by_kernel, _) in answer.items()} == expected[rank]
        assert all(by_kernel == by_host for by_kernel, by_host in answer.values())


def after_team_destroy():
    team = shmem.team_split_strided(0, 0, 1, shmem.pe_count())
    ctx = shmem.context(team)
    before = asked(ctx)
    assert before == (shmem.my_pe(), shmem.pe_count())
    shmem.team_destroy(team)
    assert ctx[MAGIC_WORD].item() == 0, "the table of a destroyed team is revoked"
    if triton_dist.interpreted:  # compiled kernels do not look
        out = torch.full((1, 2), POISON, dtype=torch.int32)
        text = refusal(who[(1,)], out, ctx)
        assert "ctx is not a live context table" in text and "who" in text, text
        assert (out == POISON).all()
    again = shmem.team_split_strided(0, 0, 1, shmem.pe_count())
    assert asked(shmem.context(again)) == before, "a new team has a new table"
    assert asked(shmem.context()) == before, "the world's table stands"


def test_the_context_of_a_destroyed_team_is_refused(ranks):
    ranks(2).run(after_team_destroy)


def wrong_contexts():
    device = shmem.device()
    out = torch.full((1, 2), POISON, dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.int32):
        text = refusal(who[(1,)], out, torch.zeros(64, dtype=dtype, device=device))
        assert "ctx" in text and "context table" in text, text
    if triton_dist.interpreted:
        for ctx in (torch.zeros(64, dtype=torch.int64), torch.arange(64), shmem.create_signals(4, torch.int64)):
            text = refusal(who[(1,)], out, ctx)
            assert "ctx is not a live context table" in text, text
        assert "ctx must be the tensor of shmem.context()" in refusal(who[(1,)], out, 12345)
    assert (out.cpu() == POISON).all()
    assert asked(shmem.context()) == (shmem.my_pe(), shmem.pe_count()), "a refusal leaves everything usable"


def test_a_tensor_that_is_no_context_is_refused_by_name(ranks):
    ranks(1).run(wrong_contexts)
