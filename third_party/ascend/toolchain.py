"""The Ascend compiler's own virtual environment: triton-ascend installs into the same folder as triton, so the two can
never share one. It needs neither torch nor an NPU nor CANN: 235 MB to download, 800 MB on disk."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

# triton-ascend declares no dependencies: what it imports is named here.
PACKAGES = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11==3.1.0", "numpy==2.4.6")
PIP_TIMEOUT = 900  # seconds
_COMPLETE = "triton_dist_complete"  # in a folder that this module made, written last

_VERSIONS = """
import importlib.metadata as metadata, sys
for wanted in sys.argv[1:]:
    name, version = wanted.split("==")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = "nothing"
    if found != version:
        print(f"{wanted} (found: {found})")
"""


class ToolchainError(RuntimeError):
    """The toolchain's environment is not there and cannot be made; the text says why and what to do."""


def folder():
    """Where the environment is: TRITON_DIST_ASCEND_VENV, else in the user's cache folder, by versions."""
    if chosen := os.environ.get("TRITON_DIST_ASCEND_VENV"):
        return Path(chosen).absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = "-".join(package.split("==")[1] for package in PACKAGES[:2])
    return cache / "triton_dist" / f"ascend-{versions}-py{sys.version_info.major}.{sys.version_info.minor}"


def python():
    """The interpreter of the environment, a path as str. Makes the environment when it is not there: with pip, from the
    index that pip is set up for; two processes that start at once make it once. `ToolchainError` when that fails."""
    place = folder()
    interpreter = place / "bin" / "python"
    if (place / _COMPLETE).exists() or (interpreter.exists() and not _missing(interpreter)):
        return str(interpreter)
    with _locked(place):
        if (place / _COMPLETE).exists():  # another process has made it meanwhile
            return str(interpreter)
        if place.exists() and any(place.iterdir()) and os.environ.get("TRITON_DIST_ASCEND_VENV"):
            raise ToolchainError(_unfit(place, interpreter))
        _make(place, interpreter)
    return str(interpreter)


def _missing(interpreter):
    """The packages that the environment lacks, one a line."""
    done = subprocess.run([interpreter, "-c", _VERSIONS, *PACKAGES[:2]], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def _unfit(place, interpreter):
    what = _missing(interpreter).strip().replace("\n", ", ") if interpreter.exists() else "it is no virtual environment"
    return (
        f"TRITON_DIST_ASCEND_VENV={place} does not have the Ascend toolchain: {what}. Name a folder that does not exist yet "
        "(it will be made), or unset the variable."
    )


@contextlib.contextmanager
def _locked(place):
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_name(place.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(place, interpreter):
    print(f"making {place} (once): {' '.join(PACKAGES)}", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)  # what an interrupted call left
    venv.create(place, with_pip=True, symlinks=True)
    command = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT)
        failure = "" if done.returncode == 0 else (done.stderr + done.stdout)[-2000:]
    except subprocess.TimeoutExpired:
        failure = f"no end after {PIP_TIMEOUT} s"
    if failure:
        shutil.rmtree(place, ignore_errors=True)
        raise ToolchainError(
            f"pip cannot install {' '.join(PACKAGES)} for Python {sys.version.split()[0]} on {sys.platform}: check pip's "
            "index and the network, or name an environment that has them in TRITON_DIST_ASCEND_VENV. The wheels are for "
            f"Linux on x86-64 and aarch64.\n{failure}"
        )
    (place / _COMPLETE).write_text("\n".join(PACKAGES) + "\n")
