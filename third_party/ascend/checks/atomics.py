"""An atomic happens once, on the memory of whichever device it is."""

from collections import Counter

from .paths import most
from .result import verdict

_HARDWARE = ("add", "max", "min")


def check(ttir, parts):
    """Atomics of the TTIR are atomic stores of the hardware in HIVM, as many on a path as there were. In the vector half of
    a mixed kernel, of which two cores run a copy each, an add is made by one of them or by each on its own part. None is
    made under a lock, which holds off the programs of this launch alone, unless its old value is used at a scope of this
    device."""
    atomics = [w for w in ttir.writes if w.op.name.startswith("tt.atomic")]
    wanted = Counter(_on_a_path(ttir))
    found, wrong, locks = Counter(), [], []
    for atomic in atomics:
        used = any(result in ttir.flow.used for result in atomic.op.results)
        if atomic.kind not in _HARDWARE:
            wrong.append(f"{atomic} of the TTIR has no atomic store of the hardware")
        elif used and ("sys" in atomic.op.words or atomic.translated):
            wrong.append(f"the old value of {atomic} of the TTIR is used: it is read apart, under a lock of this launch")
    allowed = sum(any(result in ttir.flow.used for result in a.op.results) for a in atomics)
    for part in parts:
        found.update(_on_a_path(part))
        locks += [access.op for access in part.accesses if access.kind == "lock"]
        if part.mixed and part.part == "AIV":
            wrong += [
                f"{write} is made by both vector cores of a block, so it counts twice"
                for write in part.writes
                if write.kind == "add" and not _by_one_core(part, write)
            ]
    if len(locks) > allowed:
        where = ", ".join(map(str, locks))
        wrong.append(f"{len(locks) - allowed} atomics are made under a lock that holds off this launch alone: {where}")
    for key in wanted:
        if found[key] != wanted[key]:
            wrong.append(f"{key[0]} to argument {sorted(key[1])}: {found[key]} times on a path, {wanted[key]} in the TTIR")
    return verdict("atomics", wrong, atomics, f"{len(atomics)} atomics, each made once")


def _on_a_path(kernel):
    """How many atomics of a key a path makes: {key: count}."""
    atomics = {w.op: w.key for w in kernel.writes if w.kind not in ("store", "unknown")}
    return most(kernel.function, lambda op: [atomics[op]] if op in atomics else [])


def _by_one_core(part, write):
    """Whether which vector core it is decides on the write or on its address."""
    op = write.op
    values = list(part.flow.backward([write.address]))
    while op.parent is not None:
        if op.parent.name == "scf.if" and op.inside(op.parent):
            values += part.flow.backward(op.parent.operands)
        op = op.parent
    return any(value.op is not None and value.op.name == "hivm.hir.get_sub_block_idx" for value in values)
