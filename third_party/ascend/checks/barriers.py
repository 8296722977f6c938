"""The barriers of the source are there."""

from collections import Counter

from .paths import depth
from .result import verdict


def check(ttir, parts):
    """Each barrier of the TTIR is a barrier of all pipelines (PIPE_ALL) in HIVM, in as many loops; in a mixed kernel in both
    halves. Two with no access between them may be one. They order a store before its signal and a load after its wait,
    and are all that dl.fence and dl.quiet do."""
    barriers = [op for op in ttir.function.walk() if op.name == "gpu.barrier" and _matters(ttir, op)]
    wanted = Counter(map(depth, barriers))
    wrong = []
    for part in parts:
        found = Counter(depth(op) for op in part.function.walk() if is_full_barrier(op))
        found[0] -= 1  # the compiler ends a function with one
        for loops, count in (wanted - found).items():
            wrong.append(
                f"{count} of {wanted[loops]} barriers of the TTIR in {loops} loops are not in {part.function}, such as "
                f"{next(op for op in barriers if depth(op) == loops)}"
            )
    return verdict("barriers", wrong, wanted, f"{sum(wanted.values())} barriers, all there")


def _matters(ttir, barrier):
    """Whether something is between it and the next barrier, or the end of the kernel, which is one."""
    ops = barrier.block.ops
    for op in ops[ops.index(barrier) + 1 :]:
        if op.name in ("gpu.barrier", "tt.return"):
            return False
        if op in ttir.by_op or op.name.startswith("scf.") or op.name == "tt.custom":
            return True
    return True


def is_full_barrier(op):
    return op.name == "hivm.hir.pipe_barrier" and "PIPE_ALL" in op.words
