"""Which memory is watched: allocations of the symmetric heaps, and the tensors that a running kernel was given."""

import bisect

import numpy as np

from ..interpreter.affine import Affine
from .history import Shadow


class Region:
    """Memory outside of the heap that a launch may touch: the storage of a tensor argument. Lives as long as the launch."""

    __slots__ = ("base", "end", "shadow", "label")

    def __init__(self, base, nbytes, label):
        self.base, self.end, self.label, self.shadow = base, base + nbytes, label, None


class Places:
    """`heap_map(rank)` is the rank's HeapMap or None."""

    def __init__(self, heap_map):
        self.heap_map = heap_map
        self.shadows = {}  # (address, bytes) of an allocation -> Shadow
        self.regions = {}  # rank -> [Region], by address
        self.copied = {}  # rank -> [Region]: ordinary memory that copies of its host under way read or write

    def split(self, thread, where, size):
        """[(Shadow, where, describe)] of the tracked memory that an access touches."""
        if isinstance(where, Affine):
            if 0 in where.shape:
                return []
            low, high = where.bounds()
        else:
            if not where.size:
                return []
            low, high = int(where.min()), int(where.max())
        found = self._shadow(thread, low)
        if found is not None and high + size <= found.base + found.nbytes:
            return [(found, where)]
        if low == high or (found is None and self._shadow(thread, high) is None and not self._near(thread, low, high)):
            return []
        lanes = where.array(np.uint64).ravel() if isinstance(where, Affine) else where
        parts = []
        lanes = np.unique(lanes)
        while lanes.size:
            found = self._shadow(thread, int(lanes[0]))
            if found is None:
                lanes = lanes[1:]
                continue
            inside = lanes + np.uint64(size) <= np.uint64(found.base + found.nbytes)
            if not inside.any():
                lanes = lanes[1:]
                continue
            parts.append((found, lanes[inside]))
            lanes = lanes[~inside]
        return parts

    def _near(self, thread, low, high):
        """Whether there may be watched memory between."""
        heap = self.heap_map(thread.rank)
        in_heap = heap is not None and high > heap.span[0] and low < heap.span[1]
        return in_heap or self.is_copied(thread.rank, low, high)

    def _shadow(self, thread, address):
        heap = self.heap_map(thread.rank)
        place = heap.owner(address) if heap is not None else None
        if place is not None:
            allocation = heap.allocation(place[1])
            if allocation is None:
                return None
            base = heap.bases[place[0]] + allocation.offset
            shadow = self.shadows.get((base, allocation.nbytes))
            if shadow is None:
                shadow = self.shadows[base, allocation.nbytes] = Shadow(base, max(allocation.nbytes, 1))
            return shadow
        regions = self.regions.get(thread.rank)
        if regions:
            i = bisect.bisect_right(regions, address, key=lambda region: region.base) - 1
            if i >= 0 and address < regions[i].end:
                region = regions[i]
                if region.shadow is None:
                    region.shadow = Shadow(region.base, region.end - region.base)
                return region.shadow
        return next((one.shadow for one in self.copied.get(thread.rank, ()) if one.base <= address < one.end), None)

    def word(self, rank, address):
        """Names a word of memory alike in every schedule, in which heaps lie elsewhere."""
        heap = self.heap_map(rank)
        place = heap.owner(address) if heap is not None else None
        if place is not None:
            return place
        for region in self.regions.get(rank, ()):
            if region.base <= address < region.end:
                return rank, region.label, address - region.base
        return rank, "elsewhere", address

    def allocation(self, rank, address):
        """The allocation of the heap that an address lies in, the same for every rank's copy, else None."""
        heap = self.heap_map(rank)
        place = heap.owner(address) if heap is not None else None
        return heap.allocation(place[1]) if place is not None else None

    def describe(self, rank, address):
        heap = self.heap_map(rank)
        if heap is not None and heap.owner(address) is not None:
            return heap.describe(address)
        for region in [*self.regions.get(rank, ()), *self.copied.get(rank, ())]:
            if region.base <= address < region.end:
                return f"rank {rank}'s {region.label}, byte {address - region.base} of its storage (not symmetric memory)"
        return f"address {address:#x}"

    # -- launches
    def launched(self, rank, tensors):
        """`tensors`: (label, address, bytes) of what the kernel was given."""
        heap = self.heap_map(rank)
        regions = {}
        for label, address, nbytes in tensors:
            if nbytes and (heap is None or heap.owner(address) is None):
                old = regions.get(address)
                if old is None or old.end - old.base < nbytes:
                    regions[address] = Region(address, nbytes, label)
        self.regions[rank] = sorted(regions.values(), key=lambda region: region.base)
        for region in self.regions[rank]:
            inside = [one for one in self.copied.get(rank, ()) if region.base <= one.base and one.end <= region.end]
            self._merge(region, inside)

    def launch_ended(self, rank):
        self.regions.pop(rank, None)

    # -- copies
    def copying(self, rank, low, high):
        """Watches [low, high) until `copied[rank]` is dropped, where it is ordinary memory. Whether it is."""
        heap = self.heap_map(rank)
        if heap is not None and heap.owner(low) is not None:
            return False
        mine = self.copied.setdefault(rank, [])
        meet = [one for one in mine if one.base < high and low < one.end]
        low, high = min([low, *[one.base for one in meet]]), max([high, *[one.end for one in meet]])
        region = Region(low, high - low, "memory of a copy under way")
        region.shadow = Shadow(low, high - low)
        self._merge(region, meet)
        self.copied[rank] = [one for one in mine if one not in meet] + [region]
        return True

    def is_copied(self, rank, low, high):
        return any(one.base < high and low < one.end for one in self.copied.get(rank, ()))

    def _merge(self, region, parts):
        for one in parts:
            if region.shadow is None:
                region.shadow = Shadow(region.base, region.end - region.base)
            region.shadow.adopt(one.shadow)

    def all_shadows(self):
        regions = [one for some in (*self.regions.values(), *self.copied.values()) for one in some]
        local = [one.shadow for one in regions if one.shadow is not None]
        return [*self.shadows.values(), *local]

    def forget(self):
        self.shadows, self.regions, self.copied = {}, {}, {}
