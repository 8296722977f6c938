"""In a rank: kernels run as what triton-ascend lowered them to, in the place of Triton's interpreter.

    engine.install(address, limit_s=30)     # of a compiler.Compiler; on the cpu platform, after `import triton_dist`

From then on `kernel[grid](...)` asks the compile server for the kernel's host library and runs it, one thread a program. The
host code around it is not touched: heap, signals, teams, the operators' own contexts.
"""

import ctypes
import inspect

import torch

import triton_dist

from ..arguments import encoded
from .compiler import request

_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
_LIMIT_S = 30.0


class NotExecutable(RuntimeError):
    """A kernel cannot be run on the host. `stage`: what refused ("ttir", "ttadapter", "host"); `reason`: its words."""

    def __init__(self, kernel, stage, reason):
        super().__init__(f"{kernel}: {stage}: {reason}")
        self.kernel, self.stage, self.reason = kernel, stage, reason


class Stuck(RuntimeError):
    """Programs of a grid were still waiting at the end of the time limit; the text names kernel and programs."""


_address, _limit_s = None, _LIMIT_S
_libraries = {}  # path -> the function that launches
ran = {}  # kernel name -> launches in this process, as lowered code


def install(address, limit_s=_LIMIT_S):
    """Puts this engine in the interpreter's place, for the whole process. `limit_s`: of each launch."""
    global _address, _limit_s
    if not triton_dist.interpreted:
        raise RuntimeError("the host runs lowered kernels on the cpu platform alone: set TRITON_DIST_BACKEND=cpu")
    from triton_dist.interpreter.launcher import Launcher

    _address, _limit_s = address, limit_s
    Launcher.__call__ = _launch


def describe(arguments, constexprs):
    """How Triton's launcher would compile for these arguments: (signature, constants, [value of each parameter]).

    A Python int is int32 where it fits, else int64; 1 is compiled in, as None is; a float is fp32. Constants are as
    `arguments.encoded` makes them.
    """
    signature, constants, values = {}, {}, []
    for name, value in arguments.items():
        value = getattr(value, "value", value)  # a tl.constexpr
        if name in constexprs or value is None or (type(value) is int and value == 1):
            try:
                constants[name] = encoded(value)
            except TypeError as error:
                raise TypeError(f"kernel argument {name!r}: {error}") from None
            continue
        if isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
        elif isinstance(value, bool):
            kind = "i1"
        elif isinstance(value, int):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        elif isinstance(value, float):
            kind = "fp32"
        else:
            raise TypeError(f"kernel argument {name!r} is a {type(value).__name__}: give a tensor, a number or None")
        signature[name] = kind
        values.append(value)
    return signature, constants, values


def _launch(self, *args, **kwargs):
    known = inspect.getfullargspec(self.fn)
    kwargs = {k: v for k, v in kwargs.items() if k in known.args or k in known.kwonlyargs}
    bound = inspect.getcallargs(self.fn, *args, **kwargs)
    grid = self.grid(bound) if callable(self.grid) else self.grid
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    grid += (1,) * (3 - len(grid))
    if min(grid) <= 0:
        return
    signature, constants, values = describe(bound, self.constexprs)
    name = self.fn.__name__
    task = {"file": inspect.getsourcefile(self.fn), "name": name, "signature": signature, "constants": constants}
    answer = request(_address, task)
    if "error" in answer:
        raise NotExecutable(name, answer["stage"], answer["error"])
    _run(name, answer["library"], grid, [_slot(value, kind) for value, kind in zip(values, answer["parameters"], strict=True)])
    ran[name] = ran.get(name, 0) + 1


def _slot(value, kind):
    """An argument as the 8 bytes that the library reads."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        number = ctypes.c_float(value) if kind == "f32" else ctypes.c_double(value)
        return int.from_bytes(bytes(number), "little")
    return int(value)


def _run(name, library, grid, slots):
    launch = _libraries.get(library)
    if launch is None:
        launch = _libraries[library] = ctypes.CDLL(library).triton_dist_launch
        launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p]
    arguments = (ctypes.c_int64 * max(len(slots), 1))(*(slot - 2**64 if slot >= 2**63 else slot for slot in slots))
    ended = ctypes.create_string_buffer(grid[0] * grid[1] * grid[2])
    status = launch(arguments, (ctypes.c_int32 * 3)(*grid), _limit_s, ended)
    if status == 0:
        return
    if status < 0:
        raise RuntimeError(f"{name}: no threads for a grid of {grid}")
    places = [(i % grid[0], i // grid[0] % grid[1], i // grid[0] // grid[1]) for i, b in enumerate(ended.raw) if b == status]
    text = f"{name}, grid {grid}: after {_limit_s:g} s these programs still wait: {places}"
    if status == 2:
        text = f"{name}, grid {grid}: these programs run on after {_limit_s:g} s and pass no barrier: {places}"
        raise SystemExit(text)
    raise Stuck(text)
