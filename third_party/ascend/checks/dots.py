"""In a kernel that is split in a cube and a vector half, signals are ordered after the tiles."""

import re
from collections import Counter

from .paths import depth, early, follow
from .result import Check, verdict
from .signals import signals

_NAME = "dot signals"


def check(ttir, parts):
    """The halves run apart. A signal that the vector half makes after the cube half stored a tile needs a pair: the cube
    half sets a flag after the store, the vector half waits for it before the signal, on every path, in the same loops as
    in the TTIR; and nothing else uses that flag. Every flag that one half sets the other waits for."""
    cubes = [part for part in parts if part.part == "AIC"]
    vectors = [part for part in parts if part.part == "AIV"]
    if not cubes or not vectors:
        return Check(_NAME, None, "not split in cube and vector")
    wrong = _unpaired(cubes, vectors)
    announced, unordered = _in_source(ttir)
    for signal, store in unordered:
        wrong.append(f"{store} stores a product and nothing orders it before the signal {signal}, in the TTIR")
    if announced:
        for flag, (sets, waits) in _flags_of_source(ttir).items():
            wrong += _pair(flag, sets, cubes, "set", "CUBE", "FIX")
            wrong += _pair(flag, waits, vectors, "wait", "VECTOR", "FIX")
        wrong += [sentence for cube in cubes for sentence in _stores_without_set(cube, _flags_of_source(ttir))]
        wrong += _signals_before_wait(ttir, announced, vectors)
    about = announced or any(_flags(part) for part in cubes + vectors)
    return verdict(_NAME, wrong, about, f"{len(announced)} signals after products, each after the cube half's flag")


# -- the source


def _custom(op):
    """("set" or "wait", flag) of Triton's sync_block_set and _wait, else None."""
    if op.name != "tt.custom":
        return None
    match = re.match(r'"sync_block_(set|wait)"', op.words[0])
    flag = re.search(r",\s*(\d+)", op.attributes.get("str_args", ""))
    return (match.group(1), int(flag.group(1))) if match and flag else None


def _flags_of_source(ttir):
    """Flag -> (depths of the loops of its sets, of its waits)."""
    out = {}
    for op in ttir.function.walk():
        pair = _custom(op)
        if pair:
            out.setdefault(pair[1], ([], []))[pair[0] == "wait"].append(depth(op))
    return out


def _products(ttir):
    """Stores of what a tt.dot computed."""
    out = []
    for write in ttir.writes:
        ops = set()
        ttir.flow.backward(write.op.operands[1:2], ops=ops)
        if any(op.name == "tt.dot" for op in ops):
            out.append(write)
    return {write.op: write for write in out}


def _in_source(ttir):
    """(signals that a stored product may precede, [(signal, store)] where nothing lies between)."""
    products, announced, unordered = _products(ttir), {}, []
    found = {signal.op: signal for signal in signals(ttir)}

    def step(op, facts):
        pair = _custom(op)
        if pair and pair[0] == "set":
            return frozenset(("set", s, pair[1]) if kind == "stored" else (kind, s, f) for kind, s, f in facts)
        if pair:
            return frozenset(("done", s, f) if (kind, f) == ("set", pair[1]) else (kind, s, f) for kind, s, f in facts)
        if op in found:
            for kind, store, _ in facts:
                announced[op] = found[op]
                if kind != "done" and (found[op], store) not in unordered:
                    unordered.append((found[op], store))
        return facts | {("stored", op, None)} if op in products else facts

    follow(ttir.function, step)
    return announced, [(signal, products[store]) for signal, store in unordered]


# -- HIVM


def _flags(part):
    """[(operation, "set" or "wait", core, pipes, flag)] of a half."""
    out = []
    for op in part.function.walk():
        match = re.match(r"hivm\.hir\.sync_block_(set|wait)$", op.name)
        if match:
            names = [word for word in op.words if word.isupper()]
            flag = op.words[op.words.index("flag") + 2] if "flag" in op.words else None
            out.append((op, match.group(1), names[0], tuple(names[1:]), int(flag) if flag and flag.isdigit() else flag))
    return out


def _unpaired(cubes, vectors):
    """Flags that one half sets and the other does not await as often, in as many loops."""
    out = []
    for setters, waiters in ((cubes, vectors), (vectors, cubes)):
        sets = {(flag, depth(op)): op for part in setters for op, word, _, _, flag in _flags(part) if word == "set"}
        waits = {(flag, depth(op)): op for part in waiters for op, word, _, _, flag in _flags(part) if word == "wait"}
        set_often = Counter((flag, depth(op)) for p in setters for op, word, _, _, flag in _flags(p) if word == "set")
        awaited = Counter((flag, depth(op)) for p in waiters for op, word, _, _, flag in _flags(p) if word == "wait")
        out += [f"{sets[key]} sets flag {key[0]}, for which the other half does not wait" for key in set_often - awaited]
        out += [f"{waits[key]} waits for flag {key[0]}, which the other half does not set" for key in awaited - set_often]
    return out


def _pair(flag, depths, halves, word, core, pipe):
    """One side of the pair of a flag: there in the same loops, and alone."""
    wrong, found = [], []
    for part in halves:
        for op, kind, who, pipes, other in _flags(part):
            if other != flag:
                continue
            if (kind, who) == (word, core) and f"PIPE_{pipe}" in pipes[:1]:
                found.append(depth(op))
            else:
                wrong.append(f"{op} uses flag {flag}, which orders the tiles and the signals, for something else")
    if Counter(found) != Counter(depths):
        wrong.append(
            f"sync_block_{word} of flag {flag} is there {len(found)} times, in loops of depth {sorted(found)}; in the TTIR it "
            f"is {len(depths)} times, {sorted(depths)}"
        )
    return wrong


def _stores_without_set(cube, flags):
    stores = {w.op: w for w in cube.writes}
    sets = {op for op, word, _, _, flag in _flags(cube) if word == "set" and flag in flags}

    def step(op, unset):
        if op in sets:
            return frozenset()
        return unset | {op} if op in stores else unset

    return [
        f"no flag is set after {stores[op]} before the cube half ends"
        for op in sorted(follow(cube.function, step), key=lambda op: op.line)
    ]


def _signals_before_wait(ttir, announced, vectors):
    """Signals that every path of the TTIR makes after a wait of its turn of the loop, and HIVM does not."""
    before = early(ttir.function, {op for op in ttir.function.walk() if (_custom(op) or "")[:1] == ("wait",)})
    late = {signal.key for op, signal in announced.items() if op not in before}
    late -= {signal.key for signal in signals(ttir) if signal.op in before}
    wrong = []
    for part in vectors:
        waits = {op for op, word, _, _, flag in _flags(part) if word == "wait" and flag in _flags_of_source(ttir)}
        before = early(part.function, waits)
        wrong += [f"{w} may come before the cube half's flag" for w in part.writes if w.key in late and w.op in before]
    return wrong
