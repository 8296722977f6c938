"""Estimates by which the operators choose between methods: microseconds of a product and of a push.

They depend on shapes alone, so all ranks that give the same shapes choose alike. The figures are those of an H200 (132
multiprocessors, NVLink 18 links): measured rates, see benchmarks/README.md. Only their ratios matter for a choice.
"""

import math

MULTIPROCESSORS = 132
PRODUCT_FLOPS = 6.6e6  # of a multiprocessor, a microsecond, 16-bit operands
MEMORY_BYTES = 4.0e6  # a microsecond
LINK_BYTES = 0.38e6  # a microsecond and direction, by a copy engine
LAUNCH_US, PUSH_US = 4.0, 8.0  # of a product; of a push, from the copy to the end of the peer's wait
PART_BYTES = 16 << 20  # a smaller part costs more to hand over than it gains
MAX_PARTS = 4
SUM_BYTES = 2 << 20  # of a part of partial sums, at least
TILE_M, TILE_N = 128, 256


def product_us(M, N, K, dtype):
    """Of [M, K] @ [K, N]: whole waves of tiles, or memory traffic, whichever takes longer."""
    waves = math.ceil(math.ceil(M / TILE_M) * math.ceil(N / TILE_N) / MULTIPROCESSORS)
    compute = waves * 2 * TILE_M * TILE_N * K / PRODUCT_FLOPS * (dtype.itemsize / 2) ** 3
    traffic = (M * K + K * N + M * N) * dtype.itemsize / MEMORY_BYTES
    return LAUNCH_US + max(compute, traffic)


def push_us(nbytes):
    return PUSH_US + nbytes / LINK_BYTES


def parts_of(nbytes):
    """Into how many parts a buffer is cut, so that its first ones can be used while the last are on their way."""
    return max(1, min(MAX_PARTS, nbytes // PART_BYTES))


def parts_of_sum(nbytes):
    """The same for partial sums: two parts even of small ones, since the last part's sum is what is left to do at the end;
    seldom more, since each costs the host a dozen calls."""
    return 1 if nbytes < 2 * SUM_BYTES else 2 if nbytes < 32 * SUM_BYTES else MAX_PARTS


def row_parts(rows, parts):
    """[(first, last)] of `parts` nearly equal parts of the rows; at least one, empty when there are no rows."""
    bounds = [rows * i // parts for i in range(parts + 1)]
    return list(zip(bounds, bounds[1:]))
