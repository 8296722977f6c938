"""The nvidia platform: a heap is one allocation of torch's symmetric memory (nvidia_memory.py), peers are mapped over NVLink
or PCIe."""

import json
import os

import torch

from .. import context, errors
from ..limits import wait_timeout
from . import nvidia_copy, nvidia_graph, nvidia_memory, nvidia_queue, nvidia_stream, nvidia_waits, processes
from .store import StoreControl

_abandoned = []  # memory that a stuck kernel may still use, so nobody may free it


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
        nvidia_memory.choice()
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
        self.descriptor["memory"] = nvidia_memory.choice()
        self.memory = self.control = self._tensors = self.waits = None
        self.stuck, self._limit = False, None

    def connect(self, descriptors, store, timeout):
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
        kinds = [one["memory"] for one in descriptors]
        if len(set(kinds)) > 1:
            listed = ", ".join(f"rank {rank}: {kind or 'unset'}" for rank, kind in enumerate(kinds))
            raise errors.ShmemError(f"TRITON_DIST_NVIDIA_HEAP must be equal on all ranks ({listed})", -1)
        self.memory = nvidia_memory.share(self.rank, self.n_ranks, self.nbytes, self.device, store, timeout)
        self.bases = self.memory.bases
        self.span = (min(self.bases), max(self.bases) + self.nbytes)
        self._tensors = self.memory.tensors
        self.control = StoreControl(store, self.rank, [one["process"] for one in descriptors])
        self._side = torch.cuda.Stream(self.device)
        self._seen = torch.empty(1, dtype=torch.int64).pin_memory()
        self._signals_seen = torch.empty(nvidia_waits.SIGNALS_BYTES, dtype=torch.uint8).pin_memory()
        self._queues = nvidia_queue.Queues(self.device)

    def mapped_by_all(self):
        pass

    def tensor(self, rank):
        return self._tensors[rank]

    def exchange(self, team, text, describe, timeout=None):
        limit = wait_timeout(timeout)
        trouble = self._trouble(nvidia_waits.device_rests, limit, describe)
        # A little longer than a peer waits for its own device: so a peer that is in trouble comes, and says so.
        later = limit + 3 * nvidia_waits.GRACE_S
        said = [json.loads(one) for one in self.control.exchange(team, json.dumps([trouble, text]), describe, limit=later)]
        troubles = [one[0] for one in said if one[0]]
        if troubles:
            raise errors.WaitTimeoutError("\n".join(troubles))
        return [one[1] for one in said]

    def _trouble(self, rests, limit, describe):
        """Waits for the device, or a stream of it: `rests(device, seconds)`. None, or what is wrong: waits of kernels that
        gave up, a device that is still busy."""
        seconds, error = limit + (nvidia_waits.GRACE_S if self.waits else 0), None
        try:
            done = rests(self.device, 0.2 if self.stuck else seconds)
        except RuntimeError as lost:  # wrong results that are addresses make more errors
            if not (self.waits and self.waits.report()):
                raise
            done, error = True, lost
        self.stuck = not done
        gave_up = self.waits and self.waits.report()
        if gave_up:
            return gave_up + (f"\n  then: {error}" if error else "")
        if done:
            return None
        signals = nvidia_waits.signals_now(self.tensor(self.rank), self._side, self._signals_seen)
        lines = [f"\n  rank {self.rank}: {line}" for line in signals]
        advice = "" if self.waits else "; with it set, kernels say what they wait for"
        return (
            f"rank {self.rank}: its device is still busy after {seconds:g} s (TRITON_DIST_WAIT_TIMEOUT sets the limit"
            f"{advice})\n  rank {self.rank}: {describe()}. Its signals hold:" + "".join(lines or [" (there are none)"])
        )

    def limit_waits(self, seconds):
        self._limit = seconds
        limit = nvidia_waits.kernel_waits_limit(seconds)
        if limit is None:
            return None
        self.waits = nvidia_waits.KernelWaits.on(self.rank, limit, self.device)
        words = context.table_words(self.rank, self.bases, self.nbytes, self.waits.words)
        self._table = torch.tensor(words, dtype=torch.int64, device=self.device)
        return self.waits.words

    def check_waits(self):
        if self.waits:
            self.waits.check()

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

    def _copy(self, call, dst, src, nbytes, blocking):
        self._bytes(dst, nbytes).copy_(self._bytes(src, nbytes), non_blocking=True)
        if blocking:
            self._finish_stream(call)

    def _finish_stream(self, call):
        """Waits for the current stream: WaitTimeoutError when it stands still."""
        trouble = self._trouble(nvidia_waits.stream_rests, wait_timeout(self._limit), lambda: f"in shmem's {call}")
        if trouble:
            raise errors.WaitTimeoutError(trouble)

    def put(self, dst, src, nbytes, peer, blocking):
        self._copy("put", self._at(dst, peer), src, nbytes, blocking)

    def get(self, dst, src, nbytes, peer, blocking):
        self._copy("get", dst, self._at(src, peer), nbytes, blocking)

    def put_signal(self, dst, src, nbytes, signal, value, add, itemsize, peer, blocking):
        from .nvidia_signal import publish

        if nbytes:
            self.put(dst, src, nbytes, peer, False)
        word = self._bytes(self._at(signal, peer), itemsize).view(torch.int32 if itemsize == 4 else torch.int64)
        publish[(1,)](word, value, ADD=add, num_warps=1)
        if blocking:
            self._finish_stream("put with a signal")

    def wait_signal(self, address, compare, value, itemsize, describe, timeout=None):
        word = self._bytes(address, itemsize).view(torch.int32 if itemsize == 4 else torch.int64)

        def read():
            with torch.cuda.stream(self._side):  # a kernel on the current stream may itself be waiting
                self._seen.copy_(word, non_blocking=True)
            limit = wait_timeout(timeout)
            if not nvidia_waits.passed(self._side, limit):
                raise errors.WaitTimeoutError(f"rank {self.rank}: {describe()}; a copy of it did not come back in {limit:g} s")
            return int(self._seen[0])

        self.control.wait(lambda: compare(read(), value), lambda: f"{describe()}; seen {read()}", timeout)

    # -- streams
    def stream(self, urgent):
        return nvidia_queue.Queue(self._queues, urgent)

    def copy(self, to, source):
        if to.is_contiguous() and source.is_contiguous():
            to.copy_(source, non_blocking=True)
        elif to.numel():
            nvidia_copy.copy_rows(to, source, torch.cuda.current_stream(self.device).cuda_stream)

    def recorder(self):
        return nvidia_graph.Recorder(self._queues)

    def word_setter(self, *addresses):
        """A function that sets the words to 1 in the order of the current stream."""
        return self._giver(nvidia_stream.batch(*((nvidia_stream.WRITE, address, 1) for address in addresses)))

    def word_teller(self, *addresses):
        """As word_setter, by a program of one warp: within 3 us instead of 10, but it needs a multiprocessor."""
        from .nvidia_signal import tell

        return lambda: [tell[(1,)](address, num_warps=1) for address in addresses]

    def word_taker(self, describe, *addresses):
        """A function that waits in the order of the current stream until the words are 1, and takes them back to 0."""
        if self.waits:  # the driver's wait has no limit
            return self.word_poller(describe, *addresses)
        pairs = [[(nvidia_stream.WAIT, address, 1), (nvidia_stream.WRITE, address, 0)] for address in addresses]
        return self._giver(nvidia_stream.batch(*sum(pairs, [])))

    def word_poller(self, describe, *addresses):
        """As word_taker, by a program of one warp. A stream that waits for a word which is not yet set looks again 45 to 90 us
        later when the device is busy; a program looks every microsecond, but needs a multiprocessor."""
        from .nvidia_signal import take, take_limited

        steps = {after - before for before, after in zip(addresses, addresses[1:])}
        if len(steps) > 1:
            each = [self.word_poller(describe, address) for address in addresses]
            return lambda: [one() for one in each]
        words = addresses[0], max(steps, default=0), len(addresses)
        if self.waits:
            return lambda: take_limited[(1,)](*words, self._table, num_warps=1)
        return lambda: take[(1,)](*words, num_warps=1)

    def _giver(self, batch):
        return lambda: nvidia_stream.give(torch.cuda.current_stream(self.device).cuda_stream, batch)

    def end_peers(self):
        if self.control:
            self.control.peers.end()

    def close(self):
        if self.control:
            try:
                if not nvidia_waits.device_rests(self.device, 0.2 if self.stuck else wait_timeout(self._limit)):
                    _abandoned.append((self.memory, self.waits, self._queues))
                else:
                    self._queues.close()
            finally:
                self.control.close()
        if self.waits:
            self.waits.close()
        if self.memory:
            self.memory.close()
        self.memory = self.control = self._tensors = self.waits = None
