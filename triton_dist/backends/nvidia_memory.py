"""One allocation of torch's symmetric memory a rank, mapped by all ranks: the memory behind a heap on NVIDIA GPUs.

TRITON_DIST_NVIDIA_HEAP says who makes it:

    cuda       (default) torch's CUDA backend: ranks of one host, peers over NVLink or PCIe
    nvshmem    torch's NVSHMEM backend, for processes that use NVSHMEM beside this library, and for hosts that one NVLink
               domain connects. Ranks that NVSHMEM reaches over a network alone are refused: kernels address their peers'
               memory by loads and stores. Where torch.distributed is initialised, all its ranks must take part, with the
               same numbers, since NVSHMEM's allocations are collective over them.

Unset, it is what `torch.distributed._symmetric_memory.set_backend` chose before.
"""

import datetime
import itertools
import os

import torch

from ..errors import BackendError, ShmemError

BACKENDS = {"cuda": "CUDA", "nvshmem": "NVSHMEM"}
ALIGNMENT = 2 << 20  # of every heap
_WORLD = "0"  # how torch names the group of all ranks, which its NVSHMEM backend looks up

_serial = itertools.count()
_kept = {}  # NVSHMEM memory of heaps that were finalized, by (rank, ranks, bytes)


def choice():
    """"cuda", "nvshmem" or None (unset); BackendError for anything else, and for an NVSHMEM that is not there."""
    asked = os.environ.get("TRITON_DIST_NVIDIA_HEAP", "").strip().lower()
    if asked and asked not in BACKENDS:
        raise BackendError(f"TRITON_DIST_NVIDIA_HEAP={asked!r}: choose one of {', '.join(BACKENDS)}")
    if asked == "nvshmem":
        from torch.distributed import _symmetric_memory as symmetric

        if not getattr(symmetric, "is_nvshmem_available", bool)():
            raise BackendError(
                f"TRITON_DIST_NVIDIA_HEAP=nvshmem, but this torch ({torch.__version__}) finds no NVSHMEM: install "
                "nvidia-nvshmem-cu12 or -cu13, as torch's CUDA build needs it, or unset TRITON_DIST_NVIDIA_HEAP"
            )
    return asked or None


def share(rank, n_ranks, nbytes, device, store, timeout):
    """The SharedMemory of this rank. Collective."""
    from torch.distributed import _symmetric_memory as symmetric

    asked = choice()
    if asked:
        _select(symmetric, BACKENDS[asked], device)
    nvshmem = _selected(symmetric, device) == "NVSHMEM"
    kept = _kept.pop((rank, n_ranks, nbytes), None) if nvshmem else None
    return kept or SharedMemory(rank, n_ranks, nbytes, device, store, timeout, nvshmem)


