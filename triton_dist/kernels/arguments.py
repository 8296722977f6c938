"""What the operators' contexts check of their arguments, and what they choose when the user leaves a choice open."""

import torch

import triton_dist
from triton_dist import shmem

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KERNEL_METHODS = ("kernel", "one_shot", "two_shot")  # portable kernels of this library, which can be tuned

# Operators that only move data move words, so any dtype of these sizes does, every bit pattern survives, and no target
# needs to know fp8. itemsize -> what is moved
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_words(tensor):
    """A view of `tensor` as integers of its itemsize."""
    return tensor.view(WORDS[tensor.dtype.itemsize])


def need(call, fits, text):
    """Raises ValueError, naming this rank and the call, unless it fits."""
    if not fits:
        raise ValueError(f"rank {shmem.my_pe()}: {call}: {text}")


def need_dtype(call, dtype, dtypes):
    need(call, dtype in dtypes, f"dtype is {dtype}: give one of {', '.join(map(str, dtypes))}")


def without_gradients(*tensors):
    """The tensors, detached where torch would refuse an `out` for the sake of gradients, which the operators do not have."""
    return [x.detach() if x.requires_grad else x for x in tensors]


def need_words(call, dtype):
    """For operators that move elements and never compute with them."""
    fits = isinstance(dtype, torch.dtype) and dtype.itemsize in WORDS
    need(call, fits, f"dtype is {dtype}: give a torch dtype of 1, 2, 4 or 8 bytes")


def device_programs():
    """Programs of a grid that suit this process's platform: those of all ranks wait for one another, so there are no more of
    them than the device runs at a time."""
    if triton_dist.backend == "cpu":
        return 2
    if triton_dist.backend == "nvidia":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return 20


def checked_config(call, defaults, config, programs, options=(), least=None):
    """(config, programs) with the defaults filled in; ValueError, naming rank and values, for what cannot be.

    Args:
        defaults: (dict of constexprs, programs) of the operator.
        config: the user's dict of overrides, or None.
        programs: the user's choice, or None.
        options: names that a config may have besides those of the defaults.
        least: dict of the smallest values of entries for which 1 is too small.
    """
    entries, default_programs = defaults
    known = {*entries, *options}
    unknown = set(config or {}) - known
    need(call, not unknown, f"config has {sorted(unknown)}; known are {sorted(known)}")
    config, programs = {**entries, **(config or {})}, default_programs if programs is None else programs
    for name, value in {**config, "programs": programs}.items():
        low = (least or {}).get(name, 1)
        whole = isinstance(value, int) and value >= low
        need(call, whole, f"{name} is {value!r}: give an integer of {low} or more")
        power = "BLOCK" not in name or value & (value - 1) == 0
        need(call, power, f"{name} is {value}: give a power of two")
    return config, programs


def chosen_method(call, method, methods, suited, config, programs):
    """The method of a fused GEMM: the user's, checked, or the one that suits platform and size.

    Args:
        methods: those that the operator has; the ones of `KERNEL_METHODS` take a config and programs.
        suited: the one for nvidia.
        config, programs: the user's.
    """
    tuned = config is not None or programs is not None
    if method is None:
        return suited if triton_dist.backend == "nvidia" and not tuned else methods[0]
    need(call, method in methods, f"method is {method!r}: give one of {', '.join(methods)}")
    fits = method in KERNEL_METHODS or not tuned
    need(call, fits, f"config and programs are for the methods {', '.join(KERNEL_METHODS)}; the method {method} takes neither")
    return method
