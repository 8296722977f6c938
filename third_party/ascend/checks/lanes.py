"""A store writes its own lanes and no others."""

from .dataflow import is_memref
from .result import verdict


def check(ttir, parts):
    """Memory that the TTIR only stores to is not loaded in HIVM. The compiler stores under a mask that is no range by loading
    the place, selecting, and storing the whole: that writes back the lanes that the mask excludes, which may belong to
    another program or rank, or to nobody."""
    stores = [w for w in ttir.writes if w.kind == "store"]
    read = {a.key[1:] for a in ttir.accesses if a.kind != "store"}
    updated = {w.key[1:] for w in stores if _loads_its_place(ttir, w)}
    updated |= {w.key[1:] for w in ttir.writes if w.kind != "store"}  # what an atomic becomes is the matter of atomics.py
    wrong = {}
    for part in parts:
        for write in part.writes:
            if write.kind != "store":
                continue
            place = write.key[1:]
            load = _loads_its_place(part, write)
            if load and place not in updated:
                wrong[write] = f"{write} writes back what {load} has read from the same place, lanes that are not its own"
            elif place not in read:
                wrong |= {
                    a: f"{a} reads memory that the TTIR only stores to"
                    for a in part.accesses
                    if a.kind == "load" and a.key[1:] == place and not load
                }
    return verdict("lanes", list(wrong.values()), stores, f"{len(stores)} stores, none of which reads its own place")


def _loads_its_place(kernel, write):
    """A load from the very place of a store whose value the store depends on, or None."""
    place, ops = _place(write.address), set()
    data = [v for v in write.op.operands if v is not write.address and (is_memref(v.type) or v in write.op.operands[1:2])]
    kernel.flow.backward(data, ops=ops)
    return next((a for a in kernel.accesses if a.kind == "load" and a.op in ops and _place(a.address) == place), None)


def _place(value):
    """What names the same place when it is equal: the views of an address, operation by operation."""
    while value.op is not None and value.op.name in ("memref.cast", "memref.subview"):
        value = value.op.operands[0]
    if value.op is None or not value.op.operands:
        return value
    return value.op.name, tuple(value.op.operands)
