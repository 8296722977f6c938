"""Teams: subsets of the ranks with ranks, a barrier and a context table of their own. Team 0 is the world, -1 is
none."""

from dataclasses import dataclass, field

import torch

from .. import context as table
from ..errors import CollectiveMismatchError, ShmemError
from . import codes, log, world
from .attributes import TeamConfig


@dataclass
class Team:
    """`members[i]` is the world rank of team rank i; `serial` is unique among all teams that a rank was ever in."""

    id: int
    serial: int
    members: list
    rank: int  # this rank's place in members
    config: TeamConfig = field(default_factory=TeamConfig)
    bases: list = None  # arrivals that the members had when the team was made
    epoch: int = 0  # meetings so far
    table: torch.Tensor = None

    def __post_init__(self):
        self.bases = self.bases or [0] * len(self.members)

    @property
    def size(self):
        return len(self.members)

    def __str__(self):
        return "team 0 (world)" if self.id == 0 else f"team {self.id} (ranks {', '.join(map(str, self.members))})"

    def revoke_context(self):
        """A kernel that gets the table of a team that is gone recognises it."""
        if self.table is not None:
            self.table[table.MAGIC_WORD] = 0
            self.table = None


def _find(team_id):
    made = world.active()
    return made.teams.get(world.as_int(team_id)) if made else None


def my_pe():
    """This process's rank, -1 when not initialised."""
    return team_my_pe(codes.TEAM_WORLD)


def pe_count():
    """Number of ranks, -1 when not initialised."""
    return team_n_pes(codes.TEAM_WORLD)


def team_my_pe(team_id):
    """This process's rank in the team, -1 when it is no team of this rank."""
    team = _find(team_id)
    return team.rank if team else -1


def team_n_pes(team_id):
    """Number of ranks in the team, -1 when it is no team of this rank."""
    team = _find(team_id)
    return team.size if team else -1


def team_translate_pe(src, pe, dst):
    """The rank in team `dst` of rank `pe` of team `src`; -1 when there is none."""
    here, there = _find(src), _find(dst)
    pe = world.as_int(pe)
    if here is None or there is None or pe is None or not 0 <= pe < here.size:
        return -1
    member = here.members[pe]
    return there.members.index(member) if member in there.members else -1


def team_split_strided(parent, start, stride, size):
    """Makes the team of the parent's ranks start, start + stride, ... (`size` of them). Collective over the parent.

    Returns the team's id, alike on its members; -1 on the parent's other ranks, and on all of them when the arguments
    name ranks that the parent does not have (logged). -5 when not initialised. Differing arguments raise
    CollectiveMismatchError on all ranks."""
    call = f"team_split_strided({parent}, {start}, {stride}, {size})"
    made = world.active()
    if made is None:
        log.error(f"{call}: shmem is not initialised")
        return codes.NOT_INITED
    team = _find(parent)
    if team is None:
        log.error(f"{call}: {parent!r} is no team of this rank", made.rank)
        return codes.INVALID_PARAM
    start, stride, size = (world.as_int(value) for value in (start, stride, size))
    fits = None not in (start, stride, size) and size >= 1 and (stride >= 1 or size == 1)
    if not fits or not (0 <= start and start + stride * (size - 1) < team.size):
        made.collective(call, team)
        log.error(f"{call}: the parent has ranks 0 to {team.size - 1}; stride and size are at least 1", made.rank)
        return codes.INVALID_PARAM
    chosen = [team.members[start + stride * index] for index in range(size)]
    return _split(made, team, call, [chosen])[0]


def team_split_2d(parent, x_range):
    """Arranges the parent's ranks in rows of `x_range` and makes a team of each row and of each column; the last row
    may be shorter. Collective over the parent. Returns (this rank's row team, its column team); ShmemError for a bad
    x_range or parent."""
    call = f"team_split_2d({parent}, {x_range})"
    made = world.current(call)
    team = made.team(parent, call)
    asked, x_range = x_range, world.as_int(x_range)
    if x_range is None or x_range < 1:
        made.collective(call, team, problem=f"x_range is {asked!r}: give 1 or more")
    row, column = divmod(team.rank, x_range)
    rows = team.members[row * x_range : (row + 1) * x_range]
    return tuple(_split(made, team, call, [rows, team.members[column::x_range]]))


