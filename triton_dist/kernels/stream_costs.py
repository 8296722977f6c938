"""Estimates by which the operators choose between methods: microseconds of a product and of a push.

They depend on shapes alone, so all ranks that give the same shapes choose alike. The figures are those of an H200 (132
multiprocessors, NVLink 18 links): measured rates, see benchmarks/README.md. Only their ratios matter for a choice.
"""

import itertools
import math

MULTIPROCESSORS = 132
SPARE = 4  # that products leave to programs beside them, where these hand over buffers
PRODUCT_FLOPS = 6.6e6  # of a multiprocessor, a microsecond, 16-bit operands
MEMORY_BYTES = 4.0e6  # a microsecond
LINK_BYTES = 0.38e6  # a microsecond and direction, by a copy engine
ADD_BYTES = 0.067e6  # a microsecond, read and written by a program that adds
LAUNCH_US, PUSH_US = 4.0, 8.0  # of a product; of a push, from the copy to the end of the peer's wait
WORTH = 0.99  # a plan of another kind must be estimated at less than this part of the other
PART_BYTES = 16 << 20  # a smaller part costs more to hand over than it gains
MAX_PARTS = 4
BLOCK_BYTES, MAX_BLOCKS = 4 << 20, 4  # of partial sums: the least of a block of columns, the most blocks
TILE_M, TILE_N = 256, 128  # of the vendor's kernels
FULL = 0.93  # of a device's tiles in whole waves, at least
LATE_US = 90.0  # that a stream may wait longer for a word than it must


def product_us(M, N, K, dtype):
    """Of [M, K] @ [K, N]: whole waves of tiles, or memory traffic, whichever takes longer."""
    waves = math.ceil(math.ceil(M / TILE_M) * math.ceil(N / TILE_N) / MULTIPROCESSORS)
    compute = waves * 2 * TILE_M * TILE_N * K / PRODUCT_FLOPS * (dtype.itemsize / 2) ** 3
    traffic = (M * K + K * N + M * N) * dtype.itemsize / MEMORY_BYTES
    return LAUNCH_US + max(compute, traffic)


def rows_of_waves(waves, N):
    """Rows of a product with N columns whose tiles are as many as run in so many waves, or fewer; 0 when it takes more."""
    return waves * MULTIPROCESSORS // max(math.ceil(N / TILE_N), 1) * TILE_M


def push_us(nbytes):
    return PUSH_US + nbytes / LINK_BYTES


def first_rows(M, N, K, dtype, world):
    """How many of its M own rows a rank multiplies before it has those of its peers, and then all others at once; M: every
    shard is multiplied for itself, as it arrives."""
    push = push_us(M * K * dtype.itemsize)
    shard = product_us(M, N, K, dtype)
    best, rows = shard + (world - 1) * max(shard, push), M
    for waves in itertools.count():
        first = rows_of_waves(waves, N)
        if first >= M or (waves and world > 2):
            break
        arrived = push * (world - 1)
        own = product_us(first, N, K, dtype) if first else 0
        us = max(own, arrived) + product_us(world * M - first, N, K, dtype)
        if us < WORTH * best:
            best, rows = us, first
    return rows


def parts_of(nbytes):
    """Into how many parts a buffer is cut, so that its first ones can be used while the last are on their way."""
    return max(1, min(MAX_PARTS, nbytes // PART_BYTES))


def columns_of_sum(rows, N, itemsize, world):
    """[(first, last, cuts)]: blocks of the columns of products [rows, N], one for each of `world` ranks, in the order in which
    they are multiplied for peers. `cuts` are the bounds of the rows of which a block is multiplied, and pushed, at a time: all,
    or two halves. None: the last block, multiplied for all ranks at once, if that saves a wave of tiles.

    What is multiplied at a time is of whole waves of tiles on all multiprocessors but SPARE, where that is possible, and large
    enough to be worth handing over. The fewer products the better: two blocks are made one where its push, or that of half
    of it, still ends while something else is multiplied. At least one block, empty when there are no columns.
    """
    height, free = max(math.ceil(rows / TILE_M), 1), free_multiprocessors()
    wide = 1
    while wide * height < FULL * waves_beside(wide * height) * free:
        wide += 1
    wide = waves_beside(wide * height) * free // height  # the widest that takes no wave more
    least = max(N / MAX_BLOCKS, BLOCK_BYTES / max(rows * itemsize, 1))
    wide *= math.ceil(least / (wide * TILE_N)) or 1
    bounds = [*range(0, N, wide * TILE_N), N] if N else [0, 0]
    blocks, whole = list(zip(bounds, bounds[1:])), (0, rows)
    tiles = height * math.ceil((N % (wide * TILE_N)) / TILE_N)
    if len(blocks) > 1 and 0 < waves_beside(world * tiles) < world * waves_beside(tiles):
        rest = (*blocks.pop(), None)
        paired = blocks[: (len(blocks) - 1) // 2 * 2]  # not the last one: little is left to push when the own products begin
        joined = [(one[0], two[1], whole) for one, two in zip(paired[::2], paired[1::2])]
        return [*joined, *((*block, whole) for block in blocks[len(paired) :]), rest]
    alone = len(blocks) % 2
    joined = [(*block, whole) for block in blocks[:alone]]
    for one, two in zip(blocks[alone::2], blocks[alone + 1 :: 2]):
        cuts = halves(rows, two[1] - one[0]) if len(blocks) > 2 else whole  # of two, nothing is multiplied meanwhile
        joined += [(one[0], two[1], cuts)] if cuts != whole else [(*one, whole), (*two, whole)]
    return joined


def free_multiprocessors():
    """Those that are left to a product."""
    return max(MULTIPROCESSORS - SPARE, 1)


def waves_beside(tiles):
    return math.ceil(tiles / free_multiprocessors())


def halves(rows, columns):
    """Bounds of the rows of a product: of two halves if they take as many waves of tiles as the whole, else of the whole."""
    height, tiles = math.ceil(rows / TILE_M), math.ceil(columns / TILE_N)
    upper = height // 2
    as_many = waves_beside(tiles * upper) + waves_beside(tiles * (height - upper)) == waves_beside(tiles * height)
    return (0, upper * TILE_M, rows) if upper and as_many else (0, rows)


def added_beside(blocks, world):
    """Whether SPARE programs add the product for all ranks to what the peers have pushed of it while the own rows of the other
    blocks, at most, are multiplied. These take as long as their push, or longer, where this method pays."""
    of_all, pushed = (sum(last - first for first, last, cuts in blocks if bool(cuts) == kind) for kind in (False, True))
    return of_all * (world + 1) / (SPARE * ADD_BYTES) <= pushed / LINK_BYTES


def row_parts(rows, parts):
    """[(first, last)] of `parts` nearly equal parts of the rows; at least one, empty when there are no rows."""
    bounds = [rows * i // parts for i in range(parts + 1)]
    return list(zip(bounds, bounds[1:]))
