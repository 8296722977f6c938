"""Reading PTX: instructions in program order, loops, widths. Comments and debug sections are not instructions."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    guard: str  # "%p1", "!%p1", a name, or ""
    opcode: str  # "atom.global.sys.release.exch.b32"
    operands: str

    @property
    def parts(self):
        return self.opcode.split(".")

    def is_(self, *parts):
        """Whether the opcode starts with the first part and has the others."""
        return self.parts[0] == parts[0] and set(parts) <= set(self.parts)


@dataclass(frozen=True)
class Label:
    name: str


def parse(ptx):
    """The instructions and labels of the (only) entry, in order."""
    body = ptx.split("{", 1)[1].split("// -- End function")[0]
    items = []
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        label = re.fullmatch(r"(\$?\w+):", line)
        if label:
            items.append(Label(label[1]))
            continue
        for text in re.split(r";", line):
            found = re.match(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text.strip())
            if found and not text.strip().startswith("."):
                items.append(Instruction(found[1] or "", found[2], found[3]))
    return items


def where(items, *parts):
    """Positions of the instructions whose opcode starts with parts[0] and holds the others."""
    return [i for i, item in enumerate(items) if isinstance(item, Instruction) and item.is_(*parts)]


def loops(items):
    """(first, last) positions of every backward branch's body."""
    at = {item.name: i for i, item in enumerate(items) if isinstance(item, Label)}
    spans = []
    for i, item in enumerate(items):
        if isinstance(item, Instruction) and item.parts[0] == "bra":
            start = at.get(item.operands.strip())
            if start is not None and start < i:
                spans.append((start, i))
    return spans


def in_loop(items, position):
    return any(first < position < last for first, last in loops(items))


def width(instruction):
    """Bytes that one thread moves."""
    vector = next((int(p[1:]) for p in instruction.parts if re.fullmatch(r"v\d", p)), 1)
    return vector * int(re.fullmatch(r"[busf](\d+)", instruction.parts[-1])[1]) // 8


def continues_while(items, loop):
    """The comparison under which the loop turns again, e.g. "lt"."""
    branch = items[loop[1]]
    register = branch.guard.lstrip("!")
    made = [i for i in items[loop[0] : loop[1]] if isinstance(i, Instruction) and i.operands.startswith(register + ",")]
    compare = made[-1].parts[1]
    negated = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
    return negated[compare] if branch.guard.startswith("!") else compare
