"""Messages as 32-bit words, of one element or of two: what the methods `flagged` and `sentinel` of `all_reduce` share."""

import torch
import triton
import triton.language as tl

from .reduce_scatter import combine, widen

WORD_BYTES = 4


@triton.jit
def halves(word, like):
    """The elements of `like`'s type in words, widened: (first, second); of 32 bits only the first counts."""
    KIND: tl.constexpr = like.dtype.element_ty
    if KIND.primitive_bitwidth == 16:
        first = widen((word & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True))
        second = widen((word >> 16).to(tl.uint16).to(KIND, bitcast=True))
    else:
        first = widen(word.to(KIND, bitcast=True))
        second = first
    return first, second


@triton.jit
def combine_halves(first, second, word, like, OP: tl.constexpr):
    """(first, second) OP the elements in words."""
    other, another = halves(word, like)
    first = combine(first, other, OP)
    if like.dtype.element_ty.primitive_bitwidth == 16:
        second = combine(second, another, OP)
    else:
        second = first
    return first, second


@triton.jit
def packed(first, second, like):
    """Words of `first` and `second`, rounded to `like`'s type."""
    KIND: tl.constexpr = like.dtype.element_ty
    if KIND.primitive_bitwidth == 16:
        word = first.to(KIND).to(tl.uint16, bitcast=True).to(tl.uint32)
        word |= second.to(KIND).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    else:
        word = first.to(KIND).to(tl.uint32, bitcast=True)
    return word


class WordMethod:
    """Base of such methods: `run(x, out, op, words)` for messages of whole words that begin between no two of them."""

    def __init__(self, owner):
        self.world, self.table, self.itemsize = owner.num_ranks, owner.table, owner.dtype.itemsize

    def words_of(self, elements):
        return max(triton.cdiv(elements * self.itemsize, WORD_BYTES), 1)

    def takes(self, n):
        """Whether n elements are whole words."""
        return n * self.itemsize % WORD_BYTES == 0

    def __call__(self, x, out, op):
        if (x.data_ptr() | out.data_ptr()) % WORD_BYTES:
            return out.copy_(self(x.clone(), torch.empty_like(x), op))
        self.run(x, out, op, x.numel() * self.itemsize // WORD_BYTES)
        return out
