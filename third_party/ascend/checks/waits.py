"""A wait of the source is a loop that loads its signal afresh from global memory in every turn."""

from collections import Counter

from .paths import follow
from .result import verdict
from .signals import spins


def check(ttir, parts):
    """Every waiting loop of the TTIR is there in HIVM (in the vector half of a mixed kernel; in the cube half too, handed
    over from the vector half, where tiles that are multiplied are loaded after it), and polls by DMA, without a lock:
    the scalar unit reads through a cache that nothing refreshes."""
    wrong, wanted = [], Counter(spin.key for spin in spins(ttir))
    places = {spin.key: spin for spin in spins(ttir)}
    found = Counter()
    for part in parts:
        if part.part == "AIC":
            continue
        locked = _locked(part)
        for spin in spins(part):
            if spin.loop in locked:
                wrong.append(f"{spin.loop} waits while it holds the lock of {locked[spin.loop]}")
            elif all(load.cached for load in spin.loads):
                wrong.append(f"{spin.loop} polls with {spin.polled.op}, a scalar load through a cache")
            else:
                found[spin.key] += 1
    for key, count in (wanted - found).items():
        if not any(spin.key == key for part in parts if part.part != "AIC" for spin in spins(part)):
            wrong.append(
                f"{count} of {wanted[key]} waits for argument {sorted(key)} have vanished: {places[key].loop} of the TTIR "
                "has no loop with a load in HIVM"
            )
        elif not wrong:
            wrong.append(f"{count} of {wanted[key]} waits for argument {sorted(key)} have no polling loop in HIVM")
    cube = [part for part in parts if part.part == "AIC"]
    if cube:
        needed = _before_dot(ttir)
        there = sum(len(_handed_over(part)) for part in cube)
        if there < len(needed):
            wrong.append(
                f"{len(needed)} waits come before tiles that are multiplied, such as {needed[0].loop} of the TTIR, but the "
                f"cube half {cube[0].function} has {there} loops that follow the vector half's"
            )
    return verdict("waits", wrong, wanted, f"{sum(wanted.values())} waits, each a loop with a load from global memory")


def _locked(part):
    """Loops that begin while a lock may be held -> the operation that took it."""
    out = {}

    def step(op, held):
        for access in part.by_op.get(op, ()):
            if access.kind == "lock":
                held = held | {op}
            elif access.kind == "unlock":
                held = frozenset()
        for loop in _loops(op):
            if held:
                out[loop] = next(iter(held))
        return held

    follow(part.function, step)
    return out


def _loops(op):
    while op.parent is not None:
        op = op.parent
        if op.name == "scf.while":
            yield op


def _before_dot(ttir):
    """Waiting loops after which a tile that is multiplied may be loaded."""
    dots = [op for op in ttir.function.walk() if op.name == "tt.dot"]
    feeding = set()
    for dot in dots:
        ttir.flow.backward(dot.operands[:2], ops=feeding)
    loads = [op for op in feeding if op.name == "tt.load" and "tensor" in op.result_type]
    order = {op: n for n, op in enumerate(ttir.function.walk())}

    def after(loop, load):
        return order[load] > order[loop] or any(load.inside(outer) for outer in _outer(loop))

    return [spin for spin in spins(ttir) if any(after(spin.loop, load) and not load.inside(spin.loop) for load in loads)]


def _outer(op):
    while op.parent is not None:
        op = op.parent
        if op.name in ("scf.for", "scf.while"):
            yield op


def _handed_over(part):
    """Loops of a cube half that turn on a value that the vector half stored in the workspace."""
    return [
        spin
        for spin in spins(part)
        if any(not load.arguments for load in spin.loads)
        and any(op.name == "hivm.hir.sync_block_wait" for op in spin.loop.walk())
    ]
