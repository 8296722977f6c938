"""Accesses to global memory, in TTIR and in HIVM, in the same terms.

Arguments are numbered as the kernel's author wrote them (without constexprs): the arguments that the compiler adds to
HIVM functions, such as its workspace, do not count.
"""

import re
from dataclasses import dataclass, field

from .dataflow import Flow, constant, is_global, is_memref, root, sources
from .mlir import Op

HEADER_WORDS = 8  # of the context table: magic, rank, ranks, heap size, spare; then the distances to the peers

# Calls of the compiler's own library, by the beginning of their name.
_CALLS = {
    "load_gm_to_": "load", "nd2nz": "load", "load_scalar_from_gm": "load",
    "store_ubuf_to_gm": "store", "fixpipe": "store",
    "sync_block_lock": "lock", "sync_block_unlock": "unlock",
}  # fmt: skip
_STORE_KINDS = {0: "store", 1: "add", 2: "max", 3: "min"}  # the last argument of store_ubuf_to_gm_*
_TTIR_ATOMICS = {"exch": "xchg", "fadd": "add", "umax": "max", "umin": "min"}


@dataclass(eq=False)
class Access:
    """A load, store or atomic of global memory.

    kind: "load", "store", "add", "max", "min", "xchg", "cas", "and", ...; "unknown" for an operation that is not known.
    arguments: numbers of the kernel's arguments from which the address is computed by pointer arithmetic.
    peers: what chooses the peer whose distance in the context table moves the address, a frozenset for each word of the
        table that does; empty for a local address. Elements are ("argument", n), ("word", argument, n) for a word of the
        table's header, and ("load", n) for other memory.
    divisors: constants by which the distances are divided.
    elements: number, None where not static.
    """

    op: Op
    kind: str
    arguments: frozenset
    peers: frozenset = frozenset()
    divisors: frozenset = frozenset()
    element: str = ""
    elements: int | None = None
    cached: bool = False  # by the scalar unit, through its cache
    address: object = None
    flow: Flow | None = field(default=None, repr=False)

    @property
    def translated(self):
        return bool(self.peers)

    @property
    def key(self):
        """What an access of TTIR and the one that it became in HIVM have in common."""
        return self.kind, self.arguments, self.peers

    @property
    def where(self):
        arguments = ", ".join(f"argument {n}" for n in sorted(self.arguments)) or "no argument"
        whose = " at a peer" if self.translated else ""
        return f"{self.kind} {'of' if self.kind == 'load' else 'to'} {arguments}{whose}"

    def __str__(self):
        return f"{self.op} ({self.where})"


