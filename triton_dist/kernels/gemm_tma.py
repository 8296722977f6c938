"""Tiles of a product read by NVIDIA's tensor memory accelerator, and which operands it can read.

Tiles of 128 x 128 with three stages take less than half of a multiprocessor's shared memory and registers, so that two
programs share one: while one of them stores its tile, signals or waits, the other multiplies. That hides what a persistent
kernel with one program a multiprocessor cannot, where every epilogue that signals stops the loads of the next tile.
"""

import torch
import triton
import triton.language as tl

from .arguments import device_programs

PROGRAMS_PER_MULTIPROCESSOR = 2
CONFIG = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=3)


@triton.jit
def loaded_product(
    a, b, row, col, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """a @ b in fp32, [BLOCK_M, BLOCK_N] from `row` and `col`. a and b are descriptors, b of the transposed matrix when
    B_TRANSPOSED. Zeros beyond the matrices' ends."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if B_TRANSPOSED:
            acc = tl.dot(a.load([row, k]), b.load([col, k]).T, acc)
        else:
            acc = tl.dot(a.load([row, k]), b.load([k, col]), acc)
    return acc


def _readable(tensor):
    """Whether a descriptor can stand for a matrix: adjacent columns, rows and start on 16 bytes, not empty."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.itemsize % 16 == 0
    return tensor.numel() > 0 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1] and aligned


def _padded(tensor):
    """A copy with zeros behind the last row and column, which a descriptor can stand for."""
    rows, columns = tensor.shape
    return torch.nn.functional.pad(tensor, (0, -columns % 16 if columns else 16, 0, 0 if rows else 1))


def operands(a, b, config):
    """(descriptor of a, descriptor of b, B_TRANSPOSED) for `loaded_product`.

    A matrix that a descriptor cannot stand for (rows not on 16 bytes, columns apart, empty) is copied first.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # older Tritons have none

    if not _readable(a):
        a = _padded(a)
    transposed = not _readable(b) and _readable(b.T)
    if transposed:
        b = b.T
    elif not _readable(b):
        b = _padded(b)
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    left = TensorDescriptor(a, list(a.shape), list(a.stride()), [m, k])
    right = TensorDescriptor(b, list(b.shape), list(b.stride()), [n, k] if transposed else [k, n])
    return left, right, transposed


def programs(tiles):
    """Of a grid for so many tiles: all run at the same time."""
    return max(min(PROGRAMS_PER_MULTIPROCESSOR * device_programs(), tiles), 1)
