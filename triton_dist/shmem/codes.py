"""The wheel's return codes and enumerations.

`OpEngineType`, `SignalOp`, `CmpOp` and `InitStatus` have the names and values of the wheel's; plain ints work as well.
"""

from enum import IntEnum

SUCCESS = 0
INVALID_PARAM = -1  # a bad argument; also a second init without finalize
INVALID_VALUE = -2
SMEM = -3  # a peer's heap cannot be mapped (another host or container)
INNER = -4
NOT_INITED = -5  # before init or after finalize
BOOTSTRAP = -6  # the ranks could not meet: port taken, no rendezvous set, rank claimed twice, a rank died
TIMEOUT = -7  # a rank did not come within the time limit
MALLOC_FAILED = -8  # the symmetric heap, or the machine, has not enough memory
DL_FUNC = -9
INNER_TIMEOUT = -10
UNDER_API_UNLOAD = -11
NOT_SUPPORTED = -100  # the platform is not usable on this machine

MAX_PES = 16384
MAX_TEAMS = 2048
MAX_HEAP_BYTES = 40 << 30

TEAM_WORLD = 0
TEAM_INVALID = -1


class InitStatus(IntEnum):
    """How far init has come in this process."""

    NOT_INITIALIZED = 0
    SHM_CREATED = 1
    INITIALIZED = 2
    INVALID = 3


class OpEngineType(IntEnum):
    """The wheel's transports; no matter to cpu and nvidia."""

    MTE = 1
    SDMA = 2
    ROCE = 4
    UDMA = 8


class SignalOp(IntEnum):
    """What a put does to its signal."""

    SIGNAL_SET = 0
    SIGNAL_ADD = 1


class CmpOp(IntEnum):
    """How a wait compares the signal (left) with its value."""

    CMP_EQ = 0
    CMP_NE = 1
    CMP_GT = 2
    CMP_GE = 3
    CMP_LT = 4
    CMP_LE = 5
