"""tune: one operator of this library for one shape."""

import torch
import torch.distributed as dist

import triton_dist
from triton_dist import shmem
from triton_dist.tuning import autotune, identity

from .collectives import AllGather, AllReduce, ReduceScatter
from .experts import MoeDispatch, MoeDispatchTokens
from .gemms import AllGatherGemm, GemmAllReduce, GemmReduceScatter

GEMMS, COLLECTIVES = (AllGatherGemm, GemmReduceScatter, GemmAllReduce), (AllReduce, AllGather, ReduceScatter)
OPERATORS = {one.name: one for one in (*GEMMS, *COLLECTIVES, MoeDispatch, MoeDispatchTokens)}


def tune(operator, shape, dtype, team=0, ways=None, samples=9, candidates=None, cached=True, again=False):
    """Measures an operator's candidates for a shape; contexts made later with method=None (programs=None) take the best one.

    Collective over the team; all other ranks of the heap make the same call with a team of their own (as for
    `create_*_context`). Operands are random; every candidate's first result is checked.

    Args (alike on all ranks of the team):
        operator: a name of `triton_dist.tune.OPERATORS`.
        shape: its sizes, as `OPERATORS[operator].sizes` names them.
        dtype: a torch dtype.
        ways: see `autotune`. None: "graph" and "queued" on nvidia, else "queued".
        candidates: list of dicts of arguments for the operator's create_*_context. None: all of this library's.
        samples, cached, again: see `autotune`.

    Returns: the Tuned of `autotune`, with torch.distributed's time as baseline where it is initialised and `team` is the world.
    Errors: as `autotune`; ValueError for an unknown operator or a shape of other sizes.
    """
    problem = _problem(operator, shape, dtype)
    shmem.check_alike(f"tune({operator!r}, {shape!r}, {dtype})", team, problem)
    one = OPERATORS[operator](tuple(shape), dtype, team)
    baseline = one.baseline if one.compared and team == 0 and dist.is_initialized() else None
    return autotune(
        operator,
        one.candidates() if candidates is None else candidates,
        one.call,
        one.key(),
        make_context=one.make_context,
        check=one.check,
        baseline=baseline,
        team=team,
        ways=ways or (["graph", "queued"] if triton_dist.backend == "nvidia" else ["queued"]),
        samples=samples,
        source=identity.operators_digest(),
        cached=cached,
        again=again,
    )


def _problem(operator, shape, dtype):
    if operator not in OPERATORS:
        return f"the operator is {operator!r}: give one of {', '.join(OPERATORS)}"
    sizes = OPERATORS[operator].sizes
    whole = isinstance(shape, (tuple, list)) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
    if not whole or len(shape) != len(sizes):
        return f"the shape is {shape!r}: give {', '.join(sizes)}"
    return None if isinstance(dtype, torch.dtype) else f"dtype is {dtype!r}: give a torch dtype"
