"""The only file that names Triton's private parts: everything else in this package takes them from here.

Four attributes of `triton.runtime.interpreter` are replaced, once (`replace`):
  * the class of `interpreter_builder`        by a Builder: lazy blocks, strided memory access, right bf16 and fp8, waits
  * `GridExecutor`                            by a Launcher: programs run cooperatively, Triton is patched once a launch
  * `ReduceOps` and `ScanOps`                 sums and scans of the small floats in fp32, rounded once
  * `InterpretedFunction.__call__`            a device function's call does not patch Triton again
Tested with Triton 3.6.0 and 3.9.0.
"""

import dataclasses
import types

import triton
import triton.language as tl
import triton.runtime.interpreter as _interpreter

# values and types
TensorHandle = _interpreter.TensorHandle
numpy_dtype = _interpreter._get_np_dtype
round_to_tf32 = getattr(_interpreter, "_round_f32_to_tf32", None)  # since 3.9
tensor, block_type, tuple_of = tl.core.tensor, tl.core.block_type, tl.core.tuple
sum_combine = tl.standard._sum_combine
InterpreterError = _interpreter.InterpreterError

# what is subclassed
InterpreterBuilder = _interpreter.InterpreterBuilder
GridExecutor = _interpreter.GridExecutor
ReduceOps, ScanOps = _interpreter.ReduceOps, _interpreter.ScanOps

# Triton's compiled helpers: stores lane by lane, atomics
native = _interpreter._interpreter
ir = _interpreter._ir

# launching
argument_value = _interpreter._implicit_cvt
call_device_function = _interpreter.InterpretedFunction.__call__
builder = _interpreter.interpreter_builder
MISSING = _interpreter._MISSING


def wants_raw_errors():
    return triton.knobs.compilation.front_end_debugging


def language_patches():
    """What Triton's own patch of `triton.language` changes: (owner, name, new value, old value or MISSING)."""
    both = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = _interpreter._patch_lang(both)
    olds = {}
    for owner, name, old in scope._changes:
        olds.setdefault((id(owner), name), (owner, name, old))
    patches = [(owner, name, vars(owner)[name], old) for owner, name, old in olds.values()]
    scope.restore()
    return patches


def set_program(index, grid):
    builder.grid_idx, builder.grid_dim = index, grid


def replace(builder_class, executor, reduce_ops, scan_ops, device_call):
    """Puts the engine in Triton's place for the whole process."""
    builder.__class__ = builder_class
    # device_assert fires; the overflow check, whose result the interpreter discards, costs 100 us an addition
    wanted = {"debug": True, "sanitize_overflow": False}
    fields = {field.name for field in dataclasses.fields(builder.options)}
    builder.options = dataclasses.replace(builder.options, **{k: v for k, v in wanted.items() if k in fields})
    _interpreter.GridExecutor = executor
    _interpreter.ReduceOps, _interpreter.ScanOps = reduce_ops, scan_ops
    _interpreter.InterpretedFunction.__call__ = device_call
