"""Meaning checks: does the final HIVM of a kernel still do what its TTIR says?

    from third_party.ascend.checks import run_checks
    for check in run_checks(lowered): print(check.name, check.passed, check.reason)

The checks read the structure of the two texts (tokens.py, mlir.py: operations, regions, operands; dataflow.py: what a value
is computed from; paths.py: what may hold on a path), so a comment, a name or an unused line decides nothing. They know what
the compiler's library calls do to global memory (access.py), and fail on one that they do not know.

| check | claim |
|---|---|
| waits | each wait is a loop that loads its signal afresh; none has vanished; none polls through a cache or under a lock |
| publishes | on every path to a signal (signals.py says which writes are taken for one) a full barrier follows every store |
| barriers | each barrier of the source is there, in as many loops |
| remote | what went to a peer still goes through the context table, to the same peer, by the same element size |
| dot signals | in a kernel split in halves, signals come after the cube half's tiles, by a flag that nothing else uses |
| complete | no access of global memory has vanished, what is stored was computed, no offset of an address is lost |
| lanes | a store does not write back lanes that its mask excludes |
| atomics | each happens once, by the hardware |

They say nothing of what hivmc and the hardware make of the HIVM, nor of what the TTIR itself lacks. Standard library only.
"""

import functools

from . import atomics, barriers, complete, dots, lanes, publishes, remote, waits
from .access import Kernel
from .mlir import ParseError, parse
from .result import Check

CHECKS = (waits, publishes, barriers, remote, dots, complete, lanes, atomics)
NAMES = ("waits", "publishes", "barriers", "remote", "dot signals", "complete", "lanes", "atomics")

__all__ = ["CHECKS", "NAMES", "Check", "run_checks"]


def run_checks(lowered):
    """The list of Checks of a kernel that was lowered to HIVM.

    Args:
        lowered: has `ttir` and `hivm`, texts, as lowering.py's Lowered.

    Each Check has `name`, `passed` (None: the kernel has nothing that it is about) and `reason`. An empty list when HIVM
    was not reached; one failed Check "parse" when a text cannot be read.
    """
    if not lowered.hivm:
        return []
    try:
        ttir, parts = kernels(lowered.ttir, lowered.hivm)
    except ParseError as error:
        return [Check("parse", False, str(error))]
    return [module.check(ttir, parts) for module in CHECKS]


def kernels(ttir, hivm):
    """(the Kernel of a TTIR text, those of the device functions of its HIVM: one, or a cube and a vector half)."""
    source = _source(ttir)
    final = parse(hivm)
    entries = [f for f in final.functions() if "DEVICE" in f.attributes.get("hacc.function_kind", "")]
    return source, [Kernel(final, f, len(source.numbers), source.tables) for f in entries]


@functools.lru_cache(maxsize=4)
def _source(ttir):
    module = parse(ttir)
    (function,) = module.functions()
    return Kernel(module, function)
