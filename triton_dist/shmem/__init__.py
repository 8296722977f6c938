"""The host side: symmetric memory, teams, copies and signals, with the names and return codes of the `shmem` wheel.

    from triton_dist import shmem

    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.local_mem_size = rank, world_size, 64 << 20
    assert shmem.aclshmem_init(attr) == 0, shmem.last_error()
    x = shmem.aclshmem_create_tensor((8, 16), torch.float16)
    ...
    shmem.aclshmem_free_tensor(x)
    shmem.aclshmem_finalize()

Beyond the wheel: create_signals, context, peer_tensor, barrier_all, device, last_error, Stream, Handoffs and copy; every
collective call checks that all ranks make the same call; a rank that dies or cannot come is named within seconds."""

from . import codes
from .attributes import InitAttr, OptionalAttr, TeamConfig
from .codes import CmpOp, InitStatus, OpEngineType, SignalOp
from .init import (
    aclshmem_finalize,
    aclshmem_finialize,
    aclshmem_get_unique_id,
    aclshmem_global_exit,
    aclshmem_info_get_name,
    aclshmem_info_get_version,
    aclshmem_init,
    aclshmem_init_using_unique_id,
    aclshmemx_init_status,
    process_group_backend,
    set_conf_store_tls,
)
from .log import last_error, set_log_level
from .memory import (
    aclshmem_align,
    aclshmem_calloc,
    aclshmem_create_tensor,
    aclshmem_free,
    aclshmem_free_tensor,
    aclshmem_malloc,
    aclshmem_ptr,
    aclshmemx_get_heap_base,
    create_signals,
    device,
    peer_tensor,
)
from .rma import (
    aclshmem_getmem,
    aclshmem_getmem_nbi,
    aclshmem_putmem,
    aclshmem_putmem_nbi,
    aclshmem_signal_wait_until,
    aclshmemx_putmem_signal,
    aclshmemx_putmem_signal_nbi,
)
from .streams import Handoffs, Stream, copy, recorder
from .teams import (
    aclshmem_team_get_config,
    barrier_all,
    check_alike,
    check_waits,
    gather,
    context,
    my_pe,
    pe_count,
    team_destroy,
    team_my_pe,
    team_n_pes,
    team_split_2d,
    team_split_strided,
    team_translate_pe,
)

__all__ = [
    "CmpOp",
    "Handoffs",
    "InitAttr",
    "InitStatus",
    "OpEngineType",
    "OptionalAttr",
    "SignalOp",
    "Stream",
    "TeamConfig",
    "aclshmem_align",
    "aclshmem_calloc",
    "aclshmem_create_tensor",
    "aclshmem_finalize",
    "aclshmem_finialize",
    "aclshmem_free",
    "aclshmem_free_tensor",
    "aclshmem_get_unique_id",
    "aclshmem_getmem",
    "aclshmem_getmem_nbi",
    "aclshmem_global_exit",
    "aclshmem_info_get_name",
    "aclshmem_info_get_version",
    "aclshmem_init",
    "aclshmem_init_using_unique_id",
    "aclshmem_malloc",
    "aclshmem_ptr",
    "aclshmem_putmem",
    "aclshmem_putmem_nbi",
    "aclshmem_signal_wait_until",
    "aclshmem_team_get_config",
    "aclshmemx_get_heap_base",
    "aclshmemx_init_status",
    "aclshmemx_putmem_signal",
    "aclshmemx_putmem_signal_nbi",
    "barrier_all",
    "check_alike",
    "check_waits",
    "codes",
    "context",
    "copy",
    "create_signals",
    "device",
    "gather",
    "last_error",
    "my_pe",
    "pe_count",
    "peer_tensor",
    "process_group_backend",
    "recorder",
    "set_conf_store_tls",
    "set_log_level",
    "team_destroy",
    "team_my_pe",
    "team_n_pes",
    "team_split_2d",
    "team_split_strided",
    "team_translate_pe",
]
