"""Runs a function on several ranks, each a process, within a time limit; leaves no process behind, whatever happens.

    from triton_dist.testing import Ranks, run_ranks, shared_ranks

    def body(n):                                  # a module-level function of any file, also of a test file
        return shmem.my_pe() + n

    assert run_ranks(body, 2, 10) == [10, 11]     # two fresh processes
    with Ranks(2) as ranks:                       # two processes that run one function after another
        assert ranks.run(body, 10) == [10, 11]
    assert shared_ranks(2).run(body, 10) == [10, 11]    # a Ranks(2) that all tests of this process share

Starting a rank costs about two seconds (it imports torch), a run on ranks that are up some milliseconds. A function
that fails, hangs or dies ends all ranks; RanksFailed tells what each did; the next run starts fresh ones."""

import atexit
import collections
import importlib
import importlib.util
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait

GRACE_S = 5.0  # after a rank has failed, the others have this long to tell what they saw
ABORT_S = 2.0  # a hung rank has this long to write its stacks
_MAIN = "_ranks_main"  # a script's name in the ranks: not "__main__", or it would start all over
OUTPUT_TAIL = 6000  # characters of a rank's output in a report


class RanksFailed(AssertionError):
    """Some rank raised, died or hung.

    `failures` {rank: text}, `results` {rank: value} of the ranks that returned, `outputs` [text] of all.
    """

    def __init__(self, message, failures, results, outputs):
        super().__init__(message)
        self.failures, self.results, self.outputs = failures, results, outputs


def run_ranks(fn, world_size, *args, timeout=60, env=None, init=True, heap_bytes=64 << 20):
    """Runs `fn(*args)` on `world_size` fresh ranks; returns their results in rank order. See `Ranks.run`."""
    with Ranks(world_size, env=env) as ranks:
        return ranks.run(fn, *args, timeout=timeout, init=init, heap_bytes=heap_bytes)


_shared = {}


def shared_ranks(world_size):
    """The `Ranks` of this size that everybody in this process uses; ends with the process."""
    if world_size not in _shared:
        _shared[world_size] = Ranks(world_size)
        atexit.register(_shared[world_size].close)
    return _shared[world_size]


