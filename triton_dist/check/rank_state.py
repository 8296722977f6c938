"""What of the process belongs to one rank's host: the environment variables that torchrun sets, generators of random
numbers, torch's defaults and modes. It is exchanged whenever another rank's host goes on.
"""

import os
import random
import sys

import numpy as np
import torch
from torch import overrides
from torch._C._dynamo import eval_frame
from torch.utils import _python_dispatch as dispatch

_OPS = torch._ops.__file__
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_generators(state):
    torch.set_rng_state(state[0]), random.setstate(state[1]), np.random.set_state(state[2])


def defaults():
    """Autograd's switch, the default dtype and the default device (a mode, which torch also keeps beside its modes)."""
    return torch.is_grad_enabled(), torch.get_default_dtype(), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def set_defaults(state):
    torch.set_grad_enabled(state[0])
    torch.set_default_dtype(state[1])
    torch._GLOBAL_DEVICE_CONTEXT.device_context = state[2]


def in_operator():
    """Whether the caller runs inside of an operator of torch.ops, as a custom op that launches a kernel does."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _OPS:
            return True
        frame = frame.f_back
    return False


class Modes:
    """Torch's modes of one coroutine. A host may stand inside of one (in an operation of its own that launches a kernel, say)
    when another coroutine goes on, which must not find it on torch's stacks. `like`: those to begin with."""

    def __init__(self, like=None):
        self.functions, self.dispatches = (list(like.functions), list(like.dispatches)) if like else ([], [])
        self.keys = None

    def leave(self):
        """Takes the running coroutine's modes off."""
        while overrides._len_torch_function_stack():
            self.functions.append(overrides._pop_mode())
        while dispatch._get_current_dispatch_mode_stack():
            self.dispatches.append(dispatch._pop_mode())
        self.keys = torch._C._ForceDispatchKeyGuard(_CLEAN_INCLUDED, _CLEAN_EXCLUDED)
        self.keys.__enter__()
        self.compiler = eval_frame.set_eval_frame(None)  # torch.compile's hook, which is on while compiled code runs

    def enter(self):
        """Puts them on (again)."""
        if self.keys is not None:
            eval_frame.set_eval_frame(self.compiler)
            self.keys.__exit__(None, None, None)
            self.keys = None
        while self.dispatches:
            dispatch._push_mode(self.dispatches.pop())
        while self.functions:
            overrides._push_mode(self.functions.pop())

    def end(self):
        """Takes them off for good."""
        self.leave()
        self.keys.__exit__(None, None, None)


_CLEAN_INCLUDED = torch._C._dispatch_tls_local_include_set()
_CLEAN_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


class RankStates:
    """Of all ranks of a simulation. `begin`, `enter` a rank whose host goes on, `end`."""

    def __init__(self, world_size):
        self.world_size, self.current = world_size, None

    def begin(self):
        self.outer = {name: os.environ.get(name) for name in VARIABLES}, generators(), defaults()
        os.environ.update(WORLD_SIZE=str(self.world_size), LOCAL_WORLD_SIZE=str(self.world_size))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        self.generators = [generators()] * self.world_size
        self.defaults = [(True, *self.outer[2][1:])] * self.world_size

    def enter(self, rank):
        if rank == self.current:  # no other host ran in between, and programs change none of this
            return
        if self.current is not None:
            self.generators[self.current], self.defaults[self.current] = generators(), defaults()
        self.current = rank
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        set_generators(self.generators[rank])
        set_defaults(self.defaults[rank])

    def end(self):
        variables, numbers, others = self.outer
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        set_generators(numbers)
        set_defaults(others)
