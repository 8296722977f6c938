"""Messages of the host layer: one line each, "[ERROR] triton_dist.shmem: rank 1: ...", on stderr.

SHMEM_LOG_LEVEL      DEBUG, INFO, WARN, ERROR or FATAL (default WARN), as a name or as set_log_level's number
SHMEM_LOG_TO_STDOUT  1: stdout instead of stderr
SHMEM_LOG_PATH       a folder: append to shmem_<pid>.log there as well
"""

import functools
import os
import sys

LEVELS = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL")

_level = None  # set by set_log_level
_last_error = ""


def set_log_level(level):
    """Least severe level that is shown: 0 DEBUG, 1 INFO, 2 WARN, 3 ERROR, 4 FATAL. Returns 0, or -1 for a bad level."""
    global _level
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level < len(LEVELS):
        error(f"set_log_level({level!r}): give 0 ({LEVELS[0]}) to {len(LEVELS) - 1} ({LEVELS[-1]})")
        return -1
    _level = level
    return 0


def last_error():
    """The text behind the latest non-zero return code of this process, "" when there was none."""
    return _last_error


def _shown_from():
    if _level is not None:
        return _level
    return _level_of(os.environ.get("SHMEM_LOG_LEVEL", "WARN"))


@functools.cache  # so that the warning comes once
def _level_of(text):
    name = text.strip().upper()
    if name in LEVELS:
        return LEVELS.index(name)
    if name.isdigit() and int(name) < len(LEVELS):
        return int(name)
    level = LEVELS.index("WARN")
    sys.stderr.write(f"[WARN] triton_dist.shmem: SHMEM_LOG_LEVEL={text!r}: give {', '.join(LEVELS)} or 0 to 4; WARN is used\n")
    return level


def _emit(level, text, rank):
    if LEVELS.index(level) < _shown_from():
        return
    who = "" if rank is None else f"rank {rank}: "
    line = f"[{level}] triton_dist.shmem: {who}{text}\n"
    to_stdout = os.environ.get("SHMEM_LOG_TO_STDOUT", "0") == "1"
    stream = sys.stdout if to_stdout else sys.stderr
    stream.write(line)
    stream.flush()
    folder = os.environ.get("SHMEM_LOG_PATH")
    if folder:
        try:
            with open(os.path.join(folder, f"shmem_{os.getpid()}.log"), "a") as file:
                file.write(line)
        except OSError:  # a log that cannot be written must not stop the program
            pass


def info(text, rank=None):
    _emit("INFO", text, rank)


def warn(text, rank=None):
    _emit("WARN", text, rank)


def error(text, rank=None):
    """Keeps the text for last_error() and shows it."""
    global _last_error
    text = "; ".join(line.strip() for line in str(text).splitlines()).replace(":; ", ": ")
    prefix = f"rank {rank}: "
    _last_error = text = text[len(prefix) :] if text.startswith(prefix) else text
    _emit("ERROR", text, rank)
