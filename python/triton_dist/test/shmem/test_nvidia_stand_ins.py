"""The host side of NVIDIA GPUs without one: symmetric memory and devices are stand-ins, records of waits are made up."""

import contextlib
import operator
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed import _symmetric_memory as symmetric

from triton_dist import context
from triton_dist.backends import nvidia, nvidia_memory, nvidia_waits
from triton_dist.errors import BackendError, ShmemError, WaitTimeoutError

# -- whose memory the heap is


class Memory:
    """torch's symmetric memory: `addresses` of all ranks' copies, 0 for those that are out of reach."""

    def __init__(self, monkeypatch, addresses, selected="CUDA", refused=False):
        self.calls, self.addresses, self.selected, self.refused = [], addresses, selected, refused
        self.buffer_ptrs = addresses
        for name in ("get_backend", "set_backend", "rendezvous"):
            monkeypatch.setattr(symmetric, name, getattr(self, name))
        monkeypatch.setattr(symmetric, "is_nvshmem_available", lambda: True)
        monkeypatch.setattr(symmetric, "_SymmetricMemory", self)
        monkeypatch.setattr(nvidia_memory, "_gloo_group", self.group)
        monkeypatch.setattr(nvidia_memory, "_tensor_at", lambda address, nbytes, memory: memory[:nbytes])
        monkeypatch.setattr(nvidia_memory, "_kept", {})

    def group(self, name, rank, n_ranks, store, timeout):
        return torch.distributed.ProcessGroup(store, 0, 1)

    def get_backend(self, device):
        return self.selected

    def set_backend(self, name):
        if self.refused:
            raise RuntimeError("backend cannot be changed\nmore")
        self.selected = name

    def set_group_info(self, name, rank, n_ranks, store):
        self.calls.append(("info", name))

    def empty_strided_p2p(self, size, stride, dtype, device):
        self.calls.append(("empty", self.world_is_known()))
        return torch.empty(size, dtype=dtype)

    def rendezvous(self, memory, name):
        self.calls.append(("rendezvous", name, self.world_is_known()))
        return self

    def get_buffer(self, peer, size, dtype, storage_offset=0):
        assert (self.addresses[peer] + storage_offset) % (nvidia_memory.ALIGNMENT if self.selected == "NVSHMEM" else 1) == 0
        return torch.full(size, peer, dtype=dtype)

    @staticmethod
    def world_is_known():
        try:
            torch._C._distributed_c10d._resolve_process_group("0")
        except (LookupError, RuntimeError):
            return False
        return True


class Store(HashStore):
    """In which the other ranks have said what this one says."""

    def get(self, key):
        return self.said

    def set(self, key, value):
        self.said = value


def share(rank=0, n_ranks=2, nbytes=64, store=None):
    return nvidia_memory.share(rank, n_ranks, nbytes, torch.device("cpu"), store or Store(), 5)


def test_an_unknown_heap_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_NVIDIA_HEAP", "nvlink")
    with pytest.raises(BackendError, match="TRITON_DIST_NVIDIA_HEAP='nvlink': choose one of cuda, nvshmem"):
        nvidia_memory.choice()