class Ranks:
    """`world_size` processes, started on first use. `env` is added to their environment.

    After each run `outputs` has what every rank wrote to stdout and stderr.
    """

    def __init__(self, world_size, env=None):
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: give 1 or more ranks")
        self.world_size, self.env = world_size, dict(env or {})
        self.outputs = []
        self._workers = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def run(self, fn, *args, timeout=60, init=True, heap_bytes=64 << 20):
        """Runs `fn(*args)` on every rank; returns the results in rank order, or raises RanksFailed within about
        `timeout` s.

        `fn` is a module-level function; args and results are pickled (a tensor that is a view is copied). RANK,
        WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, so the function may call
        torch.distributed.init_process_group. init=True: shmem is initialised with `heap_bytes` a rank before and
        finalized after; init=False leaves that to the function."""
        self._start(timeout)
        meeting = os.memfd_create("triton_dist.testing")  # a FileStore that nobody has to delete
        if fn.__module__ == "__main__":
            sys.modules.setdefault(_MAIN, sys.modules["__main__"])  # what the ranks call this script: for its classes
        task = {"fn": _name_of(fn), "init": init, "heap_bytes": heap_bytes, "port": self._workers[0].port}
        task["meeting"] = f"/proc/{os.getpid()}/fd/{meeting}"
        blob = _dumps(args)
        results, failures = {}, {}
        try:
            for worker in self._workers:
                worker.output_start = os.fstat(worker.output.fileno()).st_size
                worker.answer = None
                worker.send(task, blob)
            self._collect(timeout)
            self.outputs = [worker.read_output() for worker in self._workers]
            for rank, worker in enumerate(self._workers):
                kind, value = worker.answer
                if kind == "ok":
                    results[rank] = pickle.loads(value)
                else:
                    failures[rank] = value
        except BaseException:  # Ctrl-C, say: a later run must not get this one's answers
            self.close()
            raise
        finally:
            os.close(meeting)
        if failures:
            message = self._report(fn, failures)
            self.close()
            raise RanksFailed(message, failures, results, self.outputs)
        if any(worker.dirty for worker in self._workers):
            self.close()
        return [results[rank] for rank in range(self.world_size)]

    def _start(self, timeout):
        if self._workers and all(worker.alive() for worker in self._workers):
            return
        self.close()
        self._workers = [_Worker(rank, self.world_size, self.env) for rank in range(self.world_size)]
        self._collect(max(timeout, 60))
        for rank, worker in enumerate(self._workers):
            kind, value = worker.answer
            if kind != "ok":
                text = f"rank {rank} did not start: {value}\n{worker.read_output()}"
                self.close()
                raise RanksFailed(text, {rank: text}, {}, [])

    def _collect(self, timeout):
        """Every worker has an answer afterwards: its own, or what became of it."""
        deadline = time.monotonic() + timeout
        why = f"still running after {timeout:g} s"
        while waiting := [worker for worker in self._workers if worker.answer is None]:
            ready = wait([end for worker in waiting for end in worker.ends], max(deadline - time.monotonic(), 0))
            for worker in waiting:
                if worker.connection in ready or worker.pidfd in ready:
                    worker.receive()
                    if worker.answer[0] != "ok":
                        grace = time.monotonic() + GRACE_S
                        if grace < deadline:
                            deadline, why = grace, f"still running {GRACE_S:g} s after rank {worker.rank} had failed"
            if not ready and time.monotonic() >= deadline:
                for worker in waiting:
                    worker.signal(signal.SIGABRT)  # faulthandler writes the stacks
                end = time.monotonic() + ABORT_S
                for worker in waiting:
                    ended = worker.wait(end - time.monotonic())
                    worker.signal(signal.SIGKILL)
                    worker.answer = "hung", f"{why}; ended by {'SIGABRT' if ended else 'SIGKILL'}"

    def _report(self, fn, failures):
        parts = [f"{len(failures)} of {self.world_size} ranks failed in {fn.__module__}.{fn.__qualname__}"]
        for rank in range(self.world_size):
            parts.append(f"--- rank {rank}: {failures.get(rank, 'returned')}")
            if output := self.outputs[rank].strip():
                parts.append(f"    output of rank {rank}:\n{output[-OUTPUT_TAIL:]}")
        return "\n".join(parts)

    def kill(self):
        """Kills the processes, from any thread: a run that goes on in another one fails. `close` is still to be called."""
        for worker in list(self._workers):
            worker.signal(signal.SIGKILL)

    def close(self):
        """Ends the processes. A later run starts new ones."""
        for worker in self._workers:
            worker.connection.close()  # an idle worker leaves when it sees this
        end = time.monotonic() + 1
        for worker in self._workers:
            worker.wait(end - time.monotonic())
            worker.end()
        self._workers = []


class _Worker:
    def __init__(self, rank, world_size, env):
        self.rank, self.port, self.dirty, self.answer, self.output_start = rank, None, False, None, 0
        self.connection, theirs = Pipe()
        life_read, self.life = os.pipe()  # we hold the write end: the worker gets SIGIO when we are gone
        self.output = tempfile.TemporaryFile()
        code = (
            "import sys, json; sys.path[:] = json.loads(sys.argv[1])\n"
            "from triton_dist.testing import _serve; _serve(*map(int, sys.argv[2:]))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), str(theirs.fileno()), str(life_read)],
            pass_fds=(theirs.fileno(), life_read),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env=_environment(rank, world_size, env),
            start_new_session=True,
        )
        theirs.close()
        os.close(life_read)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.ends = (self.connection, self.pidfd)

    def alive(self):
        return self.process.poll() is None

    def send(self, task, blob):
        try:
            self.connection.send_bytes(_dumps(task))
            self.connection.send_bytes(blob)
        except OSError:  # it has died; receive() tells
            pass

    def receive(self):
        try:
            if self.connection.poll(0.05):
                kind, value, self.port, self.dirty = pickle.loads(self.connection.recv_bytes())
                self.answer = kind, value
                return
        except (EOFError, OSError):
            pass
        self.wait(ABORT_S)
        code = self.process.poll()
        how = f"ended with exit status {code}" if code is not None and code >= 0 else "closed its connection"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        self.answer = "died", how

    def read_output(self):
        end = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), end - self.output_start, self.output_start).decode(errors="replace")

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def wait(self, seconds):
        try:
            self.process.wait(max(seconds, 0.01))
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self):
        self.signal(signal.SIGKILL)  # the whole group: also what the worker itself started
        self.process.wait()
        for descriptor in (self.pidfd, self.life):
            os.close(descriptor)
        self.output.close()


