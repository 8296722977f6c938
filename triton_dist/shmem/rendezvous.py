"""How the ranks of a run meet, and only they: through a torch.distributed store.

Which store, the first that holds:

    one rank                                                none is needed
    InitAttr.ip_port, else the environment's G_IP_PORT      a TCPStore that rank 0 serves there
    torch.distributed is initialised with this rank and size     a prefix of its store
    MASTER_ADDR, MASTER_PORT (torchrun)                     the launcher's store, else one that rank 0 serves there

Keys lie under a generation that counts the inits of a process on a store, so init after finalize starts afresh. A
rank is claimed once in a generation and the runs' identities are compared: a process of another run cannot slip in.
"""

import datetime
import hashlib
import json
import os
import re
import socket
import time

from ..errors import ShmemError
from . import codes

IDENTITY = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "SLURM_JOB_ID")

_stores = {}  # address -> store; kept, so that the next init meets on a server that is still there
_generations = {}  # address -> how many inits have passed


def parse_ip_port(text):
    """(host, port) of "tcp://host:port" or "tcp6://[host]:port"; ShmemError(-1) says what is wrong."""
    found = re.fullmatch(r"tcp://([^\[\]:/]+):(\d+)|tcp6://\[([^\[\]/]+)\]:(\d+)", text)
    if not found:
        raise ShmemError(f"ip_port {text!r}: give tcp://host:port or tcp6://[host]:port", codes.INVALID_PARAM)
    host, port = found[1] or found[3], int(found[2] or found[4])
    if not 1024 < port < 65536:
        raise ShmemError(f"ip_port {text!r}: the port must be above 1024 and below 65536", codes.INVALID_PARAM)
    if len(text) > 63:
        raise ShmemError(f"ip_port {text!r} is longer than 63 characters", codes.INVALID_PARAM)
    return host, port


def serve(host, port, timeout):
    """A TCPStore that this process serves; port 0 lets the system choose."""
    from torch.distributed import TCPStore

    limit = datetime.timedelta(seconds=timeout)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=limit)


def join(host, port, timeout):
    """A TCPStore that another process serves, or will serve within `timeout` seconds."""
    from torch.distributed import TCPStore

    deadline = time.monotonic() + timeout
    while True:  # torch's own retries fill stderr with stack traces
        try:
            socket.create_connection((host, port), timeout=5).close()
            break
        except socket.gaierror as error:
            raise ShmemError(f"{host} is no host name that this machine knows: {error}", codes.BOOTSTRAP) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise ShmemError(
                    f"rank 0 did not open {host}:{port} within {timeout:g} s ({error}): has it failed, or can this "
                    "host not reach it?",
                    codes.TIMEOUT,
                ) from error
            time.sleep(0.02)
    limit = datetime.timedelta(seconds=max(deadline - time.monotonic(), 1))
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def at(address, host, port, serves, timeout):
    """The store at host:port, served by this process or joined; the same one for every init of this process."""
    if address not in _stores:
        try:
            _stores[address] = (serve if serves else join)(host, port, timeout)
        except ShmemError:
            raise
        except (RuntimeError, OSError) as error:
            what = "serve" if serves else "join"
            raise ShmemError(
                f"cannot {what} {address}: {str(error).splitlines()[0]}. If another run uses it, give this run another "
                "port in InitAttr.ip_port or G_IP_PORT, or leave both empty under torchrun",
                codes.BOOTSTRAP,
            ) from error
    return _stores[address]


def keep(address, store):
    """Makes `store` the one that this process meets at under this address."""
    _stores[address] = store