def test_a_torch_without_nvshmem_is_named(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_NVIDIA_HEAP", "nvshmem")
    monkeypatch.setattr(symmetric, "is_nvshmem_available", lambda: False)
    with pytest.raises(BackendError, match=f"this torch .{torch.__version__[:4]}.* finds no NVSHMEM: install"):
        nvidia_memory.choice()
    monkeypatch.delattr(symmetric, "is_nvshmem_available")  # an older torch
    with pytest.raises(BackendError, match="finds no NVSHMEM"):
        nvidia_memory.choice()


@pytest.mark.parametrize("asked, selected", [(None, "CUDA"), ("cuda", "CUDA"), ("CUDA", "NVSHMEM")])
def test_the_heap_is_torchs_cuda_memory_by_default_and_when_asked_for(monkeypatch, asked, selected):
    memory = Memory(monkeypatch, [4096, 8192], selected)
    monkeypatch.setenv("TRITON_DIST_NVIDIA_HEAP", asked or "")
    made = share(rank=1)
    assert memory.selected == "CUDA" and made.bases == [4096, 8192]
    assert made.tensors[0].tolist() == [0] * 64 and made.tensors[1].numel() == 64
    (info, empty, rendezvous) = memory.calls
    assert info[0] == "info" and empty == ("empty", False) and rendezvous == ("rendezvous", info[1], False)
    made.close()
    with pytest.raises((LookupError, RuntimeError)):
        torch._C._distributed_c10d._resolve_process_group(info[1])


def test_what_the_user_selected_in_torch_holds_when_nothing_is_asked_for(monkeypatch):
    memory = Memory(monkeypatch, [4096, (2 << 20) + 4096], "NVSHMEM")
    monkeypatch.delenv("TRITON_DIST_NVIDIA_HEAP", raising=False)
    assert share().nvshmem and memory.selected == "NVSHMEM"


def test_nvshmem_finds_the_world_while_it_allocates_and_not_after(monkeypatch):
    memory = Memory(monkeypatch, [4096, (2 << 20) + 4096])
    monkeypatch.setenv("TRITON_DIST_NVIDIA_HEAP", "nvshmem")
    made = share()
    assert memory.selected == "NVSHMEM"
    assert [call[-1] for call in memory.calls] == [True, True]
    assert not memory.world_is_known(), "torch.distributed may be initialised later"
    made.close()


def test_nvshmem_memory_is_aligned_as_heaps_are(monkeypatch):
    Memory(monkeypatch, [(6 << 20) - 512, (40 << 20) - 512], "NVSHMEM")
    made = share()
    assert made.bases == [6 << 20, 40 << 20] and [one.numel() for one in made.tensors] == [64, 64]


def test_heaps_that_nvshmem_placed_differently_are_an_error(monkeypatch):
    Memory(monkeypatch, [4096, (2 << 20) + 4096], "NVSHMEM")
    store = Store()
    said = iter(["2093056", "512"])
    monkeypatch.setattr(store, "get", lambda key: next(said), raising=False)
    with pytest.raises(ShmemError, match="rank 0: NVSHMEM placed the heaps differently: .2093056, 512. bytes"):
        share(store=store)


def test_one_rank_needs_no_team_of_nvshmem(monkeypatch):
    memory = Memory(monkeypatch, [4096], "NVSHMEM")
    made = share(n_ranks=1)
    assert [call[0] for call in memory.calls] == ["empty"] and made.bases[0] % nvidia_memory.ALIGNMENT == 0


def test_nvshmem_memory_serves_the_next_heap_of_its_size(monkeypatch):
    Memory(monkeypatch, [4096, (2 << 20) + 4096], "NVSHMEM")
    first = share()
    first.close()
    other = share(nbytes=128)
    assert other is not first and share() is first
    assert share() is not first, "it is in use"


def test_ranks_that_loads_and_stores_do_not_reach_are_named(monkeypatch):
    Memory(monkeypatch, [4096, 0, 8192, None], "NVSHMEM")
    with pytest.raises(ShmemError, match="rank 0 cannot load from or store to the heap of rank 1, 3, which NVSHMEM") as info:
        share(n_ranks=4)
    assert info.value.code == -3
    assert not Memory.world_is_known()


def test_nvshmem_needs_all_ranks_of_torch_distributed(monkeypatch):
    memory = Memory(monkeypatch, [4096, (2 << 20) + 4096], "NVSHMEM")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ShmemError, match="rank 1 of 2 is rank 2 of 4 of torch.distributed"):
        share(rank=1)
    assert not memory.calls, "nothing was allocated"


def test_torch_memory_of_the_other_kind_is_an_error_that_says_so(monkeypatch):
    Memory(monkeypatch, [4096], refused=True)
    monkeypatch.setenv("TRITON_DIST_NVIDIA_HEAP", "nvshmem")
    with pytest.raises(BackendError, match="asks for torch's NVSHMEM .* allocated CUDA .*cannot be changed.: init before"):
        share(n_ranks=1)


def test_ranks_that_ask_for_different_heaps_are_all_told():
    heap = nvidia.Heap.__new__(nvidia.Heap)
    heap.rank, heap.n_ranks = 0, 2
    descriptors = [{"process": {"host": "a"}, "device": str(i), "memory": kind} for i, kind in enumerate(["nvshmem", None])]
    with pytest.raises(ShmemError, match="must be equal on all ranks .rank 0: nvshmem, rank 1: unset."):
        heap.connect(descriptors, None, 5)


# -- waits that gave up


@pytest.fixture
def waits(monkeypatch):
    heap = context.HeapMap(0, [1 << 20, 1 << 30], 4096, (1 << 20, (1 << 30) + 4096))
    heap.add(context.Allocation(512, 8 * 64, "8 signals", (8, 16), 4))
    monkeypatch.setattr(context, "heap_map", heap)
    size = context.WAIT_RECORDS_KEPT, context.WAIT_RECORD_WORDS
    return nvidia_waits.KernelWaits(0, 1.5, torch.zeros(2, dtype=torch.int64), torch.zeros(size, dtype=torch.int64))


