"""Channels: how the collectives cut a message into programs that know nothing of one another.

A collective's grid is a number of channels. Channel c of a rank talks to channel c of the other ranks alone. Block b (BLOCK
elements) of every slot of staging memory belongs to channel b % CHANNELS, whatever the size of the call, so a channel has
memory, signals and a count of its calls (its epoch, a word in device memory) of its own: what is argued about a collective
is argued about one channel. A call launches as many channels as it has blocks, at most CHANNELS; since all ranks give the
same size, they launch the same ones. Signals are set to the epoch by the one channel that writes them, and are waited for
with `ge`: they only grow, over calls of any size.
"""

import triton
import triton.language as tl

import triton_dist

from .arguments import device_programs, name_of, need, need_int, need_operand, overlap, tuned_arguments
from .launch import Launcher
from .operator_context import OperatorContext, agreement

TUNED = ("all_gather", "reduce_scatter")  # whose grids are looked up among measured ones when the user leaves them open
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


class ChannelContext(OperatorContext):
    """What a collective needs besides its operands: the base of the contexts of all of them.

    Checks the arguments, then that all ranks gave the same ones; subclasses then allocate.

    Args:
        name: of the collective.
        max_elements: most elements of a call (of what, the collective says), 0 or more.
        dtype: of all operands.
        dtypes: check of the dtype, of (call, dtype).
        team, programs, block: see `create_all_gather_context`.
        more: further arguments on which the ranks must agree, as the user wrote them.
        problem: what is wrong with those, or None.
    """

    def __init__(self, name, max_elements, dtype, dtypes, team, programs, block, more="", problem=None):
        create, open_grid = f"create_{name}_context", programs is None and block is None
        with agreement(create, team) as agreed:
            need(create, problem is None, problem)
            dtypes(create, dtype)
            max_elements = need_int(create, "max_elements", max_elements)
            programs = need_int(create, "programs", device_programs() if programs is None else programs, 1)
            block = default_block(dtype.itemsize, max_elements, programs) if block is None else need_int(create, "block", block)
            power = block >= ALIGN and block & (block - 1) == 0
            need(create, power, f"block is {block}: give a power of two, at least {ALIGN}")
            agreed.on = f"max_elements={max_elements}, {dtype}, {more}programs={programs}, block={block}"
        if name in TUNED:
            key = dict(dtype=name_of(dtype), bytes=max_elements * dtype.itemsize) if open_grid else None
            tuned = tuned_arguments(create, name, team, key, ("programs", "block"))
            programs, block = tuned.get("programs", programs), tuned.get("block", block)
        super().__init__(name, team)
        self.max_elements, self.dtype, self.programs, self.block = max_elements, dtype, programs, block
        self.slot = round_up(max_elements)  # elements of a slot that holds a message
        self.epochs = self.local(programs)
        self.constants = dict(CHANNELS=programs, WORLD=self.num_ranks, BLOCK=block)
        if triton_dist.backend == "nvidia":
            self.constants["num_warps"] = 8
        self.launchers = {}

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

    def check(self, x, out, out_shape, n, own=None, **alike):
        """Raises ValueError, naming rank and values, unless the operands fit. `n` is counted against max_elements; `own`
        is the part of `out` that `x` may be (None: all of it); `alike`: other arguments that are the same on all ranks."""
        need(
            self.name, n <= self.max_elements,
            f"x is {list(x.shape)}, {n} elements a rank, the context was made for at most {self.max_elements}",
        )  # fmt: skip
        need(self.name, tuple(out.shape) == tuple(out_shape), f"out is {list(out.shape)}, it must be {list(out_shape)}")
        for label, tensor in (("x", x), ("out", out)):
            need_operand(self.name, label, tensor, self.dtype, self.device)
            need(self.name, tensor.is_contiguous(), f"{label} has strides {tensor.stride()}; it must be contiguous")
        same = x.data_ptr() == out.data_ptr() + (own or 0) * self.dtype.itemsize
        need(
            self.name, same or not overlap(x, out),
            "x and out overlap, and x is not where its own part of out is",
        )  # fmt: skip
        self.agree(self.name, ", ".join([f"x of {list(x.shape)}", *(f"{k}={v!r}" for k, v in alike.items())]), x, out)
