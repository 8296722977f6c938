"""All-reduce for short and middle messages of floating-point numbers: the method `sentinel` of `all_reduce`.

A 32-bit word that has not come holds a bit pattern which no word that travels has: all ones, a NaN, or two. A word of all
ones is sent with its last bit cleared, which is a NaN, or two, as well. So a reader sees by the words themselves whether they
are there: no signal, no fence, no round trip, and no bytes for flags as in `flagged`. Volatile loads read what arrives; words
may arrive in any order, and no target tears one.

Every program puts its blocks of the message to all peers; then it waits for those of each peer, and writes the sentinel back
when it has read them. Two buffers take turns by the parity of the program's calls. Block b belongs to program b % programs,
whatever the size of the call, so all ranks agree on the parity, and what a program reads it also clears. A program puts
words of its call e + 2 after it has read its peers' words of call e + 1, which they put after their call e had ended, with
its clearing.
"""

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import shmem

from .all_reduce_words import WordMethod, combine_halves, halves, packed
from .arguments import device_programs
from .channels import round_up
from .launch import Launcher

SENTINEL = tl.constexpr(0xFFFFFFFF)


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
            dl.remote_store(to, mine, dl.owner_first(i, me, WORLD), ctx, mask=inside)
    for block in range(pid, blocks, PROGRAMS):
        lanes = block * BLOCK + tl.arange(0, BLOCK)
        inside = lanes < words
        mine = tl.minimum(tl.load(source + lanes, mask=inside, other=0), SENTINEL - 1)
        for src in tl.static_range(WORLD):
            word = mine
            if src != me:
                there = buffer + tl.cast(src, tl.int64) * slot + lanes
                word = tl.load(there, mask=inside, other=0, volatile=True)
                while tl.max(word, 0) == SENTINEL:
                    word = tl.load(there, mask=inside, other=0, volatile=True)
                tl.store(there, tl.full((BLOCK,), SENTINEL, tl.uint32), mask=inside)
            if src == 0:
                first, second = halves(word, x)
            else:
                first, second = combine_halves(first, second, word, x, OP)
        tl.store(target + lanes, packed(first, second, x), mask=inside)
    tl.store(epochs + pid + tl.arange(0, 1), epoch)


def default_config():
    """(words of a block, warps, programs): programs of all ranks wait for one another, so they must fit on the device at a
    time. One warp a program: then no turn of a poll needs a barrier."""
    if triton_dist.backend == "nvidia":
        return 128, 1, 24 * device_programs()
    return 256, 4, device_programs()


class AllReduceSentinel(WordMethod):
    """Buffers of a context. Symmetric memory: 2 * num_ranks * max_elements elements."""

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
