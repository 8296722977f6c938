"""Host collectives of the device platforms: over the store that the ranks met at. Also across hosts.

A host barrier costs a few round trips to the store (well under a millisecond on one host); no operator needs one.
"""

import time

from ..errors import PeerLostError, WaitTimeoutError
from ..limits import wait_timeout
from . import processes

LOST_CHECK_S = 0.05
LEAVE_S = 5.0


class StoreControl:
    """`identities` [ranks] are the processes (see processes.identity); a team's `serial` keeps its keys apart."""

    def __init__(self, store, rank, identities):
        self.store, self.rank = store, rank
        self.peers = processes.Peers(rank, identities)
        self.world, self.failed = len(identities), False

    def exchange(self, team, text, describe, timeout=None, limit=None):
        """Every member's text, in team order."""
        prefix = f"exchange/{team.serial}/"
        keys = [f"{prefix}{team.epoch}/{member}" for member in team.members]
        mine = f"{prefix}{team.epoch}/{self.rank}"

        def missing():
            late = [rank for rank, key in zip(team.members, keys) if not self.store.check([key])]
            return f"; not arrived yet: rank {', '.join(map(str, late))}"

        try:
            self.store.set(mine, text)
            try:
                self.wait(lambda: self.store.check(keys), lambda: describe() + missing(), timeout, limit)
            except BaseException:
                self.store.delete_key(mine)
                raise
            said = [self.store.get(key).decode() for key in keys]
            if team.epoch > 1:  # whoever is here has read the meeting before the last
                self.store.delete_key(f"{prefix}{team.epoch - 2}/{self.rank}")
        except (PeerLostError, WaitTimeoutError):
            self.failed = True
            raise
        except RuntimeError as error:
            self.failed = True
            raise PeerLostError(
                f"rank {self.rank}: {describe()}: the store is gone, so the process that serves it has died: "
                f"{str(error).splitlines()[0]}"
            ) from error
        team.epoch += 1
        return said

    def wait(self, ready, describe, timeout=None, limit=None):
        """Returns when `ready()`; PeerLostError or WaitTimeoutError otherwise: after `limit` seconds, None: after
        wait_timeout(timeout)."""
        limit, start = limit or wait_timeout(timeout), time.monotonic()
        last = start
        while not ready():
            now = time.monotonic()
            if now - last > LOST_CHECK_S:
                last, lost = now, self.peers.lost()
                if lost and not ready():
                    names = "; ".join(f"rank {rank} {reason}" for rank, reason in lost)
                    raise PeerLostError(f"rank {self.rank}: a peer is gone: {names}\n  rank {self.rank}: {describe()}")
            if now - start > limit:
                raise WaitTimeoutError(
                    f"rank {self.rank}: a wait lasted longer than {limit:g} s "
                    f"(TRITON_DIST_WAIT_TIMEOUT sets the limit)\n  rank {self.rank}: {describe()}"
                )
            time.sleep(0 if now - start < 1e-3 else 1e-4 if now - start < 1 else 1e-3)

    def close(self):
        """After the last exchange: rank 0, which may serve the store, stays until the others have read it."""
        try:
            if self.rank and not self.failed:
                self.store.set(f"left/{self.rank}", "1")
            elif not self.failed:
                keys = [f"left/{rank}" for rank in range(1, self.world)]
                end = time.monotonic() + LEAVE_S
                while keys and not self.store.check(keys) and not self.peers.lost() and time.monotonic() < end:
                    time.sleep(1e-4)
        except RuntimeError:  # the store has gone, and with it the need to wait
            pass
        self.peers.close()
