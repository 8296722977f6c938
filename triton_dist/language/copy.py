"""Copies between two places that this rank can address, split over programs: what puts, gets and local moves share."""

import triton
import triton.language as tl


@triton.jit
def copy(dst, src, n, pid, num_pids, BLOCK: tl.constexpr):
    """n adjacent elements; this program does blocks pid, pid + num_pids, ..."""
    lanes = tl.arange(0, BLOCK)
    whole = n // BLOCK
    # Whole blocks without a mask: a mask by an n of unknown divisibility would make every access one element wide.
    for block in range(pid, whole, num_pids):
        start = tl.cast(block, tl.int64) * BLOCK
        tl.store(dst + start + lanes, tl.load(src + start + lanes))
    rest = n - whole * BLOCK
    turn = whole - whole // num_pids * num_pids  # the program whose turn the last block is
    if (rest > 0) & (turn == pid):
        start = tl.cast(whole, tl.int64) * BLOCK
        tl.store(dst + start + lanes, tl.load(src + start + lanes, mask=lanes < rest), mask=lanes < rest)


@triton.jit
def copy_2d(
    dst, src, rows, cols, dst_stride, src_stride, pid, num_pids, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """rows x cols elements, those of a row adjacent; this program does tiles pid, pid + num_pids, ..."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    for tile in range(pid, tl.cdiv(rows, BLOCK_M) * tiles_n, num_pids):
        tile_m = tile // tiles_n
        row = tl.cast(tile_m, tl.int64) * BLOCK_M
        col = tl.cast(tile - tile_m * tiles_n, tl.int64) * BLOCK_N
        to = dst + (row * dst_stride + col) + (m.to(tl.int64) * dst_stride + n)
        of = src + (row * src_stride + col) + (m.to(tl.int64) * src_stride + n)
        if col + BLOCK_N <= cols:  # masked by rows alone, which leaves the accesses wide
            inside = (row + m < rows) & (n < BLOCK_N)
            tl.store(to, tl.load(of, mask=inside), mask=inside)
        else:
            inside = (row + m < rows) & (col + n < cols)
            tl.store(to, tl.load(of, mask=inside), mask=inside)
