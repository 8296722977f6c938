"""The offset allocator against a model that remembers every byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_dist.shmem.allocator import LINE, Allocator, OutOfMemory

HEAP = 1 << 16

steps = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, HEAP // 3), st.sampled_from([1, 64, 512, 4096])),
        st.tuples(st.just("free"), st.integers(0, 1 << 20), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_blocks_never_overlap_and_all_comes_back(steps):
    heap, live = Allocator(HEAP), {}
    for what, number, alignment in steps:
        if what == "free":
            if live:
                offset = sorted(live)[number % len(live)]
                heap.free(offset)
                del live[offset]
            continue
        size = max(-(-number // LINE) * LINE, LINE)
        gaps = _gaps(live)
        fits = any(-(-start // max(alignment, LINE)) * max(alignment, LINE) + size <= end for start, end in gaps)
        try:
            offset = heap.alloc(number, alignment)
        except OutOfMemory:
            assert not fits
            continue
        assert fits and offset % max(alignment, LINE) == 0
        assert any(start <= offset and offset + size <= end for start, end in gaps)
        live[offset] = size
        assert heap.size(offset) == size
    assert heap.free_bytes == HEAP - sum(live.values())
    assert heap.largest_free == max((end - start for start, end in _gaps(live)), default=0)
    for offset in list(live):
        heap.free(offset)
    assert heap.largest_free == HEAP  # everything was joined again


def _gaps(live):
    gaps, at = [], 0
    for offset in sorted(live):
        if offset > at:
            gaps.append((at, offset))
        at = offset + live[offset]
    return gaps + [(at, HEAP)] if at < HEAP else gaps


def test_two_allocators_with_the_same_calls_give_the_same_offsets():
    one, other = Allocator(HEAP), Allocator(HEAP)
    for size in (1, 100, 64, 5000):
        assert one.alloc(size) == other.alloc(size)


def test_the_smallest_block_that_fits_is_taken():
    heap = Allocator(HEAP)
    large, _, small, _ = (heap.alloc(size) for size in (4096, 64, 128, 64))
    heap.free(large)
    heap.free(small)
    assert heap.alloc(100) == small


def test_freeing_what_is_not_a_block_is_a_key_error():
    heap = Allocator(HEAP)
    offset = heap.alloc(64)
    heap.free(offset)
    for wrong in (offset, 64, 1):
        with pytest.raises(KeyError):
            heap.free(wrong)


def test_a_heap_smaller_than_a_line_has_no_room():
    with pytest.raises(OutOfMemory):
        Allocator(LINE - 1).alloc(1)
