"""Where in the user's source a program stands."""

import os
import sys

import greenlet
import triton

_HERE = os.path.dirname(os.path.abspath(__file__))
SKIPPED = (
    os.path.dirname(os.path.abspath(triton.__file__)) + os.sep,
    _HERE + os.sep,
    os.path.join(os.path.dirname(_HERE), "language") + os.sep,
    os.path.dirname(os.path.abspath(greenlet.__file__)) + os.sep,
)


def source_line(frame=None):
    """"file.py:12 in name" of the innermost frame that is neither Triton's nor this library's machinery."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(SKIPPED):
            name = getattr(code, "co_qualname", code.co_name)
            return f"{code.co_filename}:{frame.f_lineno} in {name}"
        frame = frame.f_back
    return "unknown source line"


def error_line(error):
    """The same for the place where an exception came from."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(SKIPPED):
            code = trace.tb_frame.f_code
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found or "unknown source line"