class SharedMemory:
    """`tensors[r]` is rank r's memory here, uint8 [nbytes]; `bases[r]` its address."""

    def __init__(self, rank, n_ranks, nbytes, device, store, timeout, nvshmem):
        self.key, self.nvshmem, self._groups = (rank, n_ranks, nbytes), nvshmem, []
        try:
            self._map(rank, n_ranks, nbytes, device, store, timeout)
        except BaseException:
            self._unregister(*self._groups)
            raise

    def _map(self, rank, n_ranks, nbytes, device, store, timeout):
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed._symmetric_memory import _SymmetricMemory

        # A group of our own, over the CPU alone: the user's process groups, if any, are left alone. torch 2.11 takes
        # rank, size and store from the registered group, older ones from the group info.
        name = f"triton_dist.{next(_serial)}"
        group = _gloo_group(name, rank, n_ranks, store, timeout)
        self._register(name, group)
        if self.nvshmem:
            self._register_world(group, rank, n_ranks)
        else:
            _SymmetricMemory.set_group_info(name, rank, n_ranks, store)
        # what symm_mem.empty does without its memory pool, which could place us inside a shared segment
        room = ALIGNMENT if self.nvshmem else 0  # CUDA's is aligned by itself
        memory = _SymmetricMemory.empty_strided_p2p((nbytes + room,), (1,), torch.uint8, device)
        alone = self.nvshmem and n_ranks == 1  # of which torch makes no NVSHMEM team
        self.handle = None if alone else symmetric.rendezvous(memory, name)
        if _WORLD in self._groups:
            self._unregister(_WORLD)  # the user may initialise torch.distributed later
        self.bases = [int(address or 0) for address in ([memory.data_ptr()] if alone else self.handle.buffer_ptrs)]
        far = [str(peer) for peer, base in enumerate(self.bases) if not base]
        if far:
            raise ShmemError(
                f"rank {rank} cannot load from or store to the heap of rank {', '.join(far)}, which NVSHMEM reaches over a "
                "network alone: give all ranks GPUs of one host, or of one NVLink domain",
                -3,
            )
        skipped = -self.bases[rank] % ALIGNMENT if self.nvshmem else 0
        if self.nvshmem:  # its own heaps are aligned, so that all ranks skip as much
            store.set(f"{name}/skipped/{rank}", str(skipped))
            said = [int(store.get(f"{name}/skipped/{peer}")) for peer in range(n_ranks)]
            if len(set(said)) > 1:
                raise ShmemError(f"rank {rank}: NVSHMEM placed the heaps differently: {said} bytes to a multiple of 2 MiB", -3)
        self.bases = [base + skipped for base in self.bases]
        own = _tensor_at(self.bases[rank], nbytes, memory) if self.nvshmem else memory
        self.tensors = [
            own if peer == rank else self.handle.get_buffer(peer, (nbytes,), torch.uint8, skipped) for peer in range(n_ranks)
        ]

    def _register(self, name, group):
        from torch._C import _distributed_c10d as c10d

        c10d._register_process_group(name, group)
        self._groups.append(name)

    def _register_world(self, group, rank, n_ranks):
        if not torch.distributed.is_initialized():
            self._register(_WORLD, group)
            return
        place = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if place != (rank, n_ranks):
            raise ShmemError(
                f"rank {rank} of {n_ranks} is rank {place[0]} of {place[1]} of torch.distributed: with "
                "TRITON_DIST_NVIDIA_HEAP=nvshmem both must have the same ranks",
                -1,
            )

    def _unregister(self, *names):
        from torch._C import _distributed_c10d as c10d

        for name in names:
            c10d._unregister_process_group(name)
            self._groups.remove(name)

    def close(self):
        """The memory goes with the last tensor on it. NVSHMEM's stays for the next heap of this size: to free it is
        collective, but ranks drop their tensors when they like."""
        self._unregister(*self._groups)
        if self.nvshmem:
            _kept[self.key] = self


def _tensor_at(address, nbytes, memory):
    """uint8 [nbytes] at an address inside `memory`, with a storage that begins there."""

    class Place:
        __cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        keeps = memory

    return torch.as_tensor(Place(), device=memory.device)


def _gloo_group(name, rank, n_ranks, store, timeout):
    from torch._C import _distributed_c10d as c10d

    group = c10d.ProcessGroup(store, rank, n_ranks)
    gloo = c10d.ProcessGroupGloo(store, rank, n_ranks, datetime.timedelta(seconds=timeout))
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)
    return group


def _selected(symmetric, device):
    return symmetric.get_backend(device) if hasattr(symmetric, "get_backend") else "CUDA"


def _select(symmetric, backend, device):
    if _selected(symmetric, device) == backend:
        return
    try:
        symmetric.set_backend(backend)
    except RuntimeError as error:
        raise BackendError(
            f"TRITON_DIST_NVIDIA_HEAP asks for torch's {backend} symmetric memory, but this process has allocated "
            f"{_selected(symmetric, device)} symmetric memory already ({str(error).splitlines()[0]}): init before, or unset it"
        ) from error
