"""A store writes its own lanes and no others."""

from collections import Counter

from .dataflow import constant, is_memref, root
from .result import verdict


def check(ttir, parts):
    """Memory that the TTIR only stores to is not loaded in HIVM. The compiler stores under a mask that is no range by loading
    the place, selecting, and storing the whole: that writes back the lanes that the mask excludes, which may belong to
    another program or rank, or to nobody. Where the TTIR itself loads what it then stores under a mask, no more stores
    select and write the whole tile than the TTIR has without a mask."""
    stores = [w for w in ttir.writes if w.kind == "store"]
    read = {a.key[1:] for a in ttir.accesses if a.kind != "store"}
    updated = {w.key[1:] for w in stores if _loads_its_place(ttir, w)}
    updated |= {w.key[1:] for w in ttir.writes if w.kind != "store"}  # what an atomic becomes is the matter of atomics.py
    wrong = _unmasked(ttir, parts, updated, stores)
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
    return verdict("lanes", list(wrong.values()), stores, f"{len(stores)} stores, none of which writes back lanes of others")


def _masked(access):
    """Whether a store of TTIR has a mask that excludes something."""
    return len(access.op.operands) > 2 and constant(access.op.operands[2]) != 1


def _unmasked(ttir, parts, updated, stores):
    """Stores that select between new and old lanes and write the whole tile, where the TTIR updates under a mask. A range is
    stored in part, if also whole on the path where it holds all lanes."""
    free = Counter((w.key, w.elements) for w in stores if not _masked(w))
    masked = {(w.key, w.elements): w for w in stores if w.key[1:] in updated and _masked(w)}
    in_part = {w.key for part in parts for w in part.writes if w.elements is None}
    whole = {}
    for part in parts:
        for write in part.writes:
            key = write.key, write.elements
            if key in masked and write.key not in in_part and _keeps_old_lanes(part, write):
                whole.setdefault(key, []).append(write)
    return {
        write: f"{write} writes back all lanes of a tile that {masked[key]} of the TTIR stores under a mask"
        for key, writes in whole.items()
        for write in writes[free[key] :]
    }


def _keeps_old_lanes(part, write):
    """Whether what is stored is a selection, vsel(condition, new, old, ...), with what its own place held."""
    load = _loads_its_place(part, write)
    if not load or len(load.op.operands) < 2 or not is_memref(load.op.operands[1].type):
        return False
    old = set(root(load.op.operands[1]))
    data = [v for v in write.op.operands if v is not write.address and is_memref(v.type)]
    selections = [op for value in data for op in part.flow.writers(value) if op.symbol.startswith("vsel")]
    return any(old & set(root(op.operands[2])) for op in selections if is_memref(op.operands[2].type))


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
