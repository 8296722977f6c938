"""How long a wait may last, on every platform."""

import os

from .errors import BackendError

# Whether waits in compiled kernels are limited, too, where the target can (nvidia). Settled once, at import, since it decides
# what is compiled: unless it was asked for, kernels are what they would be without limits.
KERNEL_WAITS_LIMITED = "TRITON_DIST_WAIT_TIMEOUT" in os.environ


def wait_timeout(default=None):
    """The limit of a wait in seconds: TRITON_DIST_WAIT_TIMEOUT, else `default`, else 120 (as control_operation_timeout of the
    wheel)."""
    text = os.environ.get("TRITON_DIST_WAIT_TIMEOUT", str(default or 120))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise BackendError(f"TRITON_DIST_WAIT_TIMEOUT={text!r}: give a number of seconds greater than 0")
    return seconds
