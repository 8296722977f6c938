"""Every error a user of this library can meet.

Each message says what happened, on which rank, with which values, and what to do next. All derive from
`TritonDistError`, a `RuntimeError`, so code written for the `shmem` wheel (which raises `RuntimeError`) keeps working.
Imports nothing: the device language uses it in environments that have neither torch nor numpy.
"""


class TritonDistError(RuntimeError):
    """Base of all errors raised by this library."""


class BackendError(TritonDistError):
    """A platform was asked for that this machine or this Python environment cannot give."""


class UnsupportedError(TritonDistError):
    """The target cannot do what was asked (a dtype, an operation); refused by name, never dropped silently."""


class ShmemError(TritonDistError):
    """A host call of `shmem` failed. `code` is the wheel's return code (see `shmem.codes`)."""

    def __init__(self, message, code=-4):
        super().__init__(message)
        self.code = code


class CollectiveMismatchError(ShmemError):
    """The ranks of a collective call disagreed (on the call, its sizes or its arguments)."""

    def __init__(self, message, code=-1):
        super().__init__(message, code)


class SymmetricAccessError(TritonDistError):
    """A kernel used an address, a peer or a signal that is not valid in the symmetric heap."""


class DeadlockError(TritonDistError):
    """Every rank is blocked and nobody can wake anybody: proven, not guessed."""


class WaitTimeoutError(TritonDistError):
    """A wait lasted longer than TRITON_DIST_WAIT_TIMEOUT allows."""


class PeerLostError(TritonDistError):
    """A rank that this rank was waiting for has died, has finalized, or its kernel failed."""


class TuningError(TritonDistError):
    """None of the candidates of an autotuning works on all ranks."""
