"""The control segment of the cpu platform: who has arrived where, what everybody said, and the deadlock board.

    arrivals [teams, world] int64   how often rank r has arrived at a meeting of team t; only r writes its own count
    slots    [world, 3, SLOT]       what rank r says: two for the world team in turns, one for all other teams
    board                           see interpreter/board.py

A world exchange is one barrier: a rank rewrites a slot only after the next meeting, for which everybody has read it.
Teams share the third slot, so a team's exchange ends with a second meeting.
"""

import numpy as np

from ..errors import ShmemError
from ..interpreter import Board, atomic_add
from ..interpreter.board import EPOCH, VERDICT
from . import segments

MAX_TEAMS = 2048
SLOT = 8192
LENGTH = 8  # bytes at a slot's start that hold its text's length


class Control:
    def __init__(self, reservation, address, rank, world):
        self.memory = reservation.array(address, self.nbytes(world))
        flat = np.frombuffer(self.memory, np.uint8)
        board, slots = self._layout(world)
        self.arrivals = flat[:board].view(np.int64)[: MAX_TEAMS * world].reshape(MAX_TEAMS, world)
        self.slots = flat[slots : slots + world * 3 * SLOT].reshape(world, 3, SLOT)
        self.rank, self.turn, self.address = rank, 0, address
        nobody = list  # until the peers' processes are known
        self.board = Board(memoryview(self.memory)[board:slots], rank, world, nobody)
        self.board.host()

    @staticmethod
    def _layout(world):
        board = segments.round_up(MAX_TEAMS * world * 8, 4096)
        return board, board + segments.round_up(Board.nbytes(world), 4096)

    @classmethod
    def nbytes(cls, world):
        return cls._layout(world)[1] + world * 3 * SLOT

    def _arrive(self, team, count):
        word = self.address + (team.id * self.arrivals.shape[1] + self.rank) * 8
        atomic_add(word, count, 8)  # a release: on Arm a plain store could overtake the data

    def meet(self, team, describe, timeout):
        """A barrier of the team. On an error the arrival is taken back, so that the next call starts clean."""
        target = np.array(team.bases, np.int64) + (team.epoch + 1)
        row, head, members = self.arrivals[team.id], self.board.head, team.members

        def ready():
            # first the verdicts: a member that is judged has not taken its arrival back yet
            judged = (head[members, VERDICT] == head[members, EPOCH]).any()
            return not judged and bool((row[members] >= target).all())

        def text():
            late = [rank for rank, seen, wanted in zip(members, row[members], target) if seen < wanted]
            return f"{describe()}; not arrived yet: rank {', '.join(map(str, late))}" if late else describe()

        self._arrive(team, 1)
        self.wait(ready, text, timeout, lambda: self._arrive(team, -1))
        for member in members:
            atomic_add(self.address + (team.id * self.arrivals.shape[1] + member) * 8, 0, 8)  # an acquire
        team.epoch += 1

    def wait(self, ready, describe, timeout, retract=lambda: None):
        """board.wait; `retract` is called before an error leaves."""
        self.board.wait(ready, describe, timeout, undo=retract)

    def exchange(self, team, text, describe, timeout):
        """Every member's text, in team order."""
        data = text.encode()
        if len(data) > SLOT - LENGTH:
            raise ShmemError(f"rank {self.rank}: {len(data)} bytes are too many to exchange (at most {SLOT - LENGTH})")
        slot = 2
        if team.id == 0:
            slot = self.turn = 1 - self.turn
        mine = self.slots[self.rank, slot]
        mine[LENGTH : LENGTH + len(data)] = np.frombuffer(data, np.uint8)
        mine[:LENGTH].view(np.int64)[0] = len(data)
        try:
            self.meet(team, describe, timeout)
        except BaseException:
            self.turn = 1 - self.turn if team.id == 0 else self.turn
            raise
        said = [self._read(member, slot) for member in team.members]
        if slot == 2:
            self.meet(team, describe, timeout)
        return said

    def _read(self, rank, slot):
        one = self.slots[rank, slot]
        length = int(one[:LENGTH].view(np.int64)[0])
        return bytes(one[LENGTH : LENGTH + length]).decode()
