"""Tables of measured times that come with this library, and files like them: tables/DEVICE_xRANKS.json."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from . import entries, identity

SHIPPED = Path(__file__).parent / "tables"
LOCK_S = 10.0  # a writer that holds a folder longer than this is not waited for


def shipped(operator, device, world):
    """The entries that come with this library. They hold whatever the versions: better than an estimate."""
    path = SHIPPED / f"{identity.slug(device)}_x{world}.json"
    return [entry for entry in entries.read_file(path) if (entry["operator"], entry["device"]) == (operator, device)]


def merge(path, added):
    """Writes entries to a file beside those that it has, in place of older ones of the same operator, device, ranks and key."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        new = {_place(entry) for entry in added}
        kept = [entry for entry in entries.read_file(path, afresh=True) if _place(entry) not in new]
        entries.write_file(path, sorted([*kept, *added], key=_place))


def _place(entry):
    sizes = sorted((name, f"{value:>12}") for name, value in entry["key"].items())
    return entry["operator"], entry["device"], entry["world"], sizes and tuple(sizes)


@contextlib.contextmanager
def _locked(folder):
    """A lock among all who write to the folder; it leaves no file behind. Given up after a while: writes are atomic anyway."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + LOCK_S
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
