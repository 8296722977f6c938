"""The user's cache of measured times: a folder an operator, a file an entry.

$TRITON_DIST_CACHE_DIR/tuned/OPERATOR/DIGEST.json, by default below ~/.cache/triton_dist. A file's name is a digest of all that
its entry is good for, so runs that measure different things write different files, and runs that measure the same replace
one another's whole file: nothing has to be locked. What cannot be read or written is a warning, never an error.
"""

import os
import warnings
from pathlib import Path

from . import entries, identity


def directory():
    return Path(os.environ.get("TRITON_DIST_CACHE_DIR") or os.path.expanduser("~/.cache/triton_dist")) / "tuned"


def read(operator, device, world, source):
    """The entries of an operator that hold for this device and number of ranks, these versions and this source."""
    try:
        files = sorted((directory() / identity.slug(operator)).glob("[!.]*.json"))
    except OSError as error:
        warnings.warn(f"the cache of measured times cannot be read: {error}", RuntimeWarning, stacklevel=3)
        return []
    wanted = dict(operator=operator, device=device, world=world, source=source, versions=identity.versions())
    found = [entry for file in files for entry in entries.read_file(file)]
    return [entry for entry in found if all(entry[name] == value for name, value in wanted.items())]


def write(entry):
    """Keeps an entry for later runs. Returns its file, None when it cannot be written."""
    folder = directory() / identity.slug(entry["operator"])
    said = {name: entry[name] for name in ("operator", "device", "world", "key", "versions", "source")}
    said["candidates"] = [timing["candidate"] for timing in entry["timings"]]
    path = folder / f"{identity.digest(said)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries.write_file(path, [entry])
    except OSError as error:
        warnings.warn(f"measured times are not kept: {error}. Set TRITON_DIST_CACHE_DIR", RuntimeWarning, stacklevel=3)
        return None
    return path