def _environment(rank, world_size, env):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "G_IP_PORT" and not name.startswith("TORCHELASTIC_") and not name.startswith("MASTER_")
    }
    if env.get("TRITON_DIST_BACKEND", "cpu") != "cpu":
        inherited.pop("TRITON_INTERPRET", None)  # set by our own import of triton_dist on cpu
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {
        "OMP_NUM_THREADS": "1",
        **inherited,
        **{name: str(value) for name, value in places.items()},
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # MASTER_PORT is served already, see _serve_store
        **env,
    }


def _name_of(fn):
    if "<" in fn.__qualname__ or "." in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} is not a module-level function, so other processes cannot import it")
    path = getattr(sys.modules.get(fn.__module__), "__file__", None)
    if path is None:
        raise TypeError(f"{fn.__qualname__} comes from no file, so other processes cannot import it")
    return fn.__module__, os.path.abspath(path), fn.__qualname__


class _Pickler(pickle.Pickler):
    def reducer_override(self, value):
        tensor = sys.modules.get("torch") and sys.modules["torch"].Tensor
        if tensor and isinstance(value, tensor) and value.untyped_storage().nbytes() > value.nbytes:
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # not the whole heap that it is a view of
        return NotImplemented


def _dumps(value):
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


# -- the worker's side
def _serve(connection_fd, life_fd):
    import faulthandler
    import fcntl
    import resource

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    for descriptor in (connection_fd, life_fd):
        os.set_inheritable(descriptor, False)
    connection = Connection(connection_fd)
    import triton_dist.shmem  # noqa: F401  so that every worker imports torch now, side by side

    port = _serve_store()
    connection.send_bytes(_dumps(("ok", None, port, False)))
    while True:
        try:
            task, blob = pickle.loads(connection.recv_bytes()), connection.recv_bytes()
        except EOFError:
            os._exit(0)
        os.environ["MASTER_PORT"] = str(task["port"])
        try:
            value, dirty = _run(task, blob)
            answer = _dumps(("ok", _dumps(value), _serve_store(), dirty))
        except BaseException:
            text = "raised\n" + traceback.format_exc()
            connection.send_bytes(_dumps(("raised", text, None, True)))
            sys.stdout.flush()
            os._exit(1)  # the other ranks see that this one is gone
        connection.send_bytes(answer)


_served = collections.deque(maxlen=2)  # the last run's store may still be read by a slower rank


def _serve_store():
    """Rank 0 serves MASTER_PORT for the next run's torch.distributed, as torchrun's agent does; returns the port.

    No port is guessed, and no run finds another's keys. In a thread: torch asks the name server for the name of
    127.0.0.1, which can take seconds where there is none.
    """
    if os.environ["RANK"] != "0":
        return None
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve():
        _served.append(
            TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        )

    threading.Thread(target=serve, daemon=True).start()
    return port


def _run(task, blob):
    import torch.distributed as dist

    from triton_dist import shmem
    from triton_dist.shmem import rendezvous

    fn = _find(*task["fn"])
    args = pickle.loads(blob)
    # the same as meeting at MASTER_PORT, without its name server
    rendezvous.keep(rendezvous.launch_address(), dist.FileStore(task["meeting"]))
    if task["init"]:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        code = shmem.aclshmem_init(shmem.InitAttr(rank, world_size, "", task["heap_bytes"]))
        if code:
            raise RuntimeError(f"aclshmem_init returned {code}: {shmem.last_error()}")
    value = fn(*args)
    if task["init"]:
        code = shmem.aclshmem_finalize()
        if code:
            raise RuntimeError(f"aclshmem_finalize returned {code}: {shmem.last_error()}")
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.forget()
    return value, shmem.my_pe() != -1


def _find(name, path, attribute):
    """The function, from its module: imported by name where that finds the same file, else from the file itself."""
    script = name == "__main__"
    name = _MAIN if script else name
    module = sys.modules.get(name)
    if module is None or os.path.abspath(getattr(module, "__file__", None) or "") != path:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.origin and os.path.abspath(spec.origin) == path:
            module = importlib.import_module(name)
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    if script:
        sys.modules["__main__"] = module  # arguments of the script's own classes name it so
    return getattr(module, attribute)
