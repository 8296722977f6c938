"""What may hold at a place of a function on some path to it, through structured control flow."""


LOOPS = ("scf.for", "scf.while")


def follow(function, step, state=frozenset(), turning=False, again=None):
    """Walks every path through a function with a set of facts.

    step(op, facts) returns the facts after an operation; it is called for all but those of control flow, more than once
    for what lies in loops. Where paths meet the facts are united: a fact says what may be, so what must be is the absence
    of its contrary. Returns the facts at the end.
    turning: leave out the paths on which an scf.for makes no turn.
    again(loop, facts): the facts with which a further turn begins, of those at the end of a turn; default: the same.
    """
    return _Walk(step, turning, again or (lambda loop, facts: facts)).region(function.regions[0], state)


class _Walk:
    def __init__(self, step, turning, again):
        self.step, self.turning, self.again = step, turning, again

    def region(self, region, state):
        for block in region.blocks:
            for op in block.ops:
                state = self.op(op, state)
        return state

    def op(self, op, state):
        if op.name == "scf.if":
            ends = [self.region(region, state) for region in op.regions]
            return frozenset().union(*ends, *([state] if len(ends) == 1 else []))
        if op.name == "scf.for":
            end = self.turns(op, state, lambda head: self.region(op.regions[0], head))
            return end if self.turning else state | end
        if op.name == "scf.while":
            end = self.turns(op, state, lambda head: self.region(op.regions[1], self.region(op.regions[0], head)))
            return self.region(op.regions[0], state | end)
        return self.step(op, state)

    def turns(self, loop, state, turn):
        """The facts at the end of any turn."""
        while True:
            end = turn(state)
            head = state | self.again(loop, end)
            if head == state:
                return end
            state = head


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


def enclosing(op):
    """The loops around an operation, the innermost first."""
    while op.parent is not None:
        op = op.parent
        if op.name in LOOPS:
            yield op


def depth(op):
    """How many loops enclose an operation."""
    return len(list(enclosing(op)))


def early(function, gates, turning=False):
    """Operations that a path reaches without an operation of `gates` since the start, or since the beginning of a further
    turn of a loop that has one. turning: see `follow`."""
    gated = {loop for gate in gates for loop in enclosing(gate)}
    facts, out = frozenset({"early"}), set()

    def step(op, facts):
        if op in gates:
            return frozenset()
        if facts:
            out.add(op)
        return facts

    follow(function, step, facts, turning, lambda loop, end: facts if loop in gated else end)
    return out
