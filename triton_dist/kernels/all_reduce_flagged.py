"""All-reduce for short messages: the method `flagged` of `all_reduce`.

Every 32-bit word travels beside the number of its call in one relaxed atomic store of 64 bits, so both arrive as one. A reader
sees by the word itself whether it is there: no signal, no fence, no round trip. It doubles the bytes; that is the better
bargain up to about 512 KiB over NVLink. Volatile loads, which are at least relaxed atomic ones, read what arrives.

Every block of the message is a program of its own, which puts its words to all peers, and reads those of each peer until
all carry the number of this call. Two buffers take turns by the parity of the call: a program puts words of call e + 2 after
it has read its peers' words of call e + 1, which they put after they had read those of call e. What a shorter call leaves
unwritten keeps older numbers. Numbers are 32 bits and compared for equality: they may wrap around, and the zeroed buffer is
call 0.
"""

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist import patience, shmem

from .all_reduce_words import WordMethod, combine_halves, halves, packed
from .launch import Launcher

BLOCK, NUM_WARPS = 256, 4
_LIMITED = dl.target.LIMITED


@triton.jit
def flagged_kernel(
    x, out, staging, epochs, words, slot, ctx, OP: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """x, out: of the element type, aligned to words; staging [2, WORLD, slot]: uint64."""
    WORD: tl.constexpr = tl.pointer_type(tl.uint32)
    me, block = dl.rank(ctx), tl.program_id(0)
    epoch = tl.max(tl.load(epochs + block + tl.arange(0, 1)), 0) + 1
    buffer = staging + tl.cast(epoch % 2 * WORLD, tl.int64) * slot
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < words
    mine = tl.load(x.to(WORD, bitcast=True) + lanes, mask=inside, other=0)
    flag = epoch.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    to = buffer + tl.cast(me, tl.int64) * slot + lanes
    for i in tl.static_range(1, WORLD):
        dl.remote_store(to, flag | mine.to(tl.uint64), dl.owner_first(i, me, WORLD), ctx, mask=inside, sem="relaxed")
    for src in tl.static_range(WORLD):
        word = mine
        if src != me:
            there = buffer + tl.cast(src, tl.int64) * slot + lanes
            missing = 1
            if _LIMITED:
                turns, start = 0, tl.full((), 0, tl.int64)
            while missing > 0:  # carries scalars alone, see `wait`
                seen = tl.load(there, mask=inside, other=0, volatile=True)
                missing = tl.sum((inside & ((seen >> 32) != (flag >> 32))).to(tl.int32), 0)
                if _LIMITED:
                    turns += 1
                    if (missing > 0) & (turns % patience.TURNS == 0):
                        start, over = patience.lost(start, ctx)
                        if over == 1:  # the first word that has not come
                            late = tl.min(tl.where(inside & ((seen >> 32) != (flag >> 32)), lanes - block * BLOCK, BLOCK), 0)
                            number = tl.sum(tl.where(lanes - block * BLOCK == late, seen >> 32, 0), 0)
                            place = buffer + tl.cast(src, tl.int64) * slot + block * BLOCK + late
                            patience.give_up(place, epoch, number, "eq", start, ctx)
                        if over > 0:
                            missing = 0
            word = (tl.load(there, mask=inside, other=0, volatile=True) & 0xFFFFFFFF).to(tl.uint32)
        if src == 0:
            first, second = halves(word, x)
        else:
            first, second = combine_halves(first, second, word, x, OP)
    tl.store(out.to(WORD, bitcast=True) + lanes, packed(first, second, x), mask=inside)
    tl.store(epochs + block + tl.arange(0, 1), epoch)


class AllReduceFlagged(WordMethod):
    """Buffers of a context. Symmetric memory: 4 * num_ranks * max_elements elements."""

    method = "flagged"

    def __init__(self, owner, max_elements, block=None):
        """`owner`: the OperatorContext that the memory belongs to."""
        super().__init__(owner)
        self.slot = self.words_of(max_elements)
        self.staging = owner.tensor((2, self.world, self.slot), torch.int64)
        self.staging.zero_()
        self.launch = Launcher(flagged_kernel)
        self.words, self.block = self.staging.view(torch.uint64), block or BLOCK
        self.epochs = owner.local(triton.cdiv(self.slot, self.block))
        shmem.barrier_all()

    def run(self, x, out, op, words):
        self.launch(
            (triton.cdiv(words, self.block), 1, 1), (x, out, self.words, self.epochs, words, self.slot, self.table),
            dict(OP=op, WORLD=self.world, BLOCK=self.block), num_warps=NUM_WARPS,
        )  # fmt: skip
