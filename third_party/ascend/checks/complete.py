"""No access of global memory has vanished."""

from collections import Counter

from .access import hivm_offset
from .result import verdict


def check(ttir, parts):
    """Every load, store and atomic of the TTIR is in HIVM: as many of the same argument, of the same kind, at the same
    peers, as there were; the context table, which does not change, may be read less often. In a mixed kernel, what one
    half reads from the workspace the other half writes there. Also, every operation of HIVM that touches global memory
    is one that these checks know, what is stored was computed (a buffer that nothing filled is not stored), and an address
    that is made an integer has no offset: the operation that does it takes the beginning of the memory, not of the view."""
    accesses = [a for a in ttir.accesses if not (a.kind == "load" and a.arguments <= ttir.tables)]
    wanted, found = Counter(a.key for a in accesses), Counter()
    wrong = _workspace(parts) if len(parts) > 1 else []
    for part in parts:
        found.update(access.key for access in part.accesses)
        for access in part.accesses:
            if access.kind == "unknown":
                wrong.append(f"{access.op} touches global memory in a way that is not known here")
            elif access.kind not in ("load", "lock", "unlock") and access.op.name == "func.call":
                wrong += _undefined(part, access)
        wrong += _offsets_lost(part)
    example = {access.key: access for access in accesses}
    for key, count in (wanted - found).items():
        wrong.append(f"{count} of {wanted[key]} accesses such as {example[key]} of the TTIR are not in HIVM")
    return verdict("complete", wrong, wanted, f"{sum(wanted.values())} loads, stores and atomics, all there")


def _workspace(parts):
    """Loads of a half from the compiler's workspace without as many stores of the other."""
    wrong = []
    for part in parts:
        loads = [a for a in part.accesses if a.kind == "load" and not a.arguments]
        stores = [a for p in parts if p is not part for a in p.accesses if a.kind == "store" and not a.arguments]
        if len(stores) < len(loads):
            wrong.append(f"{part.function} loads from the workspace {len(loads)} times, such as {loads[0]}, the other half "
                         f"stores {len(stores)} times")  # fmt: skip
    return wrong


def _offsets_lost(part):
    """Addresses made integers of a view with an offset."""
    return [
        f"{op} makes an integer of the address of {op.operands[0].op}, and the offset of that view is lost"
        for op in part.function.walk()
        if op.name == "memref.extract_aligned_pointer_as_index" and hivm_offset(op.operands[0]) != 0
    ]


def _undefined(part, access):
    """The data of a store whose buffer no operation fills."""
    source = next((v for v in access.op.operands if v is not access.address and v.type.startswith("memref<")), None)
    if source is None:
        return []
    stores = {a.op for a in part.accesses if a.kind not in ("load", "unknown")}
    if any(op not in stores for op in part.flow.writers(source)):
        return []
    return [f"{access} stores a buffer that nothing has filled"]