def launch_address():
    """What the launcher's place is called in messages and for `keep`."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"


def forget():
    """Closes the stores that this process has met at."""
    _stores.clear()
    _generations.clear()


def choose(rank, n_ranks, ip_port, timeout):
    """(address, store) to meet at; the address names it in messages and in the table of generations."""
    import torch.distributed as dist

    text = ip_port or os.environ.get("G_IP_PORT", "")
    host_port = parse_ip_port(text) if text else None
    if n_ranks == 1:
        return "this process", dist.HashStore()
    if host_port:
        address = f"{host_port[0]}:{host_port[1]}"
        return address, at(address, *host_port, rank == 0, timeout)
    if dist.is_available() and dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, n_ranks):
        return "the process group's store", dist.distributed_c10d._get_default_store()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ShmemError(
            f"{n_ranks} ranks have no place to meet ({' and '.join(missing)} not set): start them with torchrun, or "
            f"initialise torch.distributed with {n_ranks} ranks first, or set InitAttr.ip_port (or G_IP_PORT) to "
            "tcp://host:port on all ranks",
            codes.BOOTSTRAP,
        )
    # the launcher's agent may serve the port; else rank 0 does, together with torch.distributed's own env:// rendezvous
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = launch_address()
    return address, at(address, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), serves, timeout)


class Meeting:
    """The ranks of one init at a store. Every method raises ShmemError(-6 or -7)."""

    def __init__(self, address, store, rank, n_ranks, timeout, token=""):
        from torch.distributed import PrefixStore

        self.address, self.rank, self.n_ranks = address, rank, n_ranks
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.place = (address, token)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        salt = hashlib.sha256(token.encode()).hexdigest()[:16]
        generation = _generations.get(self.place, 0)
        self.store = PrefixStore(f"triton_dist/shmem/{salt}/{restart}/{generation}", store)
        self.said = []
        self.has_claim = self.is_over = False

    def claim(self):
        """Enters the run, once for each rank. Then the others can rely on this process being the rank."""
        about = {name: os.environ.get(name, "") for name in IDENTITY}
        about["n_ranks"] = self.n_ranks
        if self.rank == 0:
            self._claim_rank()
            self.store.set("run", json.dumps(about))
        self._wait("run", "rank 0 has not come")
        run = json.loads(self.store.get("run"))
        if run != about:
            differ = [
                f"{name} {run.get(name)!r} there, {about[name]!r} here"
                for name in about
                if run.get(name) != about[name]
            ]
            raise ShmemError(
                f"{self.address} serves another run ({', '.join(differ)}): give each run a port of its own in "
                "InitAttr.ip_port or G_IP_PORT, and the same n_ranks to all its ranks",
                codes.BOOTSTRAP,
            )
        if self.rank != 0:
            self._claim_rank()

    def _claim_rank(self):
        key, who = f"claimed/{self.rank}", f"pid {os.getpid()} on {os.uname().nodename}"
        if self.store.add(f"claim/{self.rank}", 1) == 1:
            self.has_claim = True
            self.store.set(key, who)
            return
        self.store.add(f"claim/{self.rank}", -1)
        other = self.store.get(key).decode() if self.store.check([key]) else "another process"
        text = (
            f"rank {self.rank} is claimed twice at {self.address}: by {other} and by {who}: two runs share this "
            "address, or two processes were given the same my_rank"
        )
        if not self.store.check(["complete"]):  # a run that is under way is left alone
            self.store.set("conflict", text)
            self.met()
        raise ShmemError(text, codes.BOOTSTRAP)

    def join(self, value):
        """Everybody's value (anything JSON), in rank order. Who has joined owes the others a vote."""
        self._say("join", value)
        try:
            return self._hear("join")
        except ShmemError as error:
            if self.is_over:  # a conflict; a rank that did not see it may be waiting for the vote
                self._say("vote", [str(error), error.code])
            raise

    def vote(self, value, timeout, lost):
        """Everybody's vote, in rank order, within `timeout` seconds. All see the same votes and so decide alike."""
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self._say("vote", value)
        return self._hear("vote", lost=lost)

    def _say(self, tag, value):
        self.store.set(f"{tag}/{self.rank}", json.dumps(value))
        self.said.append(f"{tag}/{self.rank}")

    def _hear(self, tag, lost=None):
        for rank in range(self.n_ranks):
            self._wait(f"{tag}/{rank}", f"rank {rank} has not come", lost)
        return [json.loads(self.store.get(f"{tag}/{rank}")) for rank in range(self.n_ranks)]

    def _wait(self, key, missing, lost=None):
        pause = 2e-4
        while not self.store.check([key]):
            if not lost and self.store.check(["conflict"]):
                self.met()
                raise ShmemError(self.store.get("conflict").decode(), codes.BOOTSTRAP)
            gone = lost() if lost else []
            if gone and not self.store.check([key]):
                raise ShmemError(", ".join(f"rank {peer} {how} during init" for peer, how in gone), codes.BOOTSTRAP)
            if time.monotonic() > self.deadline:
                raise ShmemError(
                    f"{missing} to {self.address} within {self.timeout:g} s (OptionalAttr.shm_init_timeout): has it "
                    "failed before init, or was it given another address?",
                    codes.TIMEOUT,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def met(self):
        """The next init at this place is another generation, whatever becomes of this one."""
        if not self.is_over:
            self.is_over = True
            _generations[self.place] = _generations.get(self.place, 0) + 1

    def withdraw(self):
        """After a failure: when not everybody came, leaves no trace, so that a retry can succeed."""
        if self.is_over:
            return
        try:
            for key in self.said:
                self.store.delete_key(key)
            if self.has_claim:
                self.store.delete_key(f"claimed/{self.rank}")
                if self.rank == 0:
                    self.store.delete_key("run")
                self.store.add(f"claim/{self.rank}", -1)
        except RuntimeError:  # the store has gone with the process that served it
            pass

    def clear(self):
        """All ranks are through: what they said is needed no more. Claims stay, against late comers."""
        try:
            self.store.set("complete", "1")
            for key in self.said:
                self.store.delete_key(key)
        except RuntimeError:  # rank 0 was quick and has gone already
            pass
