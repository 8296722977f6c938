"""What the operators' contexts check of their arguments, and what they choose when the user leaves a choice open."""

import contextlib

import numpy as np
import torch

import triton_dist
from triton_dist import shmem
from triton_dist.shmem.world import as_int
from triton_dist.tuning import lookup

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KERNEL_METHODS = ("kernel", "one_shot", "two_shot")  # portable kernels of this library, which can be tuned

LAUNCH_OPTIONS = ("num_warps", "num_stages")  # of triton, that a config may have besides constexprs

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


def need_int(call, name, value, least=0):
    """`value` as an int; ValueError, naming rank and values, unless it is one of `least` or more."""
    whole = as_int(value)
    need(call, whole is not None and whole >= least, f"{name} is {value!r}: give an integer of {least} or more")
    return whole


def name_of(dtype):
    """As keys of measured times have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def need_dtype(call, dtype, dtypes):
    need(call, dtype in dtypes, f"dtype is {dtype}: give one of {', '.join(map(str, dtypes))}")


def without_gradients(*tensors):
    """The tensors, detached where torch would refuse an `out` for the sake of gradients, which the operators do not have."""
    return [x.detach() if x.requires_grad else x for x in tensors]


def need_words(call, dtype):
    """For operators that move elements and never compute with them."""
    fits = isinstance(dtype, torch.dtype) and dtype.itemsize in WORDS
    need(call, fits, f"dtype is {dtype}: give a torch dtype of 1, 2, 4 or 8 bytes")


def need_operand(call, name, tensor, dtype, device):
    """`tensor` has the context's dtype and lies on its device."""
    need(call, tensor.dtype == dtype, f"{name} is {tensor.dtype}, the context was made for {dtype}")
    need(call, tensor.device == device, f"{name} is on {tensor.device}, not on {device}")


def _span(tensor):
    """First byte and end of the memory that a tensor's elements lie in."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class _Addresses:
    """A tensor for numpy, which compares addresses and reads nothing: the memory may be a device's."""

    def __init__(self, tensor):
        size = tensor.element_size()
        self.__array_interface__ = dict(
            version=3, data=(tensor.data_ptr(), False), shape=tuple(tensor.shape), typestr=f"|V{size}",
            strides=tuple(stride * size for stride in tensor.stride()),
        )  # fmt: skip


def overlap(one, other):
    """Whether two tensors are known to share a byte (numpy's search, which may give up on intricate strides)."""
    if not one.numel() or not other.numel():
        return False
    (first, end), (other_first, other_end) = _span(one), _span(other)
    if end <= other_first or other_end <= first:
        return False
    try:
        return np.shares_memory(np.asarray(_Addresses(one)), np.asarray(_Addresses(other)), max_work=10_000)
    except np.exceptions.TooHardError:
        return False


def need_apart(call, out, inputs, name="out"):
    """`out` shares no memory with the inputs (a dict by name), nor with itself."""
    folded = any(extent > 1 and stride == 0 for extent, stride in zip(out.shape, out.stride()))
    need(call, not folded, f"{name} has strides {out.stride()}: several of its elements are one place in memory")
    for other, tensor in inputs.items():
        need(call, not overlap(out, tensor), f"{name} and {other} overlap: give {name} memory of its own")


_operators_at_once = 1


@contextlib.contextmanager
def concurrent(operators):
    """Contexts that are created in a `with kernels.concurrent(n):` take an n-th of the device each, where no `programs` is
    given, so that n of them can run at the same time, on n streams.

    Programs of an operator wait for those of its peers. Two operators that each fill the device therefore hang when one rank
    begins with the one and another rank with the other, and nothing orders the streams of different ranks. This is not needed
    where calls follow one another on one stream, or by events, nor for `allgather_gemm` by `streams` and `gemm_reduce_scatter`
    by `columns`: these wait in programs of one warp, or in none.

    Args:
        operators: how many, 1 or more; equal on all ranks. Nested, the innermost holds.
    """
    global _operators_at_once
    before, _operators_at_once = _operators_at_once, need_int("concurrent", "operators", operators, 1)
    try:
        yield
    finally:
        _operators_at_once = before


def shares_device():
    """Whether operators whose contexts are made now may run beside others, see `concurrent`."""
    return _operators_at_once > 1


