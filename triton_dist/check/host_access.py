"""Tensor operations of host code on the symmetric heap, as accesses of the host's thread: `fill_`, `copy_`, `zero_`, sums.

A mode of torch's dispatcher sees every operation with its arguments, and the operation's schema says which of them it
writes. Operations that only make views, or new tensors of the same shape, touch nothing. What bypasses the dispatcher
(`tolist`, `numpy`, `print`, pickling) is seen one level up.
"""

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..interpreter.affine import Affine

_roles = {}  # operation -> None for what touches nothing, else {position or name of an argument: whether it is written}


def _roles_of(func):
    found = _roles.get(func, _roles)
    if found is not _roles:
        return found
    schema = func._schema
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    name = schema.name.rpartition("::")[2]
    shape = name.endswith("_like") or name.startswith("new_")  # of a new tensor: nothing is read
    roles = None
    if not (view or shape):
        roles = {}
        for position, argument in enumerate(schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            roles[argument.name if argument.kwarg_only else position] = written
    _roles[func] = roles
    return roles


_ONLY_WRITTEN = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_"}
_NAMES = {"_local_scalar_dense": "item", "_to_copy": "to"}
_DIRECT = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__repr__: "repr",
    torch.Tensor.__format__: "format",
    torch.Tensor.__deepcopy__: "deepcopy",
    torch.Tensor._backward_hooks.__get__: "pickle",  # the first that pickle, torch.save and copy.copy ask a tensor for
}


def _body_of(func):
    """The Python function behind a custom op of torch.library: what it does is seen operation by operation. Else None."""
    found = OPDEFS.get(func._schema.name)
    return None if found is None else _body(found)


def _body(op):
    return op._backend_fns.get("cpu") or op._backend_fns.get(None)


_call = CustomOpDef.__call__


def _call_body(op, *args, **kwargs):
    """A custom op, called without torch's dispatcher where nothing has to be recorded for a backward pass: inside of the
    dispatcher, ranks can go on in few orders only (see `in_operator` in rank_state.py)."""
    body = _body(op)
    if body is None or (op._backward_fn is not None and torch.is_grad_enabled()):
        return _call(op, *args, **kwargs)
    with torch.no_grad():
        return body(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        body = _body_of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        roles = _roles_of(func)
        if roles is None or self.owner.inside:
            return func(*args, **kwargs)
        self.owner.operation(func, roles, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.owner.done()


class _Function(TorchFunctionMode):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        word = _DIRECT.get(func)
        if word is None:
            return func(*args, **(kwargs or {}))
        self.owner.touch(args[0], False, word)
        outer, self.owner.inside = self.owner.inside, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.owner.inside = outer
            self.owner.done()


class HostAccess:
    """`with access:` around host code. `note(where, size, writes, word)` is told of every access to a watched heap before
    it is made, `done()` of the end of an operation, whose accesses may be several. `watched(tensor)` says whether a tensor in
    other memory is of interest."""

    def __init__(self, note, done, watched):
        self.note, self.done, self.watched, self.storages = note, done, watched, set()
        self.inside = False  # an operation that is noted as a whole: deepcopy copies the whole heap, which nobody asked for
        self._modes = _Dispatch(self), _Function(self)

    def watch(self, memory):
        self.storages.update(memory.bases)

    def __enter__(self):
        CustomOpDef.__call__ = _call_body
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        CustomOpDef.__call__ = _call

    def operation(self, func, roles, args, kwargs):
        name = func._schema.name.rpartition("::")[2]
        name = _NAMES.get(name, name)
        for key, written in roles.items():
            argument = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            if isinstance(argument, torch.Tensor):
                argument = (argument,)
            if not isinstance(argument, (tuple, list)):
                continue
            for tensor in argument:
                if isinstance(tensor, torch.Tensor):
                    if written and name not in _ONLY_WRITTEN and not isinstance(key, str):
                        self.touch(tensor, False, name)
                    self.touch(tensor, written, name)

    def touch(self, tensor, written, word):
        if not self.storages or tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return
        if tensor.untyped_storage().data_ptr() not in self.storages and not self.watched(tensor):
            return
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        self.note(Affine(tensor.data_ptr(), strides, tuple(tensor.shape)), size, written, word)
