"""The one place where host and device meet: the context table's layout, and the map of the symmetric heap.

The *context table* is a small int64 tensor that a kernel receives as `ctx`. It belongs to one team: ranks in it are
team ranks.

    word            content
    MAGIC_WORD      MAGIC, so that a wrong pointer is recognised
    RANK            this rank in the team
    NUM_RANKS       ranks of the team
    HEAP_BYTES      bytes of the symmetric heap of each rank
    DELTAS + r      base of team rank r's heap minus the base of this rank's heap, in bytes (a multiple of 64)

A peer's copy of a symmetric address is therefore `ptr + ctx[DELTAS + peer] // itemsize`: one load and one addition.

The *heap map* tells the CPU engine which addresses are symmetric and what lives there. `shmem` keeps it up to date.
Nothing here imports torch, numpy or triton.
"""

import bisect
from dataclasses import dataclass, field

MAGIC = 0x7472_6469_7374_3031  # "trdist01"
MAGIC_WORD, RANK, NUM_RANKS, HEAP_BYTES, DELTAS = 0, 1, 2, 3, 8

MOST_RANKS = 1024  # of a team; a power of two. Behind the table there is room for a word of each of them, see `spare_words`

SIGNAL_BYTES = 64  # a signal has a cache line (64-byte scalar line on Ascend) to itself


def table_words(rank, bases, heap_bytes):
    """The words of the context table: `rank` is the team rank, `bases` the heap base of each team rank as mapped here."""
    head = [0] * DELTAS
    head[MAGIC_WORD], head[RANK], head[NUM_RANKS], head[HEAP_BYTES] = MAGIC, rank, len(bases), heap_bytes
    return head + [base - bases[rank] for base in bases]


def spare_words(words):
    """What lies behind the table's words in memory: kernels may read ahead, for a peer that their loop then does not have."""
    return [0] * (DELTAS + MOST_RANKS - len(words))


@dataclass(frozen=True)
class Allocation:
    """A live or freed piece of the symmetric heap. `offset` and `nbytes` are in bytes and alike on every rank."""

    offset: int
    nbytes: int
    label: str  # how a report names it, e.g. "int32[8, 16] tensor" or "malloc(4096)"
    shape: tuple = ()  # () for raw memory
    itemsize: int = 1

    def element(self, offset):
        """Names the element at heap `offset`: "[3, 0]" for tensors, "+128 B" for raw memory."""
        if not self.shape:
            return f"+{offset - self.offset} B"
        index, rest = [], (offset - self.offset) // self.itemsize
        for extent in reversed(self.shape):
            index.append(rest % extent if extent else 0)
            rest //= extent or 1
        return str(index[::-1])


@dataclass
class HeapMap:
    """Where the heaps of all ranks lie in this process, and what is allocated in them.

    `bases[r]` is the address of rank r's heap here. `span` is the address range reserved for all heaps and the
    guard space around them: an address in it that is in no allocation is certainly a mistake.
    """

    rank: int
    bases: list
    nbytes: int
    span: tuple  # (first address, one past the last)
    live: dict = field(default_factory=dict)  # offset -> Allocation
    freed: list = field(default_factory=list)  # the latest freed Allocations, oldest first
    _offsets: list = field(default_factory=list)

    def __post_init__(self):
        self.by_address = sorted((base, rank) for rank, base in enumerate(self.bases))

    def add(self, allocation):
        self.live[allocation.offset] = allocation
        bisect.insort(self._offsets, allocation.offset)

    def remove(self, offset):
        self.freed = self.freed[-63:] + [self.live.pop(offset)]
        self._offsets.remove(offset)

    def owner(self, address):
        """(rank, heap offset) of an address inside a heap, else None."""
        i = bisect.bisect_right(self.by_address, (address, len(self.bases))) - 1
        if i >= 0:
            base, rank = self.by_address[i]
            if address < base + self.nbytes:
                return rank, address - base
        return None

    def allocation(self, offset):
        """The live allocation that holds heap `offset`, else None."""
        i = bisect.bisect_right(self._offsets, offset) - 1
        if i >= 0:
            found = self.live[self._offsets[i]]
            if offset < found.offset + max(found.nbytes, 1):
                return found
        return None

    def describe(self, address):
        """Names an address for a report: owner, allocation, element."""
        place = self.owner(address)
        if place is None:
            return f"address {address:#x} (not in the symmetric heap)"
        rank, offset = place
        found = self.allocation(offset)
        if found:
            return f"rank {rank}'s {found.label}, element {found.element(offset)} (heap+{offset:#x})"
        for gone in reversed(self.freed):
            if gone.offset <= offset < gone.offset + gone.nbytes:
                return f"rank {rank}'s freed {gone.label}, element {gone.element(offset)} (heap+{offset:#x})"
        return f"rank {rank}'s heap+{offset:#x} (not allocated)"


heap_map = None  # the HeapMap of this process between init and finalize
