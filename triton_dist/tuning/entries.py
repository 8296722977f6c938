"""Entries: what was measured for one key, as it lies in the cache and in the tables that come with this library.

    {"operator": "gemm_reduce_scatter", "device": "NVIDIA H200", "world": 2,
     "key": {"dtype": "bfloat16", "M": 8192, "N": 4096, "K": 2048},
     "versions": {"triton_dist": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}, "source": "0123456789abcdef",
     "timings": [{"candidate": {"method": "tma"}, "microseconds": {"queued": 283.1, "graph": 270.0}},
                 {"candidate": {"method": "streams"}, "problem": "rank 1: ..."}]}

Files come from anywhere, so `valid` looks at everything that is used later.
"""

import functools
import json
import os
import tempfile
import warnings
from pathlib import Path

from . import identity

FORMAT = 1
FIELDS = dict(operator=str, device=str, world=int, key=dict, versions=dict, source=str, timings=list)


def make(operator, device, world, key, source, timings):
    return dict(
        operator=operator, device=device, world=world, key=key, versions=identity.versions(), source=source, timings=timings
    )


def valid(entry):
    """Whether `entry`, read from a file, has the fields of an entry, of their types."""
    fits = isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in FIELDS.items())
    if not fits or not entry["timings"] or not all(map(_valid_timing, entry["timings"])):
        return False
    ways = [sorted(timing["microseconds"]) for timing in entry["timings"] if "microseconds" in timing]
    return all(some == ways[0] for some in ways)


def _valid_timing(timing):
    if not isinstance(timing, dict) or not isinstance(timing.get("candidate"), dict):
        return False
    if "microseconds" not in timing:
        return isinstance(timing.get("problem"), str)
    times = timing["microseconds"]
    return isinstance(times, dict) and bool(times) and all(isinstance(t, (int, float)) and t >= 0 for t in times.values())


def table(entry, candidates):
    """{way: microseconds}, or None, of each of the candidates in this entry."""
    measured = [(timing["candidate"], timing.get("microseconds")) for timing in entry["timings"]]
    return [next((times for one, times in measured if one == candidate), None) for candidate in candidates]


def read_file(path, afresh=False):
    """The entries of a file; none, with a warning, when it is no file of entries. What was read before is kept in memory as
    long as the file looks unchanged. afresh: read it anyway, for who writes it again: on kernels before 6.13 a file that is
    replaced twice within a few milliseconds looks so."""
    try:
        found = os.stat(path)
    except OSError:
        return []
    read = _read_file.__wrapped__ if afresh else _read_file
    return list(read(str(path), (found.st_mtime_ns, found.st_size, found.st_ino)))


@functools.lru_cache(maxsize=4096)
def _read_file(path, looks):
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
        return ()
    found = content.get("entries") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(found, list) or not all(map(valid, found)):
        warnings.warn(f"{path} is ignored: no file of measured times, or of another version", RuntimeWarning, stacklevel=3)
        return ()
    return tuple(found)


def write_file(path, entries):
    """A file of entries, one a line. A reader sees the old file or the whole new one. OSError when it cannot be written."""
    lines = ",\n".join(json.dumps(entry, sort_keys=True) for entry in entries)
    with tempfile.NamedTemporaryFile("w", dir=Path(path).parent, prefix=".", suffix=".tmp", delete=False) as file:
        try:
            file.write(f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n')
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
