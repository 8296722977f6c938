"""Launches of one kernel again and again, with less of the host's time: a short message is sooner sent than its launch bound.

Triton binds and specialises the arguments anew in every launch. A `Launcher` remembers the compiled kernel of its last launch
and runs it again when nothing differs that Triton would compile differently for: the values of all numbers, the dtypes of
tensors and whether they are aligned to 16 bytes, the blocks of descriptors. On nvidia it gives tensors as the addresses that
they are: of those Triton does not ask the driver in every launch whether they are the device's.
"""

import torch

import triton_dist


def _seen(argument):
    """What Triton compiles for, of an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if hasattr(argument, "block_shape"):  # a tensor descriptor, which not every Triton has
        return argument.base.dtype, argument.block_shape
    return argument


def _address(argument):
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


class Launcher:
    """`Launcher(kernel)(grid, arguments, constants, **options)` is `kernel[grid](*arguments, **constants, **options)`.

    `constants` is a dict of the kernel's constexprs in the order of its signature, which follow all other arguments. Options
    must not change from launch to launch.
    """

    def __init__(self, kernel):
        self.kernel, self.key, self.run = kernel, None, None

    def __call__(self, grid, arguments, constants, **options):
        key = [constants, grid]
        key += map(_seen, arguments)
        if key == self.key:
            if triton_dist.backend == "nvidia":
                arguments = map(_address, arguments)
            self.run(*arguments, *constants.values())
            return
        compiled = self.kernel[grid](*arguments, **constants, **options)
        if hasattr(compiled, "asm"):  # in the interpreter nothing is compiled
            self.key, self.run = key, compiled[grid]
