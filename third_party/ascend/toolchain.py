"""The Ascend compiler's own virtual environment: triton-ascend installs into the same folder as triton, so the two can
never share one. It needs neither torch nor an NPU nor CANN: 235 MB to download, 800 MB on disk."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

# triton-ascend declares no dependencies: what it imports is named here.
PACKAGES = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11==3.1.0", "numpy==2.4.6")
PIP_TIMEOUT = 900  # seconds
_COMPLETE = "triton_dist_complete"  # in a folder that this module made, written last: the versions

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
    """The interpreter of the environment, a path as str. Makes the environment when it is not there, or is of other versions:
    with pip, from the index that pip is set up for; two processes that start at once make it once. An environment that
    TRITON_DIST_ASCEND_VENV names is never changed: `ToolchainError` when it does not fit, and when making one fails."""
    place = folder()
    interpreter = place / "bin" / "python"
    given = bool(os.environ.get("TRITON_DIST_ASCEND_VENV"))
    if _fits(place, interpreter) or (given and interpreter.exists() and not _missing(interpreter)):
        return str(interpreter)
    with _locked(place):
        if _fits(place, interpreter):  # another process has made it meanwhile
            return str(interpreter)
        if given and place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ToolchainError(_unfit(place, interpreter))
        _make(place, interpreter)
    return str(interpreter)


def _marker():
    return "\n".join(PACKAGES) + "\n"


def _fits(place, interpreter):
    """This module made the environment, whole, with these versions."""
    marker = place / _COMPLETE
    return interpreter.exists() and marker.is_file() and marker.read_text(errors="replace") == _marker()


def _missing(interpreter):
    """What the environment lacks, one a line."""
    try:
        done = subprocess.run([interpreter, "-c", _VERSIONS, *PACKAGES[:2]], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its interpreter does not run: {error}"
    if done.returncode:
        return f"its interpreter fails: {done.stderr.strip()[-300:] or f'exit status {done.returncode}'}"
    return done.stdout


def _unfit(place, interpreter):
    what = "it is no virtual environment: there is no bin/python"
    if interpreter.exists():
        what = _missing(interpreter).strip().replace("\n", ", ") or f"{_COMPLETE} in it names other versions"
    return (
        f"TRITON_DIST_ASCEND_VENV={place} does not have the Ascend toolchain: {what}. Name a folder that does not exist yet "
        "(it will be made), or unset the variable."
    )


@contextlib.contextmanager
def _locked(place):
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = open(place.with_name(place.name + ".lock"), "w")
    except OSError as error:
        raise ToolchainError(
            f"the toolchain's environment cannot be made at {place}: {error}. Name another place in TRITON_DIST_ASCEND_VENV."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {place}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(place, interpreter):
    def step(number, what):
        print(f"  {number} of {len(PACKAGES) + 1}: {what}", file=sys.stderr, flush=True)

    print(f"making {place} (once; 235 MB to download, minutes on a slow machine)", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)  # what an interrupted call left, or other versions
    step(1, "virtual environment")
    try:
        venv.create(place, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(place, ignore_errors=True)
        raise ToolchainError(
            f"a virtual environment cannot be made at {place}: {error}. Debian and Ubuntu need python3-venv; another place can "
            "be named in TRITON_DIST_ASCEND_VENV."
        ) from error
    failure, end = "", time.monotonic() + PIP_TIMEOUT
    for number, package in enumerate(PACKAGES, 2):
        step(number, f"pip install {package}")
        # None of them depends on another or on anything else.
        command = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1))
            failure = "" if done.returncode == 0 else (done.stderr + done.stdout)[-2000:] or f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"no end after {PIP_TIMEOUT} s"
        if failure:
            break
    if failure:
        shutil.rmtree(place, ignore_errors=True)
        raise ToolchainError(
            f"pip cannot install {' '.join(PACKAGES)} for Python {sys.version.split()[0]} on {sys.platform}: check pip's "
            "index and the network, or name an environment that has them in TRITON_DIST_ASCEND_VENV. The wheels are for "
            f"Linux on x86-64 and aarch64.\n{failure}"
        )
    (place / _COMPLETE).write_text(_marker())
