"""What may hold at a place of a function on some path to it, through structured control flow."""


def follow(function, step, state=frozenset()):
    """Walks every path through a function with a set of facts.

    step(op, facts) returns the facts after an operation; it is called for all but those of control flow, more than once
    for what lies in loops. Where paths meet the facts are united: a fact says what may be, so what must be is the absence
    of its contrary. Returns the facts at the end.
    """
    return _region(function.regions[0], state, step)


def _region(region, state, step):
    for block in region.blocks:
        for op in block.ops:
            state = _op(op, state, step)
    return state


def _op(op, state, step):
    if op.name == "scf.if":
        ends = [_region(region, state, step) for region in op.regions]
        return frozenset().union(*ends, *([state] if len(ends) == 1 else []))
    if op.name == "scf.for":
        return _loop(lambda before: _region(op.regions[0], before, step), state)
    if op.name == "scf.while":
        turn = lambda before: _region(op.regions[1], _region(op.regions[0], before, step), step)  # noqa: E731
        return _region(op.regions[0], _loop(turn, state), step)
    return step(op, state)


def _loop(turn, state):
    """The facts at the head of a loop, when those at the end of a turn are added until nothing changes."""
    while True:
        after = state | turn(state)
        if after == state:
            return state
        state = after


def most(function, wanted):
    """How often an operation that `wanted` names may occur on one path, a turn of each loop taken: {name: count}.

    wanted(op) returns a list of names.
    """
    return _count(function.regions[0], wanted)


def _count(region, wanted):
    total = {}
    for block in region.blocks:
        for op in block.ops:
            for name in wanted(op):
                total[name] = total.get(name, 0) + 1
            inner = [_count(region, wanted) for region in op.regions]
            for name in {name for counts in inner for name in counts}:
                counts = [c.get(name, 0) for c in inner]
                total[name] = total.get(name, 0) + (max(counts) if op.name == "scf.if" else sum(counts))
    return total


def depth(op):
    """How many loops enclose an operation."""
    n = 0
    while op.parent is not None:
        op = op.parent
        n += op.name in ("scf.for", "scf.while")
    return n