def record(waits, place, address, wanted, seen, compare, waited, program=(0, 0, 0)):
    words = [1, address, wanted, seen, context.COMPARES.index(compare), waited, *program, 4, 2, 1]
    waits.records[place, : len(words)] = torch.tensor(words)


def test_nothing_is_reported_until_a_wait_gave_up(waits):
    assert waits.report() is None
    waits.check()
    assert waits.words == (1_500_000_000, waits.clock.data_ptr(), waits.records.data_ptr())


def test_a_report_names_programs_signals_and_values_the_longest_wait_first(waits):
    record(waits, 0, (1 << 20) + 512 + 3 * 64, 7, 6, "ge", 1_400_000_000, (3, 1, 0))
    record(waits, 1, (1 << 20) + 512 + 5 * 64, -1, 2, "eq", 1_500_000_001)
    for name in ("first", "second", "first"):
        waits.launching(type("Metadata", (), {"get": lambda self, name=name: {"name": name}})())
    with pytest.raises(WaitTimeoutError) as info:
        waits.check()
    head, one, two, launched = str(info.value).splitlines()
    assert head.startswith("rank 0: a wait in a kernel lasted longer than 1.5 s (TRITON_DIST_WAIT_TIMEOUT sets the limit)")
    assert one == (
        "  rank 0: program (0, 0, 0) of a grid (4, 2, 1) waited 1.5 s for rank 0's 8 signals, element [5, 0] (heap+0x340): "
        "wanted == -1, saw 2"
    )
    assert "program (3, 1, 0)" in two and "element [3, 0] (heap+0x2c0): wanted >= 7, saw 6" in two
    assert launched == "  rank 0 launched last: first, second"


def test_a_report_counts_what_it_does_not_show(waits):
    for place in range(12):
        record(waits, place, (1 << 20) + 512 + 64 * (place % 8), 1, place, "lt", place)
    said = waits.report()
    assert f"and {12 - nvidia_waits.SHOWN} more signals" in said and "not listed" not in said
    for place in range(context.WAIT_RECORDS_KEPT):
        record(waits, place, (1 << 20) + 512, 1, 0, "lt", place, (place, 0, 0))
    _, line, more = waits.report().splitlines()
    assert "programs (63, 0, 0), (62, 0, 0), (61, 0, 0), (60, 0, 0) and 60 others of a grid (4, 2, 1) waited" in line
    assert "wanted < 1, saw 0" in line and "other programs waited, too" in more


def test_a_wait_that_gave_up_is_printed_at_once(waits, capfd):
    waits._thread = threading.Thread(target=waits._look, daemon=True)
    waits._thread.start()
    record(waits, 0, (1 << 20) + 512, 7, 6, "ge", 1_500_000_000)
    waits._thread.join(10)
    assert "[ERROR] triton_dist.shmem: rank 0: a wait in a kernel lasted longer" in capfd.readouterr().err


def test_context_tables_carry_the_words_of_waits():
    words = context.table_words(1, [64, 128], 4096, (5, 6, 7))
    assert [words[i] for i in (context.WAIT_LIMIT, context.WAIT_CLOCK, context.WAIT_RECORDS)] == [5, 6, 7]
    assert words[context.DELTAS :] == [-64, 0] and words[context.NUM_RANKS] == 2
    assert context.table_words(1, [64, 128], 4096)[context.WAIT_LIMIT] == 0


# -- a device that does not come to rest


class Control:
    """One rank's host collectives, with a peer that says `theirs`."""

    def __init__(self, theirs=None):
        self.theirs, self.limit = theirs, None

    def exchange(self, team, text, describe, timeout=None, limit=None):
        import json

        self.limit = limit
        return [text, json.dumps([self.theirs, "its text"])]


@pytest.fixture
def heap(monkeypatch):
    made = nvidia.Heap.__new__(nvidia.Heap)
    made.rank, made.device, made.waits, made.stuck, made._limit = 0, "cuda", None, False, None
    made._tensors, made._side, made.control = [torch.zeros(64, dtype=torch.uint8)], None, Control()
    made._signals_seen = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(nvidia_waits, "signals_now", lambda tensor, stream, buffer: ["2 signals (heap+0x40): 0 3"])
    monkeypatch.delenv("TRITON_DIST_WAIT_TIMEOUT", raising=False)
    return made