def _split(made, parent, call, groups):
    """One new team for each of `groups` (world ranks); returns ids, -1 for a group that this rank is not in."""
    mine = sum(1 << team_id for team_id in made.teams)  # as bits: 2048 numbers would not fit into an exchange
    said = made.collective(call, parent, extra=[f"{mine:x}", made.team_serial])
    taken = [int(bits, 16) for bits, _ in said]
    used = {team_id for team_id in range(codes.MAX_TEAMS) if any(bits >> team_id & 1 for bits in taken)}
    free = [team_id for team_id in range(codes.MAX_TEAMS) if team_id not in used][: len(groups)]
    if len(free) < len(groups):
        raise ShmemError(
            f"rank {made.rank}: {call}: all {codes.MAX_TEAMS} teams are in use: destroy some", codes.INVALID_VALUE
        )
    serial = max(serial for _, serial in said)
    counters = made.collective(call, parent, extra=[made.heap.counter(team_id) for team_id in free])
    count = dict(zip(parent.members, counters))
    made.team_serial = serial + len(groups)
    ids = []
    for index, (team_id, members) in enumerate(zip(free, groups)):
        if made.rank not in members:
            ids.append(codes.TEAM_INVALID)
            continue
        bases = [count[member][index] for member in members]
        made.teams[team_id] = Team(team_id, serial + 1 + index, members, members.index(made.rank), bases=bases)
        ids.append(team_id)
    return ids


def team_destroy(team_id):
    """Ends a team. Collective over it; its context table is revoked. -1 is ignored; the world cannot be destroyed."""
    if team_id == codes.TEAM_INVALID:
        return
    call = f"team_destroy({team_id})"
    made = world.current(call)
    team = made.team(team_id, call)
    if team_id == codes.TEAM_WORLD:
        raise ShmemError(f"rank {made.rank}: {call}: the world team ends with aclshmem_finalize", codes.INVALID_PARAM)
    made.collective(call, team)
    team.revoke_context()
    del made.teams[team_id]


def aclshmem_team_get_config(team):
    """The TeamConfig of a team; ShmemError when it is no team of this rank."""
    call = f"aclshmem_team_get_config({team})"
    return world.current(call).team(team, call).config


def context(team=codes.TEAM_WORLD):
    """The context table of a team for kernels: int64 [8 + ranks] on this rank's device, layout in
    triton_dist/context.py.

    Made once and kept; ranks in it are team ranks. Its first word becomes 0 with team_destroy and finalize.
    """
    call = f"context({team})"
    made = world.current(call)
    found = made.team(team, call)
    if found.table is None:
        bases = [made.heap.bases[member] for member in found.members]
        words = table.table_words(found.rank, bases, made.nbytes)
        room = torch.tensor(words + table.spare_words(words), dtype=torch.int64, device=made.heap.device)
        found.table = room[: len(words)]
    return found.table


def barrier_all(team=codes.TEAM_WORLD):
    """Host barrier of a team: earlier stores, puts and (on devices) the current device's work of all members are
    visible to all of them afterwards. DeadlockError, PeerLostError or WaitTimeoutError when a member cannot come; all
    name it."""
    call = f"barrier_all({team})"
    made = world.current(call)
    made.collective(call, made.team(team, call))


def check_alike(call, team=codes.TEAM_WORLD, problem=None):
    """Raises CollectiveMismatchError on all members of the team alike unless all give the same text. A full barrier.

    For collective functions built on this library: `call` is the call as the user would write it, with every argument
    that the ranks must agree on, e.g. "create_context(M=8)". `problem` is what this rank finds wrong with its own arguments,
    None: nothing. If any rank has one, all get a ValueError that names it.
    """
    made = world.current(call)
    try:
        made.collective(call, made.team(team, call), problem=problem)
    except ShmemError as error:
        if error.code == codes.INVALID_PARAM and not isinstance(error, CollectiveMismatchError):
            raise ValueError(str(error)) from None
        raise


def gather(call, value, team=codes.TEAM_WORLD):
    """Every member's `value` (anything JSON), in team order. All give the same `call`, as for `check_alike`. A full barrier."""
    made = world.current(call)
    return made.collective(call, made.team(team, call), extra=value)
