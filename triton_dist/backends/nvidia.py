"""The nvidia platform: a heap is one allocation of torch's symmetric memory, peers are mapped over NVLink or PCIe.

One host through the CUDA backend; several through torch's NVSHMEM backend (`symm_mem.set_backend("NVSHMEM")` before
init)."""

import datetime
import itertools
import os

import torch

from .. import errors
from . import nvidia_graph, nvidia_queue, nvidia_stream, processes
from .store import StoreControl

_group = itertools.count()


class Platform:
    process_group = "nccl"

    def load(self):
        pass  # nccl is torch's own

    def device_count(self):
        return torch.cuda.device_count()

    def prepare(self, rank):
        if torch.version.cuda is None:
            raise errors.BackendError(
                f"this torch ({torch.__version__}) was built without CUDA: install a CUDA build of torch, or set "
                "TRITON_DIST_BACKEND=cpu"
            )
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise errors.BackendError(
                "no NVIDIA GPU is visible to torch (CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): see nvidia-smi, or set TRITON_DIST_BACKEND=cpu"
            )
        local = int(os.environ.get("LOCAL_RANK", rank % count))
        one_each = count == 1 and len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1
        if one_each and "CUDA_VISIBLE_DEVICES" in os.environ:
            local = 0  # each rank was given a device of its own; connect() checks that they differ
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
        if local >= count or (ranks > count and not one_each):
            raise errors.BackendError(
                f"{max(ranks, local + 1)} ranks run on this host but it has {count} GPU{'s' * (count > 1)}: start "
                "at most "
                f"{count} (torchrun --nproc-per-node={count}), or set TRITON_DIST_BACKEND=cpu"
            )
        torch.cuda.set_device(local)
        return torch.device("cuda", local)

    def heap(self, rank, n_ranks, nbytes, options):
        return Heap(rank, n_ranks, nbytes)