def test_the_state_of_signals_is_read_a_line_each_as_far_as_the_buffer_goes(monkeypatch):
    memory = torch.zeros(4096, dtype=torch.uint8)
    memory[1024:2048].view(torch.int32).view(-1, 16)[:3, 0] = torch.tensor([7, -1, 3], dtype=torch.int32)
    memory[2048:2176].view(torch.int64).view(-1, 8)[:, 0] = torch.tensor([1 << 40, 5])
    live = [
        SimpleNamespace(label="3 signals", offset=1024, nbytes=192, itemsize=4, shape=(3, 16)),
        SimpleNamespace(label="2 signals", offset=2048, nbytes=128, itemsize=8, shape=(2, 8)),
        SimpleNamespace(label="float32[4] tensor", offset=0, nbytes=16, itemsize=4, shape=(4,)),
        SimpleNamespace(label="0 signals", offset=512, nbytes=0, itemsize=4, shape=(0, 16)),
    ]
    monkeypatch.setattr(nvidia_waits.context, "heap_map", SimpleNamespace(live=dict(enumerate(live))))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    stream = SimpleNamespace(query=lambda: True)
    buffer = torch.full((130,), 99, dtype=torch.uint8)
    lines = nvidia_waits.signals_now(memory, stream, buffer)
    assert lines == ["3 signals (heap+0x400): 7 -1 ...", "2 signals (heap+0x800): 1099511627776 5", "0 signals (heap+0x200): "]
    monkeypatch.setattr(nvidia_waits, "READ_S", 0.05)
    stream.query = iter([True] + [False] * 10**6).__next__  # the second copy is stuck
    start = time.monotonic()
    lines = nvidia_waits.signals_now(memory, stream, buffer)
    assert lines[0].endswith("7 -1 ...") and len(lines) == 2 and "2 signals (heap+0x800): not read" in lines[1]
    assert time.monotonic() - start < 20


def test_an_exchange_waits_for_the_device_for_a_limited_time(heap, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(device))
    assert heap.exchange(None, "my text", lambda: "in barrier", 7) == ["my text", "its text"]
    assert asked == ["cuda"] and heap.control.limit > 7


def test_a_device_that_stays_busy_is_an_error_with_the_state_of_the_signals(heap, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: release.wait(60))
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError) as info:
        heap.exchange(None, "my text", lambda: "in barrier", 0.3)
    assert time.monotonic() - start < 30  # not as long as the device is busy
    said = str(info.value)
    assert "rank 0: its device is still busy after 0.3 s" in said and "in barrier" in said
    assert "rank 0: 2 signals (heap+0x40): 0 3" in said
    release.set()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert heap.exchange(None, "my text", lambda: "in barrier", 1) == ["my text", "its text"]


def test_a_signal_that_cannot_be_read_is_not_waited_for_longer_than_the_limit(heap, monkeypatch):
    memory = torch.tensor([3], dtype=torch.int32).view(torch.uint8)
    heap.bases, heap.nbytes, heap._tensors = [memory.data_ptr()], memory.numel(), [memory]
    heap._seen, heap._side = torch.zeros(1, dtype=torch.int64), SimpleNamespace(query=lambda: True)
    heap.control.wait = lambda ready, describe, timeout: (ready(), describe())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def read(limit):
        return heap.wait_signal(memory.data_ptr(), operator.eq, 3, 4, lambda: "in wait", limit)

    assert read(60) is None and heap._seen.item() == 3
    heap._side.query = lambda: False
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="rank 0: in wait; a copy of it did not come back in 0.05 s"):
        read(0.05)
    assert time.monotonic() - start < 20


def test_a_peers_trouble_is_raised_on_this_rank(heap, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    heap.control.theirs = "rank 1: a wait in a kernel"
    with pytest.raises(WaitTimeoutError, match="rank 1: a wait in a kernel"):
        heap.exchange(None, "my text", lambda: "in barrier", 1)


def test_an_error_of_the_device_after_a_wait_gave_up_is_told_with_it(heap, waits, monkeypatch):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory"):
        heap.exchange(None, "my text", lambda: "in barrier", 1)
    heap.waits = waits
    record(waits, 0, (1 << 20) + 512, 7, 6, "ge", 1_500_000_000)
    with pytest.raises(WaitTimeoutError, match="(?s)wanted >= 7, saw 6.*then: CUDA error: an illegal"):
        heap.exchange(None, "my text", lambda: "in barrier", 1)
