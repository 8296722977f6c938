"""Copies inside one rank's memory, split over the programs of a grid; and the dtype that a kernel which only moves
data works in."""

import torch
import triton
import triton.language as tl

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # itemsize -> what is moved


def as_words(tensor):
    """A view of `tensor` as integers of its itemsize: every bit pattern survives, and no target needs to know fp8."""
    return tensor.view(WORDS[tensor.dtype.itemsize])


@triton.jit
def copy(dst, src, n, pid, num_pids, BLOCK: tl.constexpr):
    """n adjacent elements; this program does blocks pid, pid + num_pids, ..."""
    lanes = tl.arange(0, BLOCK)
    whole = n // BLOCK
    for block in range(pid, whole, num_pids):  # whole blocks need no mask, which leaves the accesses wide
        start = tl.cast(block, tl.int64) * BLOCK
        tl.store(dst + start + lanes, tl.load(src + start + lanes))
    rest = n - whole * BLOCK
    turn = whole - whole // num_pids * num_pids
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
