"""One tile of a matrix product, as the fused GEMMs compute and store it."""

import triton
import triton.language as tl


@triton.jit
def first_tile(start, pid, programs):
    """The first of the tiles start, start + 1, ... that program `pid` computes, counted from `start`: dealt out in turn."""
    return (pid + programs - start % programs) % programs


@triton.jit
def tile_product(
    a, b, row, last_row, col, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """a @ b in fp32, [BLOCK_M, BLOCK_N] from `row` and `col`; zeros from row `last_row` and column N on."""
    m = row + tl.arange(0, BLOCK_M)
    n = col + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a + m[:, None].to(tl.int64) * stride_am + k[None, :].to(tl.int64) * stride_ak
    b_ptrs = b + k[:, None].to(tl.int64) * stride_bk + n[None, :].to(tl.int64) * stride_bn
    a_mask = m[:, None] < last_row
    b_mask = n[None, :] < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(a_ptrs, mask=a_mask, other=0.0)
            y = tl.load(b_ptrs, mask=b_mask, other=0.0)
        else:
            x = tl.load(a_ptrs, mask=a_mask & (k[None, :] < K - start), other=0.0)
            y = tl.load(b_ptrs, mask=b_mask & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")  # fp32 stays fp32: no tf32
        a_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk
    return acc


@triton.jit
def store_tile(out, value, row, rows, col, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """value [BLOCK_M, BLOCK_N] to rows and columns of `out` from `row` and `col`, as far as it has them."""
    m = row + tl.arange(0, BLOCK_M)
    n = col + tl.arange(0, BLOCK_N)
    mask = (m[:, None] < rows) & (n[None, :] < N)
    tl.store(out + m[:, None].to(tl.int64) * stride + n[None, :], value.to(out.dtype.element_ty), mask=mask)
