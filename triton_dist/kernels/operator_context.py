"""What the contexts of all operators share: creation on which the ranks agree, symmetric memory that is given back as a
whole, and the begin of a call.

Teams. Symmetric memory is allocated on all ranks of the heap alike, so `create_*_context` and `free()` are collective over
all of them, whatever the team: every rank makes the call with the team that it is in. Teams may differ in size and
arguments (each rank then holds the largest of what the teams need), so a rank that takes no part gives a team of its own
(`shmem.team_split_strided(0, rank, 1, 1)`). Arguments must be equal within a team.

Calls. The ranks of a team make the same calls in the same order; operators do not check that, because it would cost an
exchange. A rank whose call was refused with a ValueError has left the sequence: its next call would meet the others' last
one. With TRITON_DIST_CHECK_CALLS=1 every call is compared first, on the host (not for use in a graph capture), and ranks that
differ get a CollectiveMismatchError with both calls.
"""

import os

import torch

from triton_dist import shmem
from triton_dist.errors import ShmemError

from .arguments import need


class agreement:  # noqa: N801  reads as what it is: with agreement(...) as agreed:
    """The ranks of `team` check their arguments of `call`, and are here with the same ones.

        with agreement("create_x_context", team) as agreed:
            need("create_x_context", n > 0, ...)
            agreed.on = f"n={n}"

    At its end every rank knows what any rank found wrong: ValueError on all of them alike, or CollectiveMismatchError when
    the texts differ; nobody waits for a rank that has given up."""

    def __init__(self, call, team):
        self.call, self.team, self.on = call, team, ""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            shmem.check_alike(f"{self.call}({self.on})", self.team)
        elif issubclass(kind, (ValueError, TypeError)):
            problem = str(error).removeprefix(f"rank {shmem.my_pe()}: {self.call}: ")
            shmem.check_alike(self.call, self.team, problem)


class OperatorContext:
    """Base of the contexts: `name` of the operator, `team` whose ranks take part, `num_ranks`, `rank`, the context `table` for
    kernels, the local `device`."""

    def __init__(self, name, team):
        self.name, self.team = name, team
        self.num_ranks, self.rank = shmem.team_n_pes(team), shmem.team_my_pe(team)
        self.table = shmem.context(team)
        self.device = self.table.device
        self.symmetric = []  # what free() gives back; None once it has
        self.passed = None  # operands of the last call that passed its checks
        self.replays = None  # of those operators that have Replays
        self.calls_begun, self.check_calls = 0, os.environ.get("TRITON_DIST_CHECK_CALLS", "0") not in ("", "0")

    def tensor(self, shape, dtype):
        """A symmetric tensor. `shape` and `dtype` may differ between teams: all ranks allocate what the largest needs."""
        numel = torch.Size(shape).numel()
        said = self._largest(f"{list(shape)} {dtype}", numel * dtype.itemsize)
        if said is None:
            return self._keep(shmem.aclshmem_create_tensor, shape, dtype)
        raw = self._keep(shmem.aclshmem_create_tensor, (-(-said // 8) * 8,), torch.int8)
        return raw[: numel * dtype.itemsize].view(dtype).view(shape)

    def signals(self, n):
        """`n` zeroed signals, or as many as the largest team needs."""
        return self._keep(shmem.create_signals, self._largest(f"{n} signals", n) or n)

    def local(self, *shape):
        """A zeroed int32 tensor on this rank's device."""
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _largest(self, what, n):
        """The largest n of all ranks of the heap; None when all gave the same `what`."""
        said = shmem.gather(f"create_{self.name}_context", (what, n))
        return None if all(one[0] == what for one in said) else max(one[1] for one in said)

    def _keep(self, make, *args):
        try:
            self.symmetric.append(make(*args))
        except ShmemError as error:  # on all ranks alike, for they asked for the same
            self.free()
            text = f"{error}\n  (create_{self.name}_context has given back what it had allocated)"
            raise type(error)(text, error.code) from error
        return self.symmetric[-1]

    def free(self):
        """Gives the symmetric memory back. Collective over all ranks of the heap; no call may be under way."""
        need(self.name, self.symmetric is not None, "the context was freed")
        symmetric, self.symmetric, self.passed, self.replays = self.symmetric, None, None, None
        for tensor in symmetric:
            shmem.aclshmem_free_tensor(tensor)

    def agree(self, call, text, *operands):
        """Ends a call's checks: compares it with the other ranks', where TRITON_DIST_CHECK_CALLS asks for it, else remembers
        the operands, see `passed_before`."""
        self.passed = None
        if not self.check_calls:
            self.passed = operands_of(*operands) if operands else None
        else:
            shmem.check_alike(f"{call}({text}), call {self.calls_begun} of this context", self.team)


def operands_of(*tensors):
    """All that a call's checks look at in its tensors; None when something is no tensor."""
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return None
    return [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in tensors]


def passed_before(context, operands):
    """Whether the context's last call had the same operands, so that its checks need not be made again: they take the host
    longer than a short message takes the device."""
    return operands is not None and operands == getattr(context, "passed", None)


def begin(call, kind, context, **tensors):
    """Begins a call's checks: ValueError, naming rank and values, unless `context` is a `kind` that was not freed, and the
    operands are tensors whose memory holds their values. `out` and `received` may be None: to be made."""
    fits = isinstance(context, kind)
    need(call, fits, f"context is a {type(context).__name__}, it must be a {kind.__name__}")
    context.calls_begun += 1
    need(call, context.symmetric is not None, "the context was freed")
    for name, tensor in tensors.items():
        if tensor is None and name in ("out", "received"):
            continue
        need(call, isinstance(tensor, torch.Tensor), f"{name} is a {type(tensor).__name__}, it must be a tensor")
        need(call, tensor.layout == torch.strided, f"{name} is {tensor.layout}, it must be dense: pass {name}.to_dense()")
        lazy = tensor.is_neg() or tensor.is_conj()
        need(call, not lazy, f"{name} is a lazy negative or conjugate view: pass {name}.resolve_neg().resolve_conj()")
