"""Who is blocked on what, on every rank: one row a rank in shared memory, and the proof of a deadlock.

A deadlock is proven, not guessed. Every rank that waits keeps polling. When all ranks are BLOCKED, and each of them
finishes whole unsuccessful poll rounds while no epoch changes, then nobody ran in between, so no signal can change any
more. The first rank to see that marks the verdict in every row; all ranks raise the same report.

A rank in host code (not in a wait of this library) cannot be proven stuck: such a wait ends by its time limit. But when
no rank computes anything for seconds, a warning with the same report is printed once.
"""

import os
import sys
import threading
import time

import numpy as np

from ..errors import DeadlockError, PeerLostError, WaitTimeoutError
from ..limits import wait_timeout
from .handles import atomic

HOST, RUNNING, BLOCKED, FAILED = range(4)
STATE, EPOCH, POLLS, VERDICT, SINCE, TEXT_BYTES, PID, HEAD_WORDS = 0, 1, 2, 3, 4, 5, 6, 8
TEXT_LIMIT = 8192
OPERATORS = os.path.join("", "triton_dist", "kernels", "")  # in the path of a source line: a wait that the user did not write
ROW_BYTES = HEAD_WORDS * 8 + TEXT_LIMIT
VERDICT_BYTES, VERDICT_HEAD = 1 << 16, 16  # the report of the latest deadlock, after the rows: length, claim, text

QUIET_S = 0.005  # a wait shorter than this never touches the board
LOST_CHECK_S = 0.05  # how often a waiting rank asks whether its peers are alive
# A peer whose kernel failed has this long to start another one, or to meet the others, before waits for it end: little when
# it failed during the wait, longer when it had failed before.
FAILED_GRACE_S, FAILED_BEFORE_GRACE_S = 1.0, 8.0
IDLE_FROM_S, IDLE_WARN_S = 1.0, 4.0  # ranks that used no processor between these times of a wait are idle


