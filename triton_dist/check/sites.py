"""Where in the user's source an access was made, as small numbers: they are compared and stored by the thousand."""

import contextlib
import linecache
import os
import sys

import torch

from ..interpreter import location

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Machinery on the way from the user's line to the access. A kernel of triton_dist.kernels is a user here.
_SKIPPED = location.SKIPPED + tuple(
    os.path.join(folder) + os.sep
    for folder in (
        os.path.dirname(os.path.abspath(__file__)),
        os.path.join(_PACKAGE, "shmem"),
        os.path.join(_PACKAGE, "backends"),
        os.path.dirname(os.path.abspath(torch.__file__)),
    )
)
UNKNOWN = "unknown source line"
_skipped = {}  # code object -> whether it is machinery
_numbers = {}  # (code object, line) -> number
_texts = []
_standing = None  # the line that `here` gives while `standing_at` lasts


def here():
    """The number of the innermost line that is not machinery."""
    return of(sys._getframe(1)) if _standing is None else _standing


@contextlib.contextmanager
def standing_at(site):
    """What is done meanwhile is done for the line `site`."""
    global _standing
    _standing = site
    try:
        yield
    finally:
        _standing = None


def of(frame):
    while frame is not None:
        code = frame.f_code
        skipped = _skipped.get(code)
        if skipped is None:
            skipped = _skipped[code] = code.co_filename.startswith((*_SKIPPED, "<"))
        if not skipped:
            key = code, frame.f_lineno
            number = _numbers.get(key)
            if number is None:
                number = _numbers[key] = intern(f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}")
            return number
        frame = frame.f_back
    return intern(UNKNOWN)


def of_host(frame):
    """The same for a host: its own line, not that of a library operator that it has called."""
    inner = frame
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE + os.sep, *_SKIPPED, "<")):
        frame = frame.f_back
    return of(inner if frame is None else frame)


def of_error(error):
    """"file.py:12 in name" of the program's own line that an exception came from."""
    trace = _trace_of(error)
    if trace is None:
        return UNKNOWN
    code = trace.tb_frame.f_code
    return f"{_short(code.co_filename)}:{trace.tb_lineno} in {code.co_qualname}"


def source_of_error(error):
    """That line's text."""
    trace = _trace_of(error)
    return "" if trace is None else linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()


def _trace_of(error):
    library, found, trace = None, None, error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not path.startswith((*_SKIPPED, "<")):
            library = trace
            if not path.startswith(_PACKAGE + os.sep):
                found = trace
        trace = trace.tb_next
    return found or library


def intern(text):
    if text not in _texts:
        _texts.append(text)
    return _texts.index(text)


def text(number):
    """"file.py:12 in name"."""
    return _texts[number]


def _short(path):
    """Relative to the working folder where it lies in it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