class Kernel:
    """A function of TTIR or HIVM and its accesses, in the order of the text."""

    def __init__(self, module, function, parameters=None, tables=None):
        """parameters: how many arguments the author wrote; the compiler adds the size of the grid behind them.
        tables: numbers of the arguments that are context tables; None: they are recognised, in TTIR."""
        self.module, self.function = module, function
        self.flow = Flow(function)
        block = function.regions[0].blocks[0]
        own = [value for value in block.args if "hacc.arg_type" not in value.attributes]
        self.numbers = {value: n for n, value in enumerate(own[:parameters])}
        self.mixed = "hivm.part_of_mix" in function.attributes
        core = function.attributes.get("hivm.func_core_type", "")
        self.part = next((part for part in ("AIC", "AIV") if part in core), "")
        self.accesses = [access for op in function.walk() for access in self._of(op)]
        self.by_op = {}
        for access in self.accesses:
            self.by_op.setdefault(access.op, []).append(access)
        self.tables = self._recognised_tables() if tables is None else tables
        for access in self.accesses:
            self._find_peers(access)

    @property
    def writes(self):
        return [a for a in self.accesses if a.kind not in ("load", "lock", "unlock") and a.arguments]

    def _of(self, op):
        if op.name == "tt.load":
            return [self._ttir(op, "load")]
        if op.name == "tt.store":
            return [self._ttir(op, "store")]
        if op.name == "tt.atomic_rmw":
            return [self._ttir(op, _TTIR_ATOMICS.get(op.words[0], op.words[0]))]
        if op.name == "tt.atomic_cas":
            return [self._ttir(op, "cas")]
        if op.name in ("memref.load", "memref.store"):
            at = 0 if op.name == "memref.load" else 1
            if is_global(op.operands[at].type):
                return [self._hivm(op, op.name[7:], at, cached=True)]
            return []
        if op.name == "func.call" or op.name.startswith("hivm.hir."):
            return self._of_call(op)
        return []

    def _of_call(self, op):
        if op.name != "func.call" and op.name.split(".")[2] in ("pointer_cast",):
            return []
        at = [i for i, value in enumerate(op.operands) if is_memref(value.type) and is_global(value.type)]
        if not at:
            return []
        kind = next((kind for name, kind in _CALLS.items() if op.symbol.startswith(name)), "unknown")
        if op.symbol.startswith("store_ubuf_to_gm"):
            kind = _STORE_KINDS.get(constant(op.operands[-1]), "unknown")
        return [self._hivm(op, kind, i) for i in at]

    # -- addresses

    def _ttir(self, op, kind):
        pointer = op.operands[0]
        access = Access(op, kind, frozenset(), address=pointer, flow=self.flow)
        access.element, access.elements = _pointee(pointer.type)
        access.arguments = self._arguments(pointer)
        return access

    def _hivm(self, op, kind, at, cached=False):
        memory = op.operands[at]
        access = Access(op, kind, frozenset(), cached=cached, address=memory, flow=self.flow)
        whole = _before_casts(memory).type
        shape = re.match(r"memref<((?:[?\d]+x)*)(\w+)", whole)
        sizes = shape.group(1).split("x")[:-1] if shape else ["?"]
        access.element = shape.group(2) if shape else ""
        if "?" not in sizes:
            access.elements = 1
            for size in sizes:
                access.elements *= int(size)
        access.arguments = self._arguments(memory)
        return access

    def _arguments(self, value):
        return frozenset(self.numbers[base] for base in self._bases([value]) if base in self.numbers)

    def _find_peers(self, access):
        ops = set()
        values = self.flow.backward([access.address], ops=ops)
        words = [value for value in values if self._is_distance(value)]
        access.peers = frozenset(self._chooser(word) for word in words)
        access.divisors = frozenset(d for word in words for d in self._divisors(word, ops))

    def _bases(self, values):
        """Arguments at the far end of pointers: through views, pointer additions and integers made of pointers."""
        out, seen, todo = [], set(), list(values)
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            op = value.op
            if is_memref(value.type):
                for base in root(value):
                    if base is not value:
                        todo.append(base)
                    elif base.op is None:
                        out.append(base)
                    elif base.op.name == "hivm.hir.pointer_cast":
                        integers = self.flow.backward(base.op.operands[:1])
                        todo += [v for v in integers if _made_by(v, "memref.extract_aligned_pointer_as_index")]
            elif _is_pointer(value):
                if op is None and value in self.numbers:
                    out.append(value)
                elif op is not None and op.name == "tt.int_to_ptr":
                    todo += [v for v in self.flow.backward(op.operands) if _made_by(v, "tt.ptr_to_int")]
                else:
                    todo += [v for v in sources(value) if _is_pointer(v)]
            elif op is not None and op.name in ("tt.ptr_to_int", "memref.extract_aligned_pointer_as_index"):
                todo += op.operands
        return out

    def _word(self, value):
        """(argument, index) where the value is loaded from a pointer to int64; the index is None where not constant."""
        op = value.op
        if op is None or op.name not in ("tt.load", "memref.load"):
            return None
        if op not in self.by_op or self.by_op[op][0].element != "i64":
            return None
        arguments = sorted(self.by_op[op][0].arguments)
        offset = _ttir_offset if op.name == "tt.load" else hivm_offset
        return (arguments[0], offset(op.operands[0])) if arguments else None

    def _is_distance(self, value):
        """Whether the value is a word of a context table that says how far a peer is."""
        word = self._word(value)
        return bool(word) and word[0] in self.tables and (word[1] is None or word[1] >= HEADER_WORDS)

    def _recognised_tables(self):
        """Arguments of which a word beyond the header is loaded, or any word to compute an address as an integer."""
        casts = [op.operands[0] for op in self.function.walk() if op.name == "tt.int_to_ptr"]
        loads = [a.op.results[0] for a in self.accesses if a.kind == "load"]
        words = [v for v in loads if self._word(v) and _largest_step(v.op.operands[0]) >= HEADER_WORDS]
        words += [v for v in self.flow.backward(casts) if self._word(v)]
        return {self._word(v)[0] for v in words}

    def _chooser(self, word):
        """What the index of a word of a table depends on: arguments, words of the header, other memory."""
        ops, out = set(), set()
        for value in self.flow.backward(word.op.operands, ops=ops):
            if value in self.numbers and not is_memref(value.type) and not _is_pointer(value):
                out.add(("argument", self.numbers[value]))
        for op in ops - {word.op}:
            for access in self.by_op.get(op, ()):
                if access.kind == "load":
                    header = self._word(op.results[0]) if op.results else None
                    if header and header[0] in self.tables:
                        out.add(("word", *header))
                    else:
                        out |= {("load", n) for n in access.arguments}
        return frozenset(out)

    def _divisors(self, word, ops):
        """Constants by which a word is divided: by itself, from a buffer that it was put in, or in a vector."""
        out = set()
        for op in ops:
            if op.name in ("arith.divsi", "arith.floordivsi") and constant(op.operands[1]) is not None:
                value = op.operands[0]
                loaded = value.op is not None and value.op.name == "memref.load" and value.op not in self.by_op
                if value is word or (loaded and word in self.flow.backward([value])):
                    out.add(constant(op.operands[1]))
            elif op.name == "func.call" and op.symbol.startswith("vdiv"):
                out |= {constant(v) for v in op.operands if not is_memref(v.type)} - {None}
        return out