class Board:
    """`memory` is shared by all ranks, zeroed, at least `Board.nbytes(world)` long. `lost()` lists (rank, reason) of the
    ranks whose process is gone."""

    @staticmethod
    def nbytes(world):
        return world * ROW_BYTES + VERDICT_BYTES

    def __init__(self, memory, rank, world, lost):
        raw = np.frombuffer(memory, np.uint8, self.nbytes(world))
        raw, self.verdict = raw[: world * ROW_BYTES].reshape(world, ROW_BYTES), raw[world * ROW_BYTES :]
        self.head = raw[:, : HEAD_WORDS * 8].view(np.int64)
        self.text = raw[:, HEAD_WORDS * 8 :]
        self.rank, self.world, self.lost = rank, world, lost
        self.row = self.head[rank]
        self.row[PID] = os.getpid()
        self.limit = None  # seconds that a wait may last unless TRITON_DIST_WAIT_TIMEOUT says otherwise
        self.alone = lambda: threading.active_count() == 1  # another thread of this process could send a signal

    # -- what this rank does now
    def _enter(self, state, text=None):
        if text is not None:
            data = text.encode(errors="replace")
            if len(data) > TEXT_LIMIT:
                data = data[: TEXT_LIMIT - 16] + b"\n    ..."
            self.text[self.rank, : len(data)] = np.frombuffer(data, np.uint8)
            self.row[TEXT_BYTES] = len(data)
        self.row[SINCE] = time.monotonic_ns()
        self.row[EPOCH] += 1  # before the state: who sees the new state sees a new epoch
        self.row[STATE] = state

    def running(self):
        self._enter(RUNNING)

    def host(self):
        self._enter(HOST)

    def failed(self, text):
        self._enter(FAILED, text)

    # -- waiting
    def wait(self, ready, describe, timeout=None, loops=None, since=None, undo=lambda: None):
        """Returns when `ready()`; raises DeadlockError, PeerLostError or WaitTimeoutError, after `undo()`.

        `describe()` gives this rank's part of a report. `loops` are poll loops written by the user: `due()` whether they
        are to run again, `rerun()` does so and tells whether one moved on (this wait then returns), `settled()` whether
        all are as good as blocked. `since` is when the work that waits began (time.monotonic_ns), for blaming a failed
        peer.
        """
        since = since or time.monotonic_ns()
        before, self.published = int(self.row[STATE]), False
        limit = timeout or wait_timeout(self.limit)
        try:
            self._wait(ready, describe, limit, loops, since)
        except BaseException:
            undo()
            raise
        finally:
            if self.published:
                # who has met the others again is no longer the rank whose kernel failed
                self._enter(HOST if before == FAILED else before)

    def _wait(self, ready, describe, limit, loops, since):
        start = last_lost = time.monotonic()
        snapshot, ticks, warned = None, None, False
        while True:
            done = ready()
            if self.published and self.row[VERDICT] == self.row[EPOCH]:
                # looked at after `ready`: a rank that has raised the verdict may go on and release this one, but all
                # ranks end alike
                raise self._deadlock()
            if done:
                return
            now = time.monotonic()
            waited = now - start
            looked = provable = True
            if loops is not None:
                looked = loops.due()
                if looked:
                    if self.published:
                        self.row[STATE] = RUNNING
                    if loops.rerun():
                        return
                    if self.published:
                        self.row[STATE] = BLOCKED
                provable = loops.settled()
            if waited > QUIET_S:
                if not self.published and provable and self.alone():
                    self._enter(BLOCKED, describe())
                    self.published = True
                if self.published:
                    self.row[POLLS] += looked
                    snapshot = self._prove(snapshot)
                if now - last_lost > LOST_CHECK_S:
                    last_lost = now
                    try:
                        self._check_peers(since, describe)
                    except PeerLostError:
                        if ready():  # it was the last to come, went on and ended between two looks
                            return
                        raise
                    if ticks is None and waited > IDLE_FROM_S:
                        ticks = self._others_ticks()
                    elif not warned and waited > IDLE_WARN_S:
                        warned = True
                        self._warn_if_idle(ticks, waited, limit, describe)
                if waited > limit:
                    text = self.report(describe())
                    if ready():
                        return
                    raise WaitTimeoutError(
                        f"rank {self.rank}: a wait lasted longer than {limit:g} s (TRITON_DIST_WAIT_TIMEOUT sets the limit)\n"
                        + text
                    )
            time.sleep(0 if waited < 2e-4 or not provable else 2e-5 if waited < 1 else 5e-4)

    def _prove(self, snapshot):
        """Proof by two looks. The first reads the states, then the polls; the second the polls, then the states: so the
        polls between them fell wholly into a time in which all were blocked."""
        polls = self.head[:, POLLS].copy()
        states, epochs = self.head[:, STATE].copy(), self.head[:, EPOCH].copy()
        if not (states == BLOCKED).all():
            return None
        if snapshot is None or (snapshot[0] != epochs).any():
            return epochs, self.head[:, POLLS].copy()
        if (polls >= snapshot[1] + 2).all():
            # One rank writes the report, before anybody raises: who has raised may be somewhere else a moment later. It
            # stands until every rank has read it, for only when all are blocked again can another verdict follow.
            claim = int(epochs.sum())
            if atomic("xchg", self.verdict.ctypes.data + 8, claim, np.int64) != claim:
                data = self.report().encode(errors="replace")[: VERDICT_BYTES - VERDICT_HEAD]
                self.verdict[VERDICT_HEAD : VERDICT_HEAD + len(data)] = np.frombuffer(data, np.uint8)
                self.verdict[:8].view(np.int64)[0] = len(data)
                self.head[:, VERDICT] = epochs
                raise self._deadlock()
        return snapshot

    def _deadlock(self):
        length = int(self.verdict[:8].view(np.int64)[0])
        text = bytes(self.verdict[VERDICT_HEAD : VERDICT_HEAD + length]).decode(errors="replace")
        headline = "every rank is blocked and no signal can change any more"
        if ": polls " in text:
            headline = "every rank is blocked, or polls words that stay the same, thousands of times over"
        todo = "Look for a notify that was never sent, sent to another rank or index, or sent with a smaller value."
        if OPERATORS in text:
            todo = (
                "An operator of triton_dist.kernels waits: did all ranks make the same calls, with operands that were not "
                "refused? TRITON_DIST_CHECK_CALLS=1 compares each call."
            )
        return DeadlockError(f"rank {self.rank}: deadlock: {headline}\n{text}\n  {todo}")

    def raise_lost(self, lost, own):
        names = "; ".join(f"rank {rank} {reason}" for rank, reason in lost)
        raise PeerLostError(
            f"rank {self.rank}: a peer is gone while this rank waits for it: {names}\n{self.report(own)}\n"
            "  Look at what it printed last: it failed, was killed, or returned before this rank needed it."
        )

    def _check_peers(self, since, describe):
        lost = self.lost()
        if lost:
            self.raise_lost(lost, describe())
        now = time.monotonic_ns()
        for rank, row in enumerate(self.head):
            grace = FAILED_GRACE_S if row[SINCE] > since else FAILED_BEFORE_GRACE_S
            if row[STATE] == FAILED and now - max(row[SINCE], since) > grace * 1e9:
                raise PeerLostError(
                    f"rank {self.rank}: waits for rank {rank}, whose kernel failed:\n{self.report(describe())}"
                )

    def _others_ticks(self):
        """Processor time, in clock ticks, that each rank outside of a wait has used."""
        used = {}
        for rank, row in enumerate(self.head):
            if rank != self.rank and row[STATE] != BLOCKED:
                try:
                    with open(f"/proc/{row[PID]}/stat") as file:
                        fields = file.read().rpartition(")")[2].split()
                    used[rank] = int(fields[11]) + int(fields[12])
                except OSError:
                    pass
        return used

    def _warn_if_idle(self, before, waited, limit, describe):
        now = self._others_ticks()
        if now.keys() == before.keys() and all(now[rank] - before[rank] <= 5 for rank in now):
            print(
                f"[WARN] triton_dist: rank {self.rank} has waited {waited:.0f} s, and no rank computes anything. If nobody "
                f"is to wake it, this is a hang; the wait ends after {limit:g} s (TRITON_DIST_WAIT_TIMEOUT).\n"
                + self.report(describe()),
                file=sys.stderr,
                flush=True,
            )

    def report(self, own=None):
        """One paragraph a rank. `own` replaces this rank's published text."""
        lines = []
        gone = dict(self.lost())
        for rank, row in enumerate(self.head):
            text = bytes(self.text[rank, : int(row[TEXT_BYTES])]).decode(errors="replace")
            state = int(row[STATE])
            if rank == self.rank and own is not None:
                text, state = own, BLOCKED
            if rank in gone:
                lines.append(f"  rank {rank}: {gone[rank]}")
            elif state in (BLOCKED, FAILED):
                lines.append(f"  rank {rank}: {text}")
            else:
                what = "running a kernel" if state == RUNNING else "in host code (not in a wait of this library)"
                lines.append(f"  rank {rank}: {what} since {(time.monotonic_ns() - row[SINCE]) / 1e9:.1f} s")
        return "\n".join(lines)
