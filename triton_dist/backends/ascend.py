"""The ascend platform: the heap is one allocation of the `shmem` wheel (CANN SHMEM), peers are reached through the
addresses that it gives.

Written from the wheel's documented API; tested against a stand-in of it, NOT yet run on an NPU. The ranks meet at our
own rendezvous; the wheel's is done with a unique id that rank 0 makes, so that `ip_port` is needed by nobody. A unique
id carries no options: for an engine other than MTE the wheel is given an address that rank 0 chooses instead."""

import os

from .. import errors
from . import addresses, ascend_versions, processes
from .store import StoreControl

HEAP_STEP = 2 << 20  # the wheel maps heaps in steps of 2 MiB
OWN_USE = 4 << 20  # room for what the wheel's allocator keeps beside our one allocation
MAX_WHOLE = 40 << 30  # the wheel's limit
SCRATCH = 64  # bytes behind the heap that a signal without data copies and nobody reads
MTE, ROCE, UDMA = 1, 4, 8  # OpEngineType: loads and stores over HCCS; engines that also reach where these do not
INVALID_PARAM, SMEM, INNER = -1, -3, -4  # see shmem.codes
NOT_INITIALIZED = 0  # InitStatus

# What set_conf_store_tls asked for. The wheel's own default is TLS with certificates that somebody has set up; ours is
# none, as in all its examples: the unique id that opens its store came over torch's store, which has no TLS either.
_tls = False, ""


def set_tls(enable, info):
    """Kept until init, where the wheel is told."""
    global _tls
    _tls = enable, info


class Platform:
    process_group = "hccl"

    def load(self):
        ascend_versions.require()  # torch_npu registers hccl

    def device_count(self):
        return ascend_versions.require().npu.device_count()

    def prepare(self, rank):
        torch = ascend_versions.require()
        ascend_versions.wheel()
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        count = torch.npu.device_count()
        if not count:
            raise errors.BackendError(
                f"no NPU is visible to torch_npu (ASCEND_RT_VISIBLE_DEVICES={visible or 'unset'}): see `npu-smi info`, or "
                "set TRITON_DIST_BACKEND=cpu"
            )
        local = int(os.environ.get("LOCAL_RANK", rank % count))
        ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), local + 1)
        if count == 1 and visible and "," not in visible:
            local = 0  # each rank was given a device of its own; connect() checks that they differ
        elif ranks > count:
            raise errors.BackendError(
                f"{ranks} ranks run on this host but it has {count} NPU{'s' * (count > 1)}: start at most {count} "
                f"(torchrun --nproc-per-node={count}), or set TRITON_DIST_BACKEND=cpu"
            )
        torch.npu.set_device(local)
        return torch.device("npu", local)

    def heap(self, rank, n_ranks, nbytes, options):
        return Heap(rank, n_ranks, nbytes, options)


