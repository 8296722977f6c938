"""Compiles kernels for the ranks: one process in the toolchain's environment, asked over a socket, kernel by kernel.

    with Compiler() as compiler:             # in the main environment
        address = compiler.address           # give it to the ranks; engine.install(address) uses it

It ends with the `with` block, and with the process that made it, whatever ends that; so does its folder.
"""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_START_S = 120  # the first start makes the toolchain's environment before this counts


class CompilerError(RuntimeError):
    """Kernels cannot be compiled for this machine; the text says why and what to do."""


class Compiler:
    """A running compile server. `address`: where ranks find it; `log`: what it wrote, read after it has ended."""

    def __enter__(self):
        from .. import toolchain

        python = toolchain.python()
        root = Path(__file__).parents[3]
        self._folder = tempfile.TemporaryDirectory(prefix="triton_dist_host_")
        self.address = str(Path(self._folder.name) / "socket")
        environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONHOME")}
        environment |= {
            "TRITON_DIST_BACKEND": "ascend",
            "TMPDIR": self._folder.name,  # of the tools: gone with the folder, whatever ends them
            "TRITON_CACHE_DIR": str(Path(self._folder.name) / "cache"),
            "PYTHONPATH": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [python, "-m", f"{__package__}.serve", self.address],
            stdin=subprocess.PIPE,  # it ends when this closes
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=environment,
            cwd=root,
            start_new_session=True,  # a group of its own, which it ends as a whole
        )
        timer = threading.Timer(_START_S, self._process.kill)
        timer.start()
        ready = self._process.stdout.readline()
        timer.cancel()
        if ready.strip() != b"ready":
            self._process.kill()
            self.__exit__()
            raise CompilerError(f"the compile server did not start ({python}): {self.log.strip()}")
        return self

    def __exit__(self, *exc):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._output.seek(0)
        self.log = self._output.read().decode(errors="replace")
        self._output.close()
        self._folder.cleanup()


def request(address, task):
    """Asks the server at `address`; see `serve` for what a task and its answer hold. CompilerError when it is gone."""
    import json
    from multiprocessing.connection import Client

    try:
        with Client(address, "AF_UNIX") as connection:
            connection.send_bytes(json.dumps(task).encode())
            return json.loads(connection.recv_bytes())
    except (OSError, EOFError) as error:
        raise CompilerError(f"the compile server at {address} is gone: {error!r}") from error


if __name__ == "__main__":
    sys.exit("this is a module: see run_on_host.py")
