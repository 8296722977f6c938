"""Launching: arguments become interpreter values, `triton.language` is patched, the scheduler runs the grid."""

import contextlib
import inspect

import numpy as np
import triton.language as tl

from ..errors import BackendError, TritonDistError
from . import stock
from .builder import Builder
from .reductions import Reduce, Scan
from .scheduler import scheduler

# Half of the cost of an interpreted operation is building the type of its result. These two are Triton's constructors
# with their results remembered by element type and shape.
_block_types = {}
_stock_init_block_type = stock.block_type.__init__


def _init_block_type(self, element_ty, shape):
    kind = (element_ty.name, element_ty.address_space, element_ty.const) if element_ty.is_ptr() else element_ty.name
    key = kind, tuple([n.value if isinstance(n, tl.constexpr) else n for n in shape])
    fields = _block_types.get(key)
    if fields is None:
        _stock_init_block_type(self, element_ty, shape)
        sizes = stock.tuple_of([tl.constexpr(n) for n in self.shape])
        self.tensor_fields = {"numel": tl.constexpr(self.numel), "shape": sizes, "dtype": self.scalar}
        _block_types[key] = dict(vars(self))
    else:
        vars(self).update(fields)


def _init_tensor(self, handle, type):
    self.handle, self.type = handle, type
    fields = vars(type).get("tensor_fields")
    if fields is None:  # a scalar
        fields = {"numel": tl.constexpr(1), "shape": stock.tuple_of([]), "dtype": type.scalar}
    vars(self).update(fields)


class _Language:
    """Triton's own patch of `triton.language`, taken once and then applied in a few microseconds a launch."""

    depth, patches = 0, None

    @classmethod
    @contextlib.contextmanager
    def patch(cls):
        if cls.patches is None:
            own = {
                # numpy >= 2.4 refuses int() of an array of one element, which Triton 3.6 uses
                (stock.tensor, "__index__"): lambda self: int(self.handle.data.item()),
                (stock.tensor, "__init__"): _init_tensor,
                (stock.block_type, "__init__"): _init_block_type,
            }
            cls.patches = [patch for patch in stock.language_patches() if patch[:2] not in own]
            cls.patches += [(o, name, new, vars(o).get(name, stock.MISSING)) for (o, name), new in own.items()]
        if cls.depth == 0:
            for owner, name, new, _ in cls.patches:
                setattr(owner, name, new)
        cls.depth += 1
        try:
            yield
        finally:
            cls.depth -= 1
            if cls.depth == 0:
                for owner, name, _, old in cls.patches:
                    if old is stock.MISSING:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, old)


def _call_device_function(self, *args, **kwargs):
    if _Language.depth == 0:
        return stock.call_device_function(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


def _check_on_cpu(name, arg):
    if isinstance(arg, tuple):
        for item in arg:
            _check_on_cpu(name, item)
    base = getattr(arg, "base", None)
    tensor = base if base is not None and hasattr(base, "device") else arg
    device = getattr(tensor, "device", None)
    if device is not None and getattr(device, "type", str(device)) != "cpu":
        raise BackendError(
            f"rank {scheduler.rank}: kernel argument {name!r} is a tensor on {device}; the cpu platform computes on CPU "
            "tensors. Move it with .cpu(), or choose another platform with TRITON_DIST_BACKEND"
        )


def _storages(bound):
    """(label, address, bytes) of the memory behind every tensor argument."""
    found = []
    for name, arg in bound.items():
        for item in arg if isinstance(arg, (tuple, list)) else (arg,):
            tensor = getattr(item, "base", None)
            tensor = item if tensor is None or not hasattr(tensor, "untyped_storage") else tensor
            if hasattr(tensor, "untyped_storage"):
                storage = tensor.untyped_storage()
                found.append((f"argument {name!r}", storage.data_ptr(), storage.nbytes()))
    return found


class Launcher(stock.GridExecutor):
    def __call__(self, *args, **kwargs):
        known = inspect.getfullargspec(self.fn)
        kwargs = {k: v for k, v in kwargs.items() if k in known.args or k in known.kwonlyargs}
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        bound = inspect.getcallargs(self.fn, *args, **kwargs)
        for name, arg in bound.items():
            _check_on_cpu(name, arg)
        with scheduler.lock, _Language.patch():
            values = {k: v if k in self.constexprs else stock.argument_value(v) for k, v in bound.items()}
            grid = self.grid(values) if callable(self.grid) else self.grid
            grid = tuple(int(n) for n in (grid if isinstance(grid, (tuple, list)) else (grid,)))
            if len(grid) > 3 or min(grid, default=0) < 0:
                raise ValueError(f"grid {grid}: give 1 to 3 sizes of 0 or more")
            grid += (1,) * (3 - len(grid))

            def run_program():
                with np.errstate(all="ignore"):  # a device does not warn of overflow either
                    self.fn(**values)

            if scheduler.observer is not None:
                scheduler.observer.launching(_storages(bound))
            try:
                scheduler.launch(self.fn.__name__, run_program, grid)
            except TritonDistError:
                raise
            except Exception as error:
                if stock.wants_raw_errors():
                    raise
                place = getattr(error, "program_place", f"rank {scheduler.rank}, kernel {self.fn.__name__}")
                raise stock.InterpreterError(f"{place}: {error!r}") from error


def install():
    """Puts this engine in the place of Triton's interpreter. Doing it again changes nothing."""
    if not isinstance(stock.builder, Builder):
        stock.replace(Builder, Launcher, Reduce, Scan, _call_device_function)
        scheduler.set_program = stock.set_program
