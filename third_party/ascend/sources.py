"""Imports the file of a kernel where torch is absent: a kernel needs triton and the device language alone, but its file
imports what its host side needs.

A module that is not installed here is replaced by a placeholder, whose attributes are placeholders that can be called,
subscripted, subclassed and used as decorators. So imports, constants and decorators of a file's top level work; a kernel
that uses one does not compile.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]


class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__name__}.{name}")

    def __call__(cls, *args, **kwargs):
        # As a decorator: the function as it is.
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Meta):
            return args[0]
        return _placeholder(f"{cls.__name__}()")

    def __getitem__(cls, item):
        return _placeholder(f"{cls.__name__}[]")

    def __iter__(cls):
        return iter(())

    def __bool__(cls):
        return False

    def __repr__(cls):
        return f"<{cls.__name__}, which is not installed here>"

    def _operator(cls, *others):
        return _placeholder(f"{cls.__name__} ...")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __floordiv__ = __or__ = __ror__ = __and__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _operator


def _placeholder(name):
    return _Meta(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{self.__name__}.{name}")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder asked: finds everything that nobody else has, but for what triton itself looks for in vain."""

    present = ("triton", "triton_dist", "third_party")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.present or not _asked_for_by_a_source():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


_sources = []  # files that are being imported


def _asked_for_by_a_source():
    return bool(_sources)


class HostCodeError(RuntimeError):
    """The code of a kernel's file failed before it defined the kernel; the text says where and what to do."""


class _NoDevice:
    """Stands in for a driver where there is none: triton.autotune asks it for a benchmark when it is applied."""

    def get_benchmarker(self):
        return None

    def __getattr__(self, name):
        raise RuntimeError(f"this machine has no NPU: nothing asks its driver for {name}")


def _stand_in_for_a_driver():
    from triton.runtime import driver

    if driver.active is driver.default:
        driver.set_active(_NoDevice())


def unwrapped(kernel):
    """The triton.jit function in what triton.autotune and triton.heuristics made of it; anything else as it is."""
    from triton.runtime import Autotuner, Heuristics

    while isinstance(kernel, (Autotuner, Heuristics)):
        kernel = kernel.fn
    return kernel


def load(path, name=None):
    """The module at `path`, a file. One of this repository's packages is imported under its own name.

    A script whose host code fails here (no ranks, no torch) is as good as a module when `name` was defined before that;
    else HostCodeError.
    """
    path = Path(path).resolve()
    _stand_in_for_a_driver()
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.append(_Absent())
    _sources.append(path)
    try:
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("triton_dist", "third_party"):
            return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        module_name = "source_" + "".join(c if c.isalnum() else "_" for c in path.stem)
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            if not hasattr(module, name or ""):
                raise HostCodeError(_explain(path, name, error)) from error
        finally:
            sys.path.remove(str(path.parent))
        return module
    finally:
        _sources.pop()


def _explain(path, name, error):
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}"
    where = f"{path}:{lines[0]}" if lines else str(path)
    failed = f"{where}: {type(error).__name__}: {error}"
    if not re.search(rf"^def {re.escape(name or '')}\(", path.read_text(errors="replace"), re.M):
        return f"{failed}; and there is no function {name!r} in the file"
    return f"{failed}; the file's host code failed before the kernel {name!r} was defined: put the kernel above it"
