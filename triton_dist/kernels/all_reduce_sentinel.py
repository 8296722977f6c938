"""All-reduce for short and middle messages of floating-point numbers: the method `sentinel` of `all_reduce`.

A 32-bit word that has not come holds a bit pattern which no word that travels has: all ones, a NaN, or two. A word of all
ones is sent with its last bit cleared, which is a NaN, or two, as well. So a reader sees by the words themselves whether they
are there: no signal, no fence, no round trip, and no bytes for flags as in `flagged`. Words are put by relaxed atomic stores
and read by volatile loads, which are at least relaxed atomic ones: they may arrive in any order, but each arrives whole.

Every program puts its blocks of the message to all peers; then it waits for those of each peer, and writes the sentinel back
when it has read them, by a relaxed store as well. Two buffers take turns by the parity of the program's calls. Block b
belongs to program b % programs, whatever the size of the call, so all ranks agree on the parity, and what a program reads it
also clears. A program puts words of its call e + 2 after it has read its peers' words of call e + 1, which they put after
their call e had ended, with its clearing.

That this puts the clearing before the peer's next word in memory rests on the kernels' being on one stream each: between two of
them all stores of the first one are done, for all devices, as after a fence at system scope. Nothing in a kernel orders the
two, and PTX's memory model, which is one of a kernel, does not say it.
"""

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import patience, shmem

from .all_reduce_words import WordMethod, combine_halves, halves, packed
from .arguments import device_programs
from .channels import round_up
from .launch import Launcher

SENTINEL = tl.constexpr(0xFFFFFFFF)
_LIMITED = dl.target.LIMITED


@triton.jit
def sentinel_kernel(
    x, out, staging, epochs, words, slot, ctx,
    OP: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """x, out: of the element type, aligned to words; staging [2, WORLD, slot]: uint32."""
    WORD: tl.constexpr = tl.pointer_type(tl.uint32)
    me, pid = dl.rank(ctx), tl.program_id(0)
    epoch = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0) + 1
    buffer = staging + tl.cast(epoch % 2 * WORLD, tl.int64) * slot
    blocks = tl.cdiv(words, BLOCK)
    source, target = x.to(WORD, bitcast=True), out.to(WORD, bitcast=True)
    for block in range(pid, blocks, PROGRAMS):
        lanes = block * BLOCK + tl.arange(0, BLOCK)
        inside = lanes < words
        mine = tl.minimum(tl.load(source + lanes, mask=inside, other=0), SENTINEL - 1)
        for i in tl.static_range(1, WORLD):
            to = buffer + tl.cast(me, tl.int64) * slot + lanes
            dl.remote_store(to, mine, dl.owner_first(i, me, WORLD), ctx, mask=inside, sem="relaxed")
    for block in range(pid, blocks, PROGRAMS):
        lanes = block * BLOCK + tl.arange(0, BLOCK)
        inside = lanes < words
        mine = tl.minimum(tl.load(source + lanes, mask=inside, other=0), SENTINEL - 1)
        for src in tl.static_range(WORLD):
            word = mine
            if src != me:
                there = buffer + tl.cast(src, tl.int64) * slot + lanes
                if _LIMITED:
                    word = _wait_limited(there, inside, ctx)
                else:
                    word = tl.load(there, mask=inside, other=0, volatile=True)
                    while tl.max(word, 0) == SENTINEL:
                        word = tl.load(there, mask=inside, other=0, volatile=True)
                dl.target.store_relaxed(there, SENTINEL, inside)
            if src == 0:
                first, second = halves(word, x)
            else:
                first, second = combine_halves(first, second, word, x, OP)
        tl.store(target + lanes, packed(first, second, x), mask=inside)
    tl.store(epochs + pid + tl.arange(0, 1), epoch)


@triton.jit
def _wait_limited(there, inside, ctx):
    """The words, when they have come, or when the limit on waits is over."""
    missing, turns, start = 1, 0, tl.full((), 0, tl.int64)
    while missing > 0:
        word = tl.load(there, mask=inside, other=0, volatile=True)
        missing = (tl.max(word, 0) == SENTINEL).to(tl.int32)
        turns += 1
        if (missing > 0) & (turns % patience.TURNS == 0):
            start, over = patience.lost(start, ctx)
            if over == 1:  # the first word that has not come
                late = tl.min(tl.where(word == SENTINEL, there.to(tl.int64), (1 << 63) - 1), 0)
                patience.give_up(late.to(tl.pointer_type(tl.int32)), -1, -1, "ne", start, ctx)
            if over > 0:
                missing = 0
    return tl.load(there, mask=inside, other=0, volatile=True)


def default_config():
    """(words of a block, warps, programs): programs of all ranks wait for one another, so they must fit on the device at a
    time. One warp a program: then no turn of a poll needs a barrier."""
    if triton_dist.backend == "nvidia":
        return 128, 1, 24 * device_programs()
    return 256, 4, device_programs()


class AllReduceSentinel(WordMethod):
    """Buffers of a context. Symmetric memory: 2 * num_ranks * max_elements elements."""

    method = "sentinel"

    def __init__(self, owner, max_elements, block=None, programs=None, num_warps=None):
        """`owner`: the OperatorContext that the memory belongs to; `block`: words."""
        super().__init__(owner)
        self.slot = round_up(self.words_of(max_elements))
        words, warps, most = default_config()
        self.block, self.num_warps = block or words, num_warps or warps
        self.programs = min(programs or most, triton.cdiv(self.slot, self.block))
        staging = owner.tensor((2, self.world, self.slot), torch.int32)
        staging.fill_(-1)
        self.launch = Launcher(sentinel_kernel)
        self.words, self.epochs = staging.view(torch.uint32), owner.local(self.programs)
        shmem.barrier_all()

    def run(self, x, out, op, words):
        constants = dict(OP=op, WORLD=self.world, BLOCK=self.block, PROGRAMS=self.programs)
        arguments = (x, out, self.words, self.epochs, words, self.slot, self.table)
        grid = min(triton.cdiv(words, self.block), self.programs)
        self.launch((grid, 1, 1), arguments, constants, num_warps=self.num_warps)
