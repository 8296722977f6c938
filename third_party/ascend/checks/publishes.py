"""Data are stored before the signal that announces them."""

from .barriers import is_full_barrier
from .paths import follow
from .result import verdict
from .signals import signals

_NONE_YET = "no barrier yet"


def check(ttir, parts):
    """On every path to a signal a barrier of all pipelines (PIPE_ALL) follows every store before it that is no signal
    itself: the pipelines of a core run apart, and the order of an atomic (`sem`) makes no fence. A signal by a store at a
    peer that no barrier precedes may be data, such as a count: for a signal of another argument it counts as such."""
    announced = signals(ttir)
    lanes = {}
    for signal in announced:
        lanes[signal.key] = max(signal.elements or 1, lanes.get(signal.key, 1))
    wrong, count = [], 0
    for part in parts:
        found = [w for w in part.writes if w.key in lanes and (w.kind != "store" or w.elements in range(1, lanes[w.key] + 1))]
        count += len(found)
        wrong += unordered(part, found)
    if lanes and not count:
        wrong.append(f"HIVM has none of the {len(announced)} signals, such as {announced[0]} of the TTIR")
    return verdict("publishes", wrong, lanes, f"{count} signals, each after a barrier after every store")


def unordered(part, found):
    """A sentence for each signal that a store may overtake."""
    writes = {w.op: w for w in part.writes}
    signal_ops = {w.op: w for w in found}
    wrong = {}

    def step(op, facts):
        """Facts: stores that no barrier follows, and _NONE_YET while none was passed at all."""
        if is_full_barrier(op):
            return frozenset()
        if op not in writes:
            return facts
        signal = signal_ops.get(op)
        if signal is None:
            return facts | {op}
        unfenced = [o for o in facts - {_NONE_YET} if o not in signal_ops or signal_ops[o].arguments != signal.arguments]
        if unfenced:
            stores = ", ".join(str(writes[store]) for store in sorted(unfenced, key=lambda o: o.line))
            wrong[op] = f"no barrier between {stores} and the signal {signal}"
        may_be_data = _NONE_YET in facts and signal.translated and signal.kind == "store"
        return facts | {op} if may_be_data else facts

    follow(part.function, step, frozenset({_NONE_YET}))
    return list(wrong.values())
