"""Offsets in the symmetric heap. Every rank makes the same calls in the same order, so all ranks get the same
offsets."""

import bisect

LINE = 64  # sizes are rounded up to it and offsets are multiples: two allocations never share a cache line


class OutOfMemory(Exception):
    """No free block is large enough."""


class Allocator:
    """Best fit over a sorted list of free blocks; neighbours are joined on free. Sizes and offsets in bytes."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        whole = nbytes // LINE * LINE
        self._free = [(0, whole)] if whole else []  # (offset, size), by offset, never adjacent
        self._live = {}  # offset -> size

    def alloc(self, nbytes, alignment=LINE):
        """The offset of a new block, a multiple of `alignment` (a power of two). OutOfMemory when none fits."""
        size, alignment = -(-max(nbytes, 1) // LINE) * LINE, max(alignment, LINE)
        best = None
        for index, (start, length) in enumerate(self._free):
            offset = -(-start // alignment) * alignment
            if offset + size <= start + length and (best is None or length < self._free[best[0]][1]):
                best = index, offset
        if best is None:
            raise OutOfMemory
        index, offset = best
        start, length = self._free[index]
        rest = [(start, offset - start), (offset + size, start + length - offset - size)]
        self._free[index : index + 1] = [block for block in rest if block[1]]
        self._live[offset] = size
        return offset

    def free(self, offset):
        """Gives a block back; KeyError when none begins at `offset`."""
        size = self._live.pop(offset)
        index = bisect.bisect(self._free, (offset,))
        start, end, first, last = offset, offset + size, index, index
        if index and sum(self._free[index - 1]) == start:
            first, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            last, end = index + 1, sum(self._free[index])
        self._free[first:last] = [(start, end - start)]

    def size(self, offset):
        """Bytes that the block at `offset` really takes."""
        return self._live[offset]

    @property
    def free_bytes(self):
        return sum(size for _, size in self._free)

    @property
    def largest_free(self):
        return max((size for _, size in self._free), default=0)
