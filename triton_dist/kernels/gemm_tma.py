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


class Operands:
    """`Operands(config)(a, b)` gives (descriptor of a, descriptor of b, B_TRANSPOSED) for `loaded_product`.

    A matrix that a descriptor cannot stand for (rows not on 16 bytes, columns apart, empty) is copied first. Descriptors are
    used again for operands that differ in their addresses alone.
    """

    def __init__(self, config):
        m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        self.left, self.right = [m, k], {False: [k, n], True: [n, k]}
        self.key = self.made = None

    def __call__(self, a, b):
        key = a.shape, a.stride(), a.data_ptr() % 16, b.shape, b.stride(), b.data_ptr() % 16
        if key != self.key:
            self.made, copied = self.make(a, b)
            self.key = None if copied else key
        else:
            self.made[0].base, self.made[1].base = a, b  # b for b.T: their addresses and dtypes are the same
        return self.made

    def make(self, a, b):
        from triton.tools.tensor_descriptor import TensorDescriptor  # older Tritons have none

        x = a if _readable(a) else _padded(a)
        transposed = not _readable(b) and _readable(b.T)
        y = b.T if transposed else b if _readable(b) else _padded(b)
        left = TensorDescriptor(x, list(x.shape), list(x.stride()), self.left)
        right = TensorDescriptor(y, list(y.shape), list(y.stride()), self.right[transposed])
        return (left, right, transposed), x is not a or (y is not b and not transposed)

    def forget(self):
        """Once the kernel is launched: keeps no operand's memory alive."""
        self.made[0].base = self.made[1].base = None


def programs(tiles):
    """Of a grid for so many tiles: all run at the same time."""
    return max(min(PROGRAMS_PER_MULTIPROCESSOR * device_programs(), tiles), 1)
