"""No store and no atomic of the source has vanished."""

from collections import Counter

from .paths import most
from .result import verdict


def check(ttir, parts):
    """Every store and atomic of the TTIR is in HIVM: as many to the same argument, of the same kind, at the same peers, on
    a path as there were. Also, every operation of HIVM that touches global memory is one that these checks know, and what
    is stored was computed: a buffer that nothing filled is not stored."""
    wanted, found = Counter(writes_on_a_path(ttir)), Counter()
    wrong = []
    for part in parts:
        found.update(writes_on_a_path(part))
        for access in part.accesses:
            if access.kind == "unknown":
                wrong.append(f"{access.op} touches global memory in a way that is not known here")
            elif access.kind not in ("load", "lock", "unlock") and access.op.name == "func.call":
                wrong += _undefined(part, access)
    example = {write.key: write for write in ttir.writes}
    for key, count in (wanted - found).items():
        wrong.append(f"{count} of {wanted[key]} writes such as {example[key]} of the TTIR are not in HIVM")
    return verdict("complete", wrong, wanted, f"{sum(wanted.values())} stores and atomics, all there")


def writes_on_a_path(kernel):
    return most(kernel.function, lambda op: [a.key for a in kernel.by_op.get(op, ()) if a in kernel.writes])


def _undefined(part, access):
    """The data of a store whose buffer no operation fills."""
    source = next((v for v in access.op.operands if v is not access.address and v.type.startswith("memref<")), None)
    if source is None:
        return []
    stores = {a.op for a in part.accesses if a.kind not in ("load", "unknown")}
    if any(op not in stores for op in part.flow.writers(source)):
        return []
    return [f"{access} stores a buffer that nothing has filled"]