class Heap:
    def __init__(self, rank, n_ranks, nbytes):
        self.rank, self.n_ranks, self.nbytes = rank, n_ranks, nbytes
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.descriptor = {"process": processes.identity(), "device": str(getattr(properties, "uuid", self.device))}
        self.handle = self.control = self._tensors = self._group = None

    def connect(self, descriptors, store, timeout):
        from torch._C import _distributed_c10d as c10d
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed._symmetric_memory import _SymmetricMemory

        seen = {}
        for rank, one in enumerate(descriptors):
            place = one["process"]["host"], one["device"]
            if place in seen:
                raise errors.ShmemError(
                    f"ranks {seen[place]} and {rank} use the same GPU ({one['device']} of {place[0]}): each rank "
                    "needs its "
                    "own (LOCAL_RANK, CUDA_VISIBLE_DEVICES), or set TRITON_DIST_BACKEND=cpu",
                    -1,
                )
            seen[place] = rank
        # A group of our own, over the CPU alone: the user's process groups, if any, are left alone. torch 2.11 takes
        # rank, size and store from the registered group, older ones from the group info.
        name = f"triton_dist.{next(_group)}"
        self._group = c10d.ProcessGroup(store, self.rank, self.n_ranks)
        gloo = c10d.ProcessGroupGloo(store, self.rank, self.n_ranks, datetime.timedelta(seconds=timeout))
        self._group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
        self._group._set_group_name(name)
        c10d._register_process_group(name, self._group)
        _SymmetricMemory.set_group_info(name, self.rank, self.n_ranks, store)
        # what symm_mem.empty does without its memory pool, which could place us inside a shared segment
        memory = _SymmetricMemory.empty_strided_p2p((self.nbytes,), (1,), torch.uint8, self.device)
        self.handle = symmetric.rendezvous(memory, name)
        self.bases = [int(address) for address in self.handle.buffer_ptrs]
        self.span = (min(self.bases), max(self.bases) + self.nbytes)
        self._tensors = [
            memory if peer == self.rank else self.handle.get_buffer(peer, (self.nbytes,), torch.uint8)
            for peer in range(self.n_ranks)
        ]
        self.control = StoreControl(store, self.rank, [one["process"] for one in descriptors])
        self._side = torch.cuda.Stream(self.device)
        self._seen = torch.empty(1, dtype=torch.int64).pin_memory()
        self._queues = nvidia_queue.Queues(self.device)

    def mapped_by_all(self):
        pass

    def tensor(self, rank):
        return self._tensors[rank]

    def exchange(self, team, text, describe, timeout=None):
        torch.cuda.synchronize(self.device)
        return self.control.exchange(team, text, describe, timeout)

    def limit_waits(self, seconds):
        pass  # a kernel's wait is not bounded on a device

    def counter(self, team_id):
        return 0

    # -- put, get, signals: in the order of the current stream
    def _bytes(self, address, nbytes):
        """nbytes at a device address as a uint8 tensor."""
        for base, memory in zip(self.bases, self._tensors):
            if base <= address and address + nbytes <= base + self.nbytes:
                return memory[address - base : address - base + nbytes]

        class Memory:
            __cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

        return torch.as_tensor(Memory(), device=self.device)

    def _at(self, address, peer):
        return address + self.bases[peer] - self.bases[self.rank]

    def _copy(self, dst, src, nbytes, blocking):
        self._bytes(dst, nbytes).copy_(self._bytes(src, nbytes), non_blocking=True)
        if blocking:
            torch.cuda.current_stream(self.device).synchronize()

    def put(self, dst, src, nbytes, peer, blocking):
        self._copy(self._at(dst, peer), src, nbytes, blocking)

    def get(self, dst, src, nbytes, peer, blocking):
        self._copy(dst, self._at(src, peer), nbytes, blocking)

    def put_signal(self, dst, src, nbytes, signal, value, add, itemsize, peer, blocking):
        from .nvidia_signal import publish

        if nbytes:
            self.put(dst, src, nbytes, peer, False)
        word = self._bytes(self._at(signal, peer), itemsize).view(torch.int32 if itemsize == 4 else torch.int64)
        publish[(1,)](word, value, ADD=add, num_warps=1)
        if blocking:
            torch.cuda.current_stream(self.device).synchronize()

    def wait_signal(self, address, compare, value, itemsize, describe, timeout=None):
        word = self._bytes(address, itemsize).view(torch.int32 if itemsize == 4 else torch.int64)

        def read():
            with torch.cuda.stream(self._side):  # a kernel on the current stream may itself be waiting
                self._seen.copy_(word, non_blocking=True)
            self._side.synchronize()
            return int(self._seen[0])

        self.control.wait(lambda: compare(read(), value), lambda: f"{describe()}; seen {read()}", timeout)

    # -- streams
    def stream(self, urgent):
        return nvidia_queue.Queue(self._queues, urgent)

    def recorder(self):
        return nvidia_graph.Recorder(self._queues)

    def word_setter(self, *addresses):
        """A function that sets the words to 1 in the order of the current stream."""
        return self._giver(nvidia_stream.batch(*((nvidia_stream.WRITE, address, 1) for address in addresses)))

    def word_taker(self, describe, *addresses):
        """A function that waits in the order of the current stream until the words are 1, and takes them back to 0."""
        pairs = [[(nvidia_stream.WAIT, address, 1), (nvidia_stream.WRITE, address, 0)] for address in addresses]
        return self._giver(nvidia_stream.batch(*sum(pairs, [])))

    def word_poller(self, describe, *addresses):
        """As word_taker, by a program of one warp. A stream that waits for a word which is not yet set looks again 45 to 90 us
        later when the device is busy; a program looks every microsecond, but needs a multiprocessor."""
        from .nvidia_signal import take

        steps = {after - before for before, after in zip(addresses, addresses[1:])}
        if len(steps) > 1:
            return lambda: [take[(1,)](address, 0, 1, num_warps=1) for address in addresses]
        return lambda: take[(1,)](addresses[0], max(steps, default=0), len(addresses), num_warps=1)

    def _giver(self, batch):
        return lambda: nvidia_stream.give(torch.cuda.current_stream(self.device).cuda_stream, batch)

    def end_peers(self):
        if self.control:
            self.control.peers.end()

    def close(self):
        if self.control:
            torch.cuda.synchronize(self.device)
            self._queues.close()
            self.control.close()
        if self._group is not None:
            from torch._C import _distributed_c10d as c10d

            c10d._unregister_process_group(self._group.group_name)
        self.handle = self.control = self._tensors = self._group = None
