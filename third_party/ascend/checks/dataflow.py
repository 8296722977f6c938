"""What a value is computed from, through structured control flow and through buffers on the chip."""

from functools import cached_property

# Operations whose result is another view of the memory of their first operand.
VIEWS = {
    "memref.cast", "memref.reinterpret_cast", "memref.subview", "memref.collapse_shape", "memref.expand_shape",
    "memref.view", "memref.memory_space_cast", "memref.reshape", "memref.transpose",
}  # fmt: skip

_LOOPS = ("scf.for", "scf.while")


def is_global(type_text):
    """Whether a memref type lies in global memory."""
    return "address_space<gm>" in type_text


def is_memref(type_text):
    return type_text.startswith("memref<")


def terminator(region):
    return region.blocks[-1].ops[-1] if region.blocks and region.blocks[-1].ops else None


def sources(value):
    """Values from which `value` is computed, one step back. Control counts: the condition of an scf.if is among them."""
    if value.op is None:
        return _argument_sources(value)
    op = value.op
    if op.name == "scf.if":
        return [*op.operands, *(terminator(r).operands[value.index] for r in op.regions if terminator(r))]
    if op.name == "scf.for":
        return [op.operands[3 + value.index], terminator(op.regions[0]).operands[value.index]]
    if op.name == "scf.while":
        return [terminator(op.regions[0]).operands[1 + value.index]]
    return list(op.operands)


def _argument_sources(value):
    block = value.block
    op = block.region.op
    if op.name == "scf.for":
        if value.index == 0:
            return op.operands[:3]  # lower bound, upper bound, step
        return [op.operands[2 + value.index], terminator(op.regions[0]).operands[value.index - 1]]
    if op.name == "scf.while":
        if block.region is op.regions[0]:
            return [op.operands[value.index], terminator(op.regions[1]).operands[value.index]]
        return [terminator(op.regions[0]).operands[1 + value.index]]
    return []


def root(value):
    """The values at the far end of the views of memory: function arguments, pointer casts, allocations."""
    out, seen, todo = [], set(), [value]
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        op = value.op
        if op is None:
            before = _argument_sources(value)
            todo += [v for v in before if is_memref(v.type)]
            if not before:
                out.append(value)
        elif op.name in VIEWS:
            todo.append(op.operands[0])
        elif op.name == "arith.select":
            todo += op.operands[1:]
        elif op.name in ("scf.if", *_LOOPS):
            todo += [v for v in sources(value) if is_memref(v.type)]
        else:
            out.append(value)
    return out


def _written(op):
    """Buffers on the chip that an operation may write: of a library call all but the first memory, which it reads, and
    those before a place in global memory, which is what it writes."""
    memory = [value for value in op.operands if is_memref(value.type)]
    if op.name == "func.call" and len(memory) > 1:
        memory = [] if is_global(memory[-1].type) else memory[1:]
    return [value for value in memory if not is_global(value.type)]


class Flow:
    """Data flow of one function."""

    def __init__(self, function):
        self.function = function

    @cached_property
    def _touching(self):
        """Root of a buffer on the chip -> operations that may write it."""
        out = {}
        for op in self.function.walk():
            if op.name in VIEWS or op.name in ("arith.select", "memref.load", "scf.yield", "scf.if", *_LOOPS):
                continue
            for value in _written(op):
                for base in root(value):
                    out.setdefault(base, []).append(op)
        return out

    def backward(self, values, within=None, ops=None):
        """All values that `values` may depend on, themselves included.

        A value loaded from a buffer on the chip depends on all that operations which may write the buffer read.
        within: an operation; nothing outside of it is followed.
        ops: a set that receives the operations that compute them, those that write the buffers included.
        """
        seen, todo = set(), list(values)
        ops = set() if ops is None else ops
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            op = value.op or (value.block.region.op if value.block else None)
            if within is not None and not op.inside(within):
                continue
            seen.add(value)
            todo += sources(value)
            if value.op is not None:
                ops.add(value.op)
            if is_memref(value.type) and not is_global(value.type):
                for base in root(value):
                    for writer in self._touching.get(base, ()):
                        if within is None or writer.inside(within):
                            ops.add(writer)
                            todo += writer.operands
        return seen

    def writers(self, value):
        """Operations that may write the buffer on the chip of which `value` is a view."""
        return [op for base in root(value) for op in self._touching.get(base, ())]

    @cached_property
    def used(self):
        """All values that some operation uses."""
        return {value for op in self.function.walk() for value in op.operands}


def constant(value):
    """The integer that a value is known to be, else None."""
    op = value.op
    if op is None:
        return None
    if op.name == "arith.constant":
        word = op.words[2] if op.words[:2] == ["dense", "<"] and op.words[3] == ">" else op.words[0]
        return {"true": 1, "false": 0}.get(word, int(word) if word.lstrip("-").isdigit() else None)
    if op.name in ("arith.index_cast", "arith.extsi", "arith.extui", "arith.trunci"):
        return constant(op.operands[0])
    if op.name in ("arith.addi", "arith.muli", "arith.subi"):
        left, right = map(constant, op.operands)
        if left is None or right is None:
            return None
        return {"arith.addi": left + right, "arith.muli": left * right, "arith.subi": left - right}[op.name]
    return None