class Heap:
    stuck = False

    def __init__(self, rank, n_ranks, nbytes, options):
        import torch

        self.rank, self.n_ranks, self.nbytes, self.options = rank, n_ranks, nbytes, options
        self.control = None
        self._torch, self._wheel = torch, ascend_versions.wheel()
        self._begun = False  # the wheel is initialised
        self._allocation = None
        self._tensors = [None] * n_ranks
        self._whole = -(-(nbytes + SCRATCH + OWN_USE) // HEAP_STEP) * HEAP_STEP
        if self._whole > MAX_WHOLE:
            raise errors.ShmemError(
                f"InitAttr.local_mem_size is {nbytes}: on ascend give at most {MAX_WHOLE - OWN_USE - HEAP_STEP} (the wheel's "
                "limit of 40 GiB holds its own tables, too)",
                INVALID_PARAM,
            )
        status = int(self._call("aclshmemx_init_status"))
        if status != NOT_INITIALIZED:
            raise errors.ShmemError(
                f"the shmem wheel is initialised already in this process (its status is {status}). By `import shmem`? Use that "
                "or `from triton_dist import shmem`, not both. By a run that lost a peer? Start new processes",
                INVALID_PARAM,
            )
        self.device = torch.device("npu", torch.npu.current_device())
        self.descriptor = {"process": processes.identity(), "npu": self._physical_npu()}
        self._returns_0("set_conf_store_tls", *_tls)
        self._engine = int(options.data_op_engine_type)
        if rank == 0 and self._engine == MTE:
            self.descriptor["unique_id"] = bytes(self._call("aclshmem_get_unique_id")).hex()
        elif rank == 0:
            host = addresses.own_address(loopback=False)
            self.descriptor["ip_port"] = f"tcp://{host}:{addresses.free_port(host)}"

    def _physical_npu(self):
        """The number that npu-smi gives to this rank's NPU."""
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
        return int(visible.split(",")[self.device.index]) if visible.strip() else self.device.index

    def _call(self, name, *args):
        """A call of the wheel; an exception becomes a ShmemError that names the call."""
        try:
            return getattr(self._wheel, name)(*args)
        except Exception as error:
            raise errors.ShmemError(
                f"the shmem wheel's {name} raised {type(error).__name__}: {error} (SHMEM_LOG_LEVEL=DEBUG and SHMEM_LOG_PATH "
                "show its log)",
                INNER,
            ) from error

    def _returns_0(self, name, *args):
        """A call of the wheel that returns a code."""
        code = self._call(name, *args)
        if code:
            raise errors.ShmemError(
                f"the shmem wheel's {name} returned {code} (SHMEM_LOG_LEVEL=DEBUG and SHMEM_LOG_PATH show its log)", code
            )

    def connect(self, descriptors, store, timeout):
        seen = {}
        for rank, one in enumerate(descriptors):
            place = one["process"]["host"], one["npu"]
            if place in seen:
                raise errors.ShmemError(
                    f"ranks {seen[place]} and {rank} use the same NPU ({place[1]} of {place[0]}): each rank needs its own "
                    "(LOCAL_RANK, ASCEND_RT_VISIBLE_DEVICES), or set TRITON_DIST_BACKEND=cpu",
                    INVALID_PARAM,
                )
            seen[place] = rank
        if self._engine == MTE:
            unique_id = bytes.fromhex(descriptors[0]["unique_id"])
            self._returns_0("aclshmem_init_using_unique_id", self.rank, self.n_ranks, self._whole, unique_id)
        else:
            self._returns_0("aclshmem_init", self._attributes(descriptors[0]["ip_port"]))
        self._begun = True
        base = self._allocation = self._call("aclshmem_align", HEAP_STEP, self.nbytes + SCRATCH)
        if not base:
            raise errors.ShmemError(f"the shmem wheel's aclshmem_align gave no {self.nbytes} bytes", -8)
        self.bases = [base if peer == self.rank else self._call("aclshmem_ptr", base, peer) for peer in range(self.n_ranks)]
        unreachable = [peer for peer, address in enumerate(self.bases) if not address]
        if unreachable and not self._engine & (ROCE | UDMA):
            raise errors.ShmemError(
                f"the wheel gives no address for the heap of rank {', '.join(map(str, unreachable))}: no HCCS path to that "
                "NPU, so loads and stores cannot reach it. Across hosts, set InitAttr.option_attr.data_op_engine_type to ROCE "
                "and call aclshmem's own device functions (docs/ascend-platform.md)",
                SMEM,
            )
        reachable = [address for address in self.bases if address]
        self.span = (min(reachable), max(reachable) + self.nbytes)
        self._side = self._torch.npu.Stream(device=self.device)
        self._store, self._identities = store, [one["process"] for one in descriptors]

    def _attributes(self, ip_port):
        wheel, options = self._wheel, self.options
        attributes = wheel.InitAttr()
        attributes.my_rank, attributes.n_ranks = self.rank, self.n_ranks
        attributes.local_mem_size, attributes.ip_port = self._whole, ip_port
        attributes.option_attr.data_op_engine_type = wheel.OpEngineType(self._engine)
        for name in ("shm_init_timeout", "shm_create_timeout", "control_operation_timeout"):
            setattr(attributes.option_attr, name, int(getattr(options, name)))
        return attributes

    def mapped_by_all(self):
        self.control = StoreControl(self._store, self.rank, self._identities)

    def tensor(self, rank):
        if self._tensors[rank] is None:
            from shmem.construct_tensor import construct_tensor_from_ptr  # a submodule that the wheel loads late

            if not self.bases[rank]:
                raise errors.ShmemError(
                    f"rank {self.rank}: loads and stores do not reach the heap of rank {rank}: it is on another host", SMEM
                )
            self._tensors[rank] = construct_tensor_from_ptr(
                self.bases[rank], (self.nbytes,), self._torch.uint8, self.device
            )
        return self._tensors[rank]

    def exchange(self, team, text, describe, timeout=None):
        self._torch.npu.synchronize(self.device)
        return self.control.exchange(team, text, describe, timeout)

    def limit_waits(self, seconds):
        pass  # a kernel's wait is not bounded on a device

    def check_waits(self):
        pass  # a kernel's wait is not bounded on a device

    def counter(self, team_id):
        return 0

    # -- put, get, signals: the wheel's own calls, which run on a stream of its own; it signals int32 words only
    def _in_order(self, name, *args):
        """The wheel's call, after what the current stream has been given so far."""
        self._torch.npu.current_stream(self.device).synchronize()
        self._call(name, *args)

    def put(self, dst, src, nbytes, peer, blocking):
        self._in_order("aclshmem_putmem" if blocking else "aclshmem_putmem_nbi", dst, src, nbytes, peer)

    def get(self, dst, src, nbytes, peer, blocking):
        self._in_order("aclshmem_getmem" if blocking else "aclshmem_getmem_nbi", dst, src, nbytes, peer)

    def put_signal(self, dst, src, nbytes, signal, value, add, itemsize, peer, blocking):
        if itemsize != 4:
            raise errors.UnsupportedError(
                f"rank {self.rank}: ascend: host calls signal int32 words only, this one has {itemsize * 8} bits: make the "
                "signals with torch.int32"
            )
        if not nbytes:  # what the wheel does with no bytes is not documented
            dst = src = self._allocation + self.nbytes
            nbytes = SCRATCH
        call = "aclshmemx_putmem_signal" if blocking else "aclshmemx_putmem_signal_nbi"
        self._in_order(call, dst, src, nbytes, signal, value, int(add), peer)

    def wait_signal(self, address, compare, value, itemsize, describe, timeout=None):
        torch = self._torch
        word = self.tensor(self.rank)[address - self.bases[self.rank] :][:itemsize]
        word = word.view(torch.int32 if itemsize == 4 else torch.int64)

        def read():
            with torch.npu.stream(self._side):  # a kernel on the current stream may itself be waiting
                return int(word.cpu()[0])

        self.control.wait(lambda: compare(read(), value), lambda: f"{describe()}; seen {read()}", timeout)

    def stream(self, urgent):
        raise errors.UnsupportedError("ascend: work and signals in the order of streams are not available: torch_npu has none")

    def copy(self, to, source):
        to.copy_(source)

    def recorder(self):
        return None

    def end_peers(self):
        if self.control:
            self.control.peers.end()

    def close(self):
        """Frees and finalizes, both collective calls of the wheel, so not when a peer has gone: they would wait for it."""
        control, self.control = self.control, None
        begun, self._begun, allocation, self._allocation = self._begun, False, self._allocation, None
        self._tensors = [None] * self.n_ranks
        if control:
            if not control.failed:
                self._torch.npu.synchronize(self.device)
            control.close()
        if not begun or (control and control.failed):
            return
        try:
            if control and allocation:  # else not every rank got this far, and finalize takes the memory back
                self._call("aclshmem_free", allocation)
        finally:
            self._returns_0("aclshmem_finalize")