def _is_pointer(value):
    """Of TTIR: a pointer, a block of pointers, a block pointer."""
    if value.op is not None and value.op.name in ("tt.make_tensor_ptr", "tt.advance"):
        return True
    return "!tt.ptr" in value.type and (value.op is None or value.op.name != "tt.ptr_to_int")


def _made_by(value, name):
    return value.op is not None and value.op.name == name


def _before_casts(value):
    while value.op is not None and value.op.name == "memref.cast":
        value = value.op.operands[0]
    return value


def _pointee(type_text):
    """(element, number of elements) of the type of a pointer or a block of pointers."""
    match = re.search(r"((?:\d+x)*)!tt\.ptr<(?:tensor<)?([\w]+)", type_text)
    if not match:
        return "", None
    elements = 1
    for size in match.group(1).split("x")[:-1]:
        elements *= int(size)
    return match.group(2), elements


def _ttir_offset(pointer):
    """The constant number of elements by which a chain of tt.addptr moves its base, else None."""
    total = 0
    while pointer.op is not None:
        op = pointer.op
        if op.name == "tt.addptr":
            step = constant(op.operands[1])
            if step is None:
                return None
            total += step
        elif op.name not in ("tt.bitcast", "tt.splat"):
            return None
        pointer = op.operands[0]
    return total


def _largest_step(pointer):
    """The largest constant in a chain of tt.addptr."""
    steps = [0]
    shaping = ("tt.splat", "tt.broadcast", "tt.bitcast", "tt.expand_dims")
    while pointer.op is not None and pointer.op.name in ("tt.addptr", *shaping):
        if pointer.op.name == "tt.addptr":
            steps.append(constant(pointer.op.operands[1]) or 0)
        pointer = pointer.op.operands[0]
    return max(steps)


def hivm_offset(memory):
    """The constant offset of a chain of views, else None."""
    while memory.op is not None:
        op = memory.op
        if op.name == "memref.reinterpret_cast":
            words = op.words
            at = words.index("offset") + 3  # offset : [ x
            return int(words[at]) if words[at].isdigit() else None
        if op.name != "memref.cast":
            return None
        memory = op.operands[0]
    return 0
