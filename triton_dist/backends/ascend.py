"""The ascend platform: the heap is one allocation of the `shmem` wheel (CANN SHMEM), peers are reached through its
pointers.

Written from the wheel's documented API and NOT yet run on an NPU. The ranks meet at our own rendezvous; the wheel's
is done with a unique id that rank 0 makes, so that `ip_port` is needed by nobody."""

import os

from .. import errors
from . import processes
from .store import StoreControl

HEAP_STEP = 2 << 20  # the wheel maps heaps in steps of 2 MiB
OWN_USE = 4 << 20  # room for what the wheel's allocator keeps beside our one allocation

_tls = None  # what set_conf_store_tls asked for


def set_tls(enable, info):
    """Kept until init, where the wheel is told."""
    global _tls
    _tls = enable, info


def _import(name, what):
    try:
        return __import__(name)
    except Exception as error:  # a missing CANN shows as an OSError about libascendcl.so
        raise errors.BackendError(
            f"the ascend platform needs {what}: `import {name}` failed: {type(error).__name__}: {error}"
        ) from error


def wheel():
    """The `shmem` module, with torch_npu and CANN loaded."""
    _import("torch", "torch")
    _import("torch_npu", "the torch_npu distribution that fits your torch and CANN")
    return _import("shmem", "the cann-shmem distribution and a CANN whose set_env.sh was sourced")


class Platform:
    process_group = "hccl"

    def device_count(self):
        import torch

        wheel()
        return torch.npu.device_count()

    def prepare(self, rank):
        import torch

        wheel()
        count = torch.npu.device_count()
        local = int(os.environ.get("LOCAL_RANK", rank % max(count, 1)))
        ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), local + 1)
        if not count:
            raise errors.BackendError(
                "no NPU is visible to torch_npu (ASCEND_RT_VISIBLE_DEVICES="
                f"{os.environ.get('ASCEND_RT_VISIBLE_DEVICES', 'unset')}): see npu-smi, or set TRITON_DIST_BACKEND=cpu"
            )
        if ranks > count:
            raise errors.BackendError(
                f"{ranks} ranks run on this host but it has {count} NPU{'s' * (count > 1)}: start at most {count} "
                f"(torchrun --nproc-per-node={count}), or set TRITON_DIST_BACKEND=cpu"
            )
        torch.npu.set_device(local)
        return torch.device("npu", local)

    def heap(self, rank, n_ranks, nbytes):
        return Heap(rank, n_ranks, nbytes)


class Heap:
    def __init__(self, rank, n_ranks, nbytes):
        import torch

        self.rank, self.n_ranks, self.nbytes, self.shmem = rank, n_ranks, nbytes, wheel()
        self.device = torch.device("npu", torch.npu.current_device())
        self.descriptor = {"process": processes.identity()}
        if rank == 0:
            self.descriptor["unique_id"] = self.shmem.aclshmem_get_unique_id().hex()
        self.control = self._tensors = None

    def connect(self, descriptors, store, timeout):
        import torch

        shmem = self.shmem
        whole = -(-(self.nbytes + OWN_USE) // HEAP_STEP) * HEAP_STEP
        if _tls is not None:
            self._check("set_conf_store_tls", shmem.set_conf_store_tls(*_tls))
        unique_id = bytes.fromhex(descriptors[0]["unique_id"])
        code = shmem.aclshmem_init_using_unique_id(self.rank, self.n_ranks, whole, unique_id)
        self._check("aclshmem_init_using_unique_id", code)
        base = shmem.aclshmem_align(HEAP_STEP, self.nbytes)
        self.bases = [base if peer == self.rank else shmem.aclshmem_ptr(base, peer) for peer in range(self.n_ranks)]
        unreachable = [peer for peer, address in enumerate(self.bases) if not address]
        if unreachable:
            raise errors.ShmemError(
                f"the wheel gives no address for the heap of rank {unreachable}: no HCCS path to that NPU", -3
            )
        self.span = (min(self.bases), max(self.bases) + self.nbytes)
        make = shmem.construct_tensor.construct_tensor_from_ptr
        self._tensors = [make(address, (self.nbytes,), torch.uint8, self.device) for address in self.bases]
        self.control = StoreControl(store, self.rank, [one["process"] for one in descriptors])

    def _check(self, call, code):
        if code:
            raise errors.ShmemError(
                f"the shmem wheel's {call} returned {code} (see SHMEM_LOG_LEVEL, SHMEM_LOG_PATH)", code
            )

    def mapped_by_all(self):
        pass

    def tensor(self, rank):
        return self._tensors[rank]

    def exchange(self, team, text, describe, timeout=None):
        import torch

        torch.npu.synchronize(self.device)
        return self.control.exchange(team, text, describe, timeout)

    def limit_waits(self, seconds):
        pass  # a kernel's wait is not bounded on a device

    def counter(self, team_id):
        return 0

    # -- put, get, signals: the wheel's own calls; it signals int32 words only
    def put(self, dst, src, nbytes, peer, blocking):
        (self.shmem.aclshmem_putmem if blocking else self.shmem.aclshmem_putmem_nbi)(dst, src, nbytes, peer)

    def get(self, dst, src, nbytes, peer, blocking):
        (self.shmem.aclshmem_getmem if blocking else self.shmem.aclshmem_getmem_nbi)(dst, src, nbytes, peer)

    def put_signal(self, dst, src, nbytes, signal, value, add, itemsize, peer, blocking):
        if itemsize != 4:
            raise errors.UnsupportedError(
                "ascend: host calls signal int32 words only; make the signals with torch.int32"
            )
        shmem = self.shmem
        call = shmem.aclshmemx_putmem_signal if blocking else shmem.aclshmemx_putmem_signal_nbi
        call(dst, src, nbytes, signal, value, int(add), peer)

    def wait_signal(self, address, compare, value, itemsize, describe, timeout=None):
        import torch

        word = self._tensors[self.rank][address - self.bases[self.rank] :][:itemsize]
        word = word.view(torch.int32 if itemsize == 4 else torch.int64)
        self.control.wait(
            lambda: compare(int(word.item()), value), lambda: f"{describe()}; seen {word.item()}", timeout
        )

    def stream(self, urgent):
        raise errors.UnsupportedError("ascend: work and signals in the order of streams are not available: torch_npu has none")

    def end_peers(self):
        if self.control:
            self.control.peers.end()

    def close(self):
        import torch

        if self.control:
            torch.npu.synchronize(self.device)
            self.control.close()
            self.shmem.aclshmem_free(self.bases[self.rank])
            self._check("aclshmem_finalize", self.shmem.aclshmem_finalize())
        self.control = self._tensors = None
