"""Are the peers' processes alive? Exact for ranks of this host, also against zombies and reused process ids."""

import os
import select
import signal


def _stat(pid):
    """(state, start time in clock ticks since boot) of a process, None when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def identity():
    """What names this process to its peers: host boot, pid namespace, pid, start time. A dict for JSON."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    pid = os.getpid()
    return {
        "host": os.uname().nodename,
        "boot": boot,
        "pids": os.readlink("/proc/self/ns/pid"),
        "pid": pid,
        "start": _stat(pid)[1],
    }


def same_host(one, other):
    """Whether two identities can see each other's /proc entries."""
    return (one["boot"], one["pids"]) == (other["boot"], other["pids"])


class Process:
    """A peer of this host. `gone()` is true once it has exited, even if nobody has reaped it yet."""

    def __init__(self, identity):
        self.pid, self.start = identity["pid"], identity["start"]
        try:
            self.fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.fd = None
        except (OSError, AttributeError):  # a kernel or a sandbox without pidfd_open: /proc tells, a little slower
            self.fd = None
        if self.fd is not None:
            self.poll = select.poll()
            self.poll.register(self.fd, select.POLLIN)
            if self._gone_by_stat():  # the id was reused before we opened it
                self.close()

    def _gone_by_stat(self):
        found = _stat(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.start

    def gone(self):
        return bool(self.poll.poll(0)) if self.fd is not None else self._gone_by_stat()

    def end(self):
        """Asks the process to end (SIGTERM); a reused id is never hit."""
        if self.fd is not None and not self.gone():
            signal.pidfd_send_signal(self.fd, signal.SIGTERM)

    def close(self):
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Peers:
    """The other ranks' processes, as far as they run on this host."""

    def __init__(self, rank, identities):
        mine = identities[rank]
        self.processes = {
            peer: Process(one) for peer, one in enumerate(identities) if peer != rank and same_host(one, mine)
        }

    def lost(self):
        """[(rank, reason)] of the ranks whose process is gone."""
        return [(rank, f"exited (pid {one.pid})") for rank, one in self.processes.items() if one.gone()]

    def end(self):
        for process in self.processes.values():
            try:
                process.end()
            except OSError:  # gone in between
                pass

    def close(self):
        for process in self.processes.values():
            process.close()
