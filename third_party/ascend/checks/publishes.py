"""Data are stored before the signal that announces them."""

from .barriers import is_full_barrier
from .paths import follow
from .result import verdict
from .signals import signals


def check(ttir, parts):
    """On every path to a signal a barrier of all pipelines (PIPE_ALL) follows every store before it that is no signal
    itself: the pipelines of a core run apart, and the order of an atomic (`sem`) makes no fence."""
    keys = {signal.key for signal in signals(ttir)}
    wrong, count = [], 0
    for part in parts:
        found = [w for w in part.writes if w.key in keys and (w.kind != "store" or w.elements == 1)]
        count += len(found)
        wrong += unordered(part, found)
    if keys and not count:
        wrong.append(f"HIVM has none of the {len(signals(ttir))} signals, such as {signals(ttir)[0]} of the TTIR")
    return verdict("publishes", wrong, keys, f"{count} signals, each after a barrier after every store")


def unordered(part, found):
    """A sentence for each signal that a store may overtake."""
    writes = {w.op: w for w in part.writes}
    signal_ops = {w.op: w for w in found}
    wrong = {}

    def step(op, unfenced):
        if is_full_barrier(op):
            return frozenset()
        if op in signal_ops and unfenced:
            stores = ", ".join(str(writes[store]) for store in sorted(unfenced, key=lambda o: o.line))
            wrong[op] = f"no barrier between {stores} and the signal {signal_ops[op]}"
        return unfenced | {op} if op in writes and op not in signal_ops else unfenced

    follow(part.function, step)
    return list(wrong.values())
