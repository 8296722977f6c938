"""What init is told. The wheel's classes: every field can be set after construction, too."""

from dataclasses import dataclass, field

from .codes import OpEngineType


@dataclass
class OptionalAttr:
    """Times are in seconds: `shm_init_timeout` bounds the rendezvous, `shm_create_timeout` the mapping of the heaps,
    `control_operation_timeout` every later wait (TRITON_DIST_WAIT_TIMEOUT overrides it). `data_op_engine_type` and
    `sockFd` matter to the wheel alone: ascend passes the former on (MTE | ROCE reaches other hosts)."""

    version: int = 1
    data_op_engine_type: int = OpEngineType.MTE
    shm_init_timeout: int = 120
    shm_create_timeout: int = 120
    control_operation_timeout: int = 120
    sockFd: int = -1


@dataclass
class InitAttr:
    """`local_mem_size`: bytes of symmetric heap, equal on all ranks, at most 40 GiB. `ip_port`: "tcp://host:port" or
    "tcp6://[host]:port" with a port above 1024, served by rank 0; empty: see rendezvous.py for what is used instead."""

    my_rank: int = 0
    n_ranks: int = 1
    ip_port: str = ""
    local_mem_size: int = 0
    option_attr: OptionalAttr = field(default_factory=OptionalAttr)


@dataclass
class TeamConfig:
    """The wheel reserves `num_contexts`; it has no effect."""

    num_contexts: int = 0