def device_programs():
    """Programs of a grid that suit this process's platform: those of all ranks wait for one another, so there are no more of
    them than the device runs at a time, see `concurrent`."""
    if triton_dist.backend == "cpu":
        at_once = 2
    elif triton_dist.backend == "nvidia":
        at_once = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    else:
        at_once = 20
    return max(at_once // _operators_at_once, 1)


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
    need(call, config is None or isinstance(config, dict), f"config is {config!r}: give a dict of {', '.join(entries)}")
    known = {*entries, *options}
    unknown = set(config or {}) - known
    need(call, not unknown, f"config has {sorted(unknown)}; known are {sorted(known)}")
    config, programs = {**entries, **(config or {})}, default_programs if programs is None else programs
    settled = {}
    for name, value in {**config, "programs": programs}.items():
        settled[name] = whole = need_int(call, name, value, (least or {}).get(name, 1))
        power = not ("BLOCK" in name or name == "num_warps") or whole & (whole - 1) == 0
        need(call, power, f"{name} is {value}: give a power of two")
    programs = settled.pop("programs")
    return settled, programs


# Methods that need what only some platforms have: tensor descriptors, streams with handoffs, relaxed stores.
NOT_ON_ASCEND = ("tma", "streams", "columns", "flagged", "sentinel", "pipelined")


def platform_problem(method):
    """What is wrong with `method` on this process's platform, or None."""
    if triton_dist.backend == "ascend" and method in NOT_ON_ASCEND:
        return f"the method {method} is not for the ascend platform: leave method open, or give another one"


def checked_method(call, method, methods, config, programs):
    """ValueError unless `method` is None or one of `methods`, and takes the user's config and programs, if any."""
    need(call, method is None or method in methods, f"method is {method!r}: give one of {', '.join(methods)}")
    problem = platform_problem(method)
    need(call, problem is None, problem)
    fits = method is None or method in KERNEL_METHODS or (config is None and programs is None)
    need(call, fits, f"config and programs are for the methods {', '.join(KERNEL_METHODS)}; the method {method} takes neither")


def chosen_method(call, methods, suited, config, programs, team, operator, key):
    """The method where the user left it open: on nvidia, unless config or programs is given, the best one that was measured
    for `key` (see `tuning.lookup`), else the one that suits the size; methods[0], the portable kernel, elsewhere and where the
    teams of the heap would choose differently (they allocate alike). The first rank of a team chooses for all of it, since
    its ranks may have different caches. Collective over all ranks of the heap on nvidia."""
    return chosen_candidate(call, methods, suited, config, programs, team, operator, key)["method"]


def chosen_candidate(call, methods, suited, config, programs, team, operator, key):
    """As `chosen_method`, but the whole candidate that was measured: {"method": ..., and what else it was made with}."""
    if triton_dist.backend != "nvidia":
        return dict(method=methods[0])
    chosen = dict(method=suited)
    if config is not None or programs is not None:
        chosen = dict(method=methods[0])
    elif shmem.team_my_pe(team) == 0:
        chosen = lookup(operator, key, shmem.team_n_pes(team), lambda candidate: candidate.get("method") in methods) or chosen
    chosen = of_first_ranks(f"{call}: method", team, chosen)
    return dict(method=methods[0]) if chosen is None else chosen


def tuned_arguments(call, operator, team, key, names):
    """What was measured to be the best for `key`: a dict of some of the arguments `names` of the operator's create function,
    alike on all ranks of the heap; {} elsewhere than on nvidia, where nothing was measured, where the teams of the heap differ,
    and when key is None, because the user leaves no choice. Collective over all ranks of the heap on nvidia."""
    if triton_dist.backend != "nvidia":
        return {}
    found = None
    if key is not None and shmem.team_my_pe(team) == 0:
        found = lookup(operator, key, shmem.team_n_pes(team), lambda candidate: set(candidate) <= set(names))
    return of_first_ranks(f"{call}: tuned arguments", team, found) or {}


def of_first_ranks(call, team, value):
    """The `value` (anything JSON) of the team's first rank, whose cache of measured times counts; None when the first ranks of
    the teams have different ones, since all ranks of the heap allocate alike. Collective over all ranks of the heap."""
    first = shmem.team_translate_pe(team, 0, 0)
    said = shmem.gather(call, [first, value])
    values = [said[one][1] for one, _ in said]
    return values[0] if all(one == values[0] for one in values) else None
