"""What exists between init and finalize: the heap, its allocator and map, the teams; and how the ranks act together."""

import json
import operator
import os
import sys

from .. import context as table
from .. import errors
from ..errors import CollectiveMismatchError, ShmemError
from . import codes, log
from .allocator import Allocator

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_world = None


def caller():
    """file:line of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename[-200:]}:{frame.f_lineno}"


def as_int(value):
    """An int of anything that is an integer (numpy's, too), else None; a bool is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def active():
    """The World of this process, or None."""
    return _world


def current(call):
    """The World of this process; ShmemError(-5) before init and after finalize."""
    if _world is None:
        raise ShmemError(f"{call}: shmem is not initialised: call aclshmem_init on all ranks first", codes.NOT_INITED)
    return _world


def set_active(world):
    global _world
    _world = world
    table.heap_map = world.heap_map if world else None


class World:
    def __init__(self, heap, wait_limit):
        from .teams import Team

        self.heap, self.rank, self.n_ranks, self.nbytes = heap, heap.rank, heap.n_ranks, heap.nbytes
        self.wait_limit = wait_limit  # seconds, None: the default
        self.wait_words = heap.limit_waits(wait_limit) or ()
        self.status = codes.InitStatus.SHM_CREATED
        self.allocator = Allocator(heap.nbytes)
        self.heap_map = table.HeapMap(heap.rank, heap.bases, heap.nbytes, heap.span)
        self.teams = {codes.TEAM_WORLD: Team(codes.TEAM_WORLD, 0, list(range(self.n_ranks)), self.rank)}
        self.team_serial = 0
        self.base = heap.bases[heap.rank]

    def team(self, team_id, call):
        """The team, or ShmemError(-1)."""
        found = self.teams.get(as_int(team_id))
        if found is None:
            raise ShmemError(
                f"rank {self.rank}: {call}: {team_id!r} is no team of this rank (teams: {sorted(self.teams)})",
                codes.INVALID_PARAM,
            )
        return found

    def offset(self, address):
        """The heap offset of one of this rank's own addresses, or None."""
        offset = address - self.base
        return offset if 0 <= offset < self.nbytes else None

    def collective(self, call, team=None, extra=None, problem=None):
        """Every member is here with the same call; returns what each gave as `extra` (anything JSON), in team order.

        `problem` is what this rank finds wrong with its own arguments. Problems and differing calls raise on all
        members alike, so nobody waits for a rank that has given up. A barrier: see the Heap's exchange."""
        team = team or self.teams[codes.TEAM_WORLD]
        where = caller()

        def describe():
            return f"in shmem.{call} on {team}, called at {where}"

        text = json.dumps([call, where, extra, problem])
        said = [json.loads(one) for one in self.heap.exchange(team, text, describe, self.wait_limit)]
        wrong = [f"  rank {rank}: {one[0]}: {one[3]}" for rank, one in zip(team.members, said) if one[3]]
        if wrong:
            raise ShmemError(
                f"rank {self.rank}: {call}: {problem}"
                if problem and len({(one[0], one[3]) for one in said}) == 1
                else f"rank {self.rank}: {call} failed:\n" + "\n".join(wrong),
                codes.INVALID_PARAM,
            )
        lines = [f"  rank {rank}: {one[0]}, called at {one[1]}" for rank, one in zip(team.members, said)]
        if any(one[0] != call for one in said):
            raise CollectiveMismatchError(
                f"rank {self.rank}: the ranks of {team} made different collective calls:\n"
                + "\n".join(lines)
                + "\n  All ranks must make the same collective calls, in the same order and with the same sizes."
            )
        return [one[2] for one in said]

    def close(self):
        if not self.heap.stuck:  # what its device is given now might not return
            for team in self.teams.values():
                team.revoke_context()
        self.heap.close()


def report(error, rank=None):
    """Logs an error for a call that returns codes; returns the code."""
    code = getattr(error, "code", None)
    if code is None:
        code = {
            errors.BackendError: codes.NOT_SUPPORTED,
            errors.PeerLostError: codes.BOOTSTRAP,
            errors.WaitTimeoutError: codes.TIMEOUT,
            errors.DeadlockError: codes.TIMEOUT,
        }.get(type(error), codes.INNER)
    text = str(error) if isinstance(error, errors.TritonDistError) else f"{type(error).__name__}: {error}"
    log.error(text, rank)
    return code or codes.INNER
