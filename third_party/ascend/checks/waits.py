"""A wait of the source is a loop that loads its signal afresh from global memory in every turn."""

from collections import Counter

from .dataflow import terminator
from .paths import early, enclosing, follow
from .result import verdict
from .signals import spins


def check(ttir, parts):
    """Every waiting loop of the TTIR is there in HIVM (in the vector half of a mixed kernel; in the cube half too, handed
    over from the vector half, where tiles that are multiplied are loaded after it), and polls by DMA, without a lock:
    the scalar unit reads through a cache that nothing refreshes. What is loaded after the wait is still loaded after it."""
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
    wrong += [sentence for part in parts for sentence in _hoisted(ttir, part)]
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
        for loop in enclosing(op):
            if held:
                out[loop] = next(iter(held))
        return held

    follow(part.function, step)
    return out


def _before_dot(ttir):
    """Waiting loops after which a tile that is multiplied may be loaded."""
    dots = [op for op in ttir.function.walk() if op.name == "tt.dot"]
    feeding = set()
    for dot in dots:
        ttir.flow.backward(dot.operands[:2], ops=feeding)
    loads = [op for op in feeding if op.name == "tt.load" and "tensor" in op.result_type]
    order = {op: n for n, op in enumerate(ttir.function.walk())}

    def after(loop, load):
        return order[load] > order[loop] or any(load.inside(outer) for outer in enclosing(loop))

    return [spin for spin in spins(ttir) if any(after(spin.loop, load) and not load.inside(spin.loop) for load in loads)]


def _handed_over(part):
    """Loops of a cube half that turn on a value that the vector half stored in the workspace."""
    return [
        spin
        for spin in spins(part)
        if any(not load.arguments for load in spin.loads)
        and any(op.name == "hivm.hir.sync_block_wait" for op in spin.loop.walk())
    ]


def _hoisted(ttir, part):
    """Loads that the TTIR makes after a wait of its turn of the loop, and HIVM before it."""
    late = _late(ttir, spins(ttir))
    turns = _handed_over(part) if part.part == "AIC" else spins(part)
    before = early(part.function, _gates(turns), turning=True)
    polls = {load for spin in turns for load in spin.loads}
    return [
        f"{load} is made before the wait that the TTIR makes it after"
        for load in part.accesses
        if load.key in late and load.op in before and load not in polls
    ]


def _gates(turns):
    return {terminator(spin.loop.regions[0]) for spin in turns}


def _late(ttir, turns):
    """Keys of loads that every path of the TTIR makes after a wait. The context table does not change: it may be read at
    any time."""
    if not turns:
        return set()
    before = early(ttir.function, _gates(turns), turning=True)
    loads = [a for a in ttir.accesses if a.kind == "load" and not a.arguments <= ttir.tables]
    return {a.key for a in loads if a.op not in before} - {a.key for a in loads if a.op in before}
