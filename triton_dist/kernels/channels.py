"""Channels: how the collectives cut a message into programs that know nothing of one another.

A collective's grid is a number of channels. Channel c of a rank talks to channel c of the other ranks alone. Block b (BLOCK
elements) of every slot of staging memory belongs to channel b % CHANNELS, whatever the size of the call, so a channel has
memory, signals and a count of its calls (its epoch, a word in device memory) of its own: what is argued about a collective
is argued about one channel. A call launches as many channels as it has blocks, at most CHANNELS; since all ranks give the
same size, they launch the same ones. Signals are set to the epoch by the one channel that writes them, and are waited for
with `ge`: they only grow, over calls of any size.
"""

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import shmem

from .arguments import device_programs, need, need_dtype
from .launch import Launcher

ALIGN = 16  # elements to which slots and shares are rounded up, so that each begins on 16 bytes


@triton.jit
def next_epoch(epochs):
    """This channel's count of calls, this one included. Stored by `end_epoch`, at the end of the call."""
    return tl.max(tl.load(epochs + tl.program_id(0) + tl.arange(0, 1)), 0) + 1


@triton.jit
def end_epoch(epochs, epoch):
    tl.store(epochs + tl.program_id(0) + tl.arange(0, 1), epoch)


def round_up(n, multiple=ALIGN):
    return -(-n // multiple) * multiple


def default_block(itemsize, max_elements, programs):
    """Elements of a block: 8 KiB, 32 bytes a thread; on cpu, where an operation costs more than its data, a channel's
    whole share up to 256 KiB."""
    if triton_dist.backend == "cpu":
        return min(2**18 // itemsize, triton.next_power_of_2(max(-(-max_elements // programs), ALIGN)))
    return 8192 // itemsize


class ChannelContext:
    """What a collective needs besides its operands: the base of the contexts of all of them.

    Checks the arguments, then that all ranks gave the same ones; subclasses then allocate.

    Args:
        name: of the collective.
        max_elements: most elements of a call (of what, the collective says), 0 or more.
        dtype: of all operands.
        dtypes: those that the collective takes.
        team, programs, block: see `create_all_gather_context`.
        more: further arguments on which the ranks must agree, as the user wrote them.
    """

    def __init__(self, name, max_elements, dtype, dtypes, team, programs, block, more=""):
        self.name, create = name, f"create_{name}_context"
        need_dtype(create, dtype, dtypes)
        need(
            create, isinstance(max_elements, int) and max_elements >= 0,
            f"max_elements is {max_elements!r}: give an integer of 0 or more",
        )  # fmt: skip
        programs = device_programs() if programs is None else programs
        need(create, isinstance(programs, int) and programs >= 1, f"programs is {programs!r}: give 1 or more")
        block = default_block(dtype.itemsize, max_elements, programs) if block is None else block
        need(
            create, isinstance(block, int) and block >= ALIGN and block & (block - 1) == 0,
            f"block is {block!r}: give a power of two, at least {ALIGN}",
        )  # fmt: skip
        shmem.check_alike(f"{create}(max_elements={max_elements}, {dtype}, {more}programs={programs}, block={block})", team)
        self.max_elements, self.dtype, self.team, self.programs, self.block = max_elements, dtype, team, programs, block
        self.num_ranks, self.rank = shmem.team_n_pes(team), shmem.team_my_pe(team)
        self.table = shmem.context(team)
        self.slot = round_up(max_elements)  # elements of a slot that holds a message
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=self.table.device)
        self.constants = dict(CHANNELS=programs, WORLD=self.num_ranks, BLOCK=block)
        if triton_dist.backend == "nvidia":
            self.constants["num_warps"] = 8
        self.symmetric, self.fitting, self.launchers = [], None, {}

    def tensor(self, shape, dtype):
        self.symmetric.append(shmem.aclshmem_create_tensor(shape, dtype))
        return self.symmetric[-1]

    def signals(self, n):
        self.symmetric.append(shmem.create_signals(n))
        return self.symmetric[-1]

    def grid(self, elements):
        """Channels that have a block when the longest message has `elements`."""
        return (min(self.programs, -(-elements // self.block)),)

    def launch(self, kernel, elements, arguments, **constants):
        """Runs a kernel whose longest message has `elements`; its last constexprs are CHANNELS, WORLD and BLOCK."""
        options = {name: value for name, value in self.constants.items() if name == "num_warps"}
        constants.update((name, self.constants[name]) for name in ("CHANNELS", "WORLD", "BLOCK"))
        if kernel not in self.launchers:
            self.launchers[kernel] = Launcher(kernel)
        self.launchers[kernel]((*self.grid(elements), 1, 1), arguments, constants, **options)

    def free(self):
        """Gives the symmetric memory back. Collective over all ranks; no call may be under way."""
        need(self.name, self.symmetric is not None, "the context was freed")
        for tensor in self.symmetric:
            shmem.aclshmem_free_tensor(tensor)
        self.symmetric = self.fitting = None

    def check(self, x, out, out_shape, n, own=None):
        """Raises ValueError, naming rank and values, unless the operands fit. `n` is counted against max_elements; `own`
        is the part of `out` that `x` may be (None: all of it)."""
        facts = x.shape, x.stride(), x.dtype, x.device, out.shape, out.stride(), out.dtype, out.device, out_shape
        if facts != self.fitting:  # what fitted in the last call fits again: a call's host time counts for short messages
            self._check(x, out, out_shape, n)
            self.fitting = facts
        first, out_first, nbytes, out_nbytes = x.data_ptr(), out.data_ptr(), x.nbytes, out.nbytes
        if nbytes and out_nbytes and first < out_first + out_nbytes and out_first < first + nbytes:
            same = first == (out_first if own is None else out_first + own * self.dtype.itemsize)
            need(self.name, same, "x and out overlap, and x is not where its own part of out is")

    def _check(self, x, out, out_shape, n):
        need(self.name, self.symmetric is not None, "the context was freed")
        need(
            self.name, n <= self.max_elements,
            f"x is {list(x.shape)}, {n} elements a rank, the context was made for at most {self.max_elements}",
        )  # fmt: skip
        need(
            self.name, tuple(out.shape) == tuple(out_shape),
            f"out is {list(out.shape)}, it must be {list(out_shape)}",
        )  # fmt: skip
        for label, tensor in (("x", x), ("out", out)):
            need(self.name, tensor.dtype == self.dtype, f"{label} is {tensor.dtype}, the context is for {self.dtype}")
            device = self.epochs.device
            need(self.name, tensor.device == device, f"{label} is on {tensor.device}, not on {device}")
            need(self.name, tensor.is_contiguous(), f"{label} has strides {tensor.stride()}; it must be contiguous")
