"""A reader of MLIR's textual form, as far as triton-ascend and AscendNPU-IR print it.

`parse(text)` gives operations with their operands, results, regions and attributes, and values with their definitions.
It knows no dialect: what an operation's line says besides values, symbols, attributes, regions and the types at its end is
kept as `words`. Comments are skipped. Forms that it relies on are those of MLIR's printer: a region's `{` ends its line,
an attribute dictionary's does not; a block argument touches its colon (`%x: i32`), an operand does not (`%x : i32`).
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

from .tokens import CLOSE, OPEN, ParseError, closing, split, tokens

# What begins a line that goes on with the operation above: cases of an scf.index_switch, arguments of a linalg.reduce.
_CONTINUES = ("case", "default", "(")


@dataclass(eq=False)
class Value:
    """An SSA value: a result of `op`, or the argument of `block` with that `index`."""

    name: str
    op: "Op | None" = None
    block: "Block | None" = None
    index: int = 0
    declared: str = ""  # an argument's type
    attributes: dict = field(default_factory=dict)  # an argument's

    @property
    def type(self):
        """The type as text: of an operation with several results, that of all."""
        return self.op.result_type if self.op else self.declared

    def __repr__(self):
        return self.name


@dataclass(eq=False)
class Block:
    region: "Region"
    args: list = field(default_factory=list)
    ops: list = field(default_factory=list)


@dataclass(eq=False)
class Region:
    op: "Op"
    blocks: list = field(default_factory=list)


@dataclass(eq=False)
class Op:
    name: str
    line: int
    block: Block | None = None
    operands: list = field(default_factory=list)
    results: list = field(default_factory=list)
    regions: list = field(default_factory=list)
    words: list = field(default_factory=list)  # tokens' texts, without attributes, regions and the types at the end
    attributes: dict = field(default_factory=dict)  # name -> text, "" for a unit attribute
    types: str = ""  # after the last colon
    symbol: str = ""  # the first symbol, such as a callee, without its @
    location: str = ""

    @cached_property
    def operand_types(self):
        """Of a call and all that print `(types) -> ...`: the types between the parentheses."""
        return split(self.types[1 : closing(self.types, 0)]) if self.types.startswith("(") else []

    @cached_property
    def result_type(self):
        if self.name in ("memref.load", "tt.load"):  # they print the type of the address alone
            return re.sub(r"^memref<.*?(\w+?)[,>].*|!tt\.ptr<(.*?)>(?=>|$)", _element, self.types, flags=re.DOTALL)
        depth = 0
        for match in reversed(list(re.finditer(r"->|\bto\b|\binto\b|[<>()\[\]]", self.types))):
            text = match.group()
            if text in "<([":
                depth -= 1
            elif text in ">)]":
                depth += 1
            elif depth == 0:
                return self.types[match.end() :].strip()
        return self.types

    @property
    def parent(self):
        """The operation in whose region this one lies."""
        return self.block.region.op if self.block else None

    def inside(self, op):
        """Whether this operation is `op` or lies in its regions."""
        here = self
        while here is not None and here is not op:
            here = here.parent
        return here is op

    def walk(self):
        """This operation and all in its regions, in the order of the text."""
        yield self
        for region in self.regions:
            for block in region.blocks:
                for op in block.ops:
                    yield from op.walk()

    def __str__(self):
        name = f"{self.name} @{self.symbol}" if self.symbol else self.name
        return f"{name} (line {self.line})"

    __repr__ = __str__


class Module:
    """A parsed text: its operations (`ops`; a `module` operation holds the rest), and its aliases by name."""

    def __init__(self, ops, aliases):
        self.ops, self.aliases = ops, aliases

    def walk(self):
        for op in self.ops:
            yield from op.walk()

    def functions(self):
        """The functions that have a body."""
        return [op for op in self.walk() if op.name in ("func.func", "tt.func") and op.regions]

    def places(self, op):
        """Source places [(file, line)] of an operation, the innermost call first."""
        return self._places(op.location)

    def _places(self, text):
        out = []
        for file, line, alias in re.findall(r'"([^"]*)":(\d+):\d+|(#[A-Za-z_]\w*)', text):
            out += self._places(self.aliases.get(alias, "")) if alias else [(file, int(line))]
        return out


def _element(match):
    return re.sub(r"^(?:\d*x)*", "", match.group(1)) if match.group(1) else match.group(2)


def parse(text):
    """The Module of an MLIR text. Raises ParseError."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text):
        self.text, self.tokens, self.at = text, list(tokens(text)), 0
        self.scopes = [{}]
        self.aliases = {}

    @property
    def here(self):
        return self.tokens[self.at]

    def after(self, n=1):
        return self.tokens[min(self.at + n, len(self.tokens) - 1)]

    def take(self):
        token = self.here
        self.at += 1
        return token

    def fail(self, what):
        raise ParseError(f"line {self.here.line}: {what}, at {self.here.text!r}")

    def module(self):
        top = Block(None)
        while self.here.kind != "end":
            if self.here.kind == "alias" and self.after().text == "=":
                self.alias()
            else:
                top.ops.append(self.op(None))
        return Module(top.ops, self.aliases)

    def alias(self):
        name = self.take().text
        start = self.after().start
        self.take()
        depth = 0
        while self.here.kind != "end" and not (self.here.fresh and depth == 0):
            depth += (self.here.text in OPEN) - (self.here.text in CLOSE)
            self.take()
        self.aliases[name] = self.text[start : self.tokens[self.at - 1].end]

    def region(self, op, args):
        """At the `{`. `args` are the arguments of the first block that stand in the operation's own line."""
        self.take()
        region = Region(op)
        block = Block(region)
        region.blocks.append(block)
        self.scopes.append({})
        for value in args:
            self.argument(value, block)
        while self.here.text != "}":
            if self.here.kind == "end":
                self.fail("the text ends inside a region")
            if self.here.kind == "block":
                if block.args or block.ops:
                    block = Block(region)
                    region.blocks.append(block)
                self.label(block)
            else:
                block.ops.append(self.op(block))
        self.take()
        self.scopes.pop()
        op.regions.append(region)

    def argument(self, value, block):
        value.block, value.index = block, len(block.args)
        block.args.append(value)
        self.scopes[-1][value.name] = value

    def label(self, block):
        self.take()
        if self.here.text == "(":
            self.take()
            while self.here.text != ")":
                if self.here.text == ",":
                    self.take()
                self.argument(self.declaration(), block)
            self.take()
        if self.take().text != ":":
            self.fail("a block label without a colon")

    def declaration(self):
        """`%x: type {attributes} loc(..)`, up to the comma or parenthesis that ends it."""
        value = Value(self.take().text)
        start, depth, attributes, end = self.after().start, 0, {}, None
        self.take()
        while depth or self.here.text not in (",", ")"):
            if not depth and self.here.text == "{":
                end = end or self.here.start
                attributes = self.dictionary()
                continue
            if not depth and self.here.text == "loc":
                end = end or self.here.start
            if self.here.kind == "end":
                self.fail("the text ends inside an argument list")
            depth += (self.here.text in OPEN) - (self.here.text in CLOSE)
            self.take()
        value.declared = self.text[start : end or self.here.start].strip()
        value.attributes = attributes
        return value

    def dictionary(self):
        start, depth = self.here.end, 0
        while True:
            token = self.take()
            if token.kind == "end":
                self.fail("the text ends inside attributes")
            depth += (token.text in OPEN) - (token.text in CLOSE)
            if not depth:
                break
        parts = split(self.text[start : token.start])
        pairs = (re.match(r'"?([\w.:$]+)"?\s*(?:=\s*(.*))?$', part, re.DOTALL) for part in parts)
        return {pair.group(1): pair.group(2) or "" for pair in pairs if pair}

    def use(self, token):
        for scope in reversed(self.scopes):
            if token.text in scope:
                return scope[token.text]
        raise ParseError(f"line {token.line}: {token.text} is used before it is defined")

    def results(self, op):
        """`%a, %b:2 =`, if the line has it. They are defined after the operation's regions."""
        out = []
        if self.here.kind != "value":
            return out
        while True:
            name = self.take().text
            if self.here.text == ":":
                self.take()
                out += [f"{name}#{i}" for i in range(int(self.take().text))]
            else:
                out.append(name)
            if self.here.text != ",":
                break
            self.take()
        if self.take().text != "=":
            self.fail("results without =")
        return [Value(name, op=op, index=i) for i, name in enumerate(out)]

    def op(self, block):
        op = Op("", self.here.line, block)
        op.results = self.results(op)
        if self.here.kind not in ("word", "string"):
            self.fail("no operation")
        op.name = self.take().text.strip('"')
        if op.name in ("call", "return"):
            op.name = f"func.{op.name}"
        args, depth, colon, end = [], 0, None, None
        while True:
            token = self.here
            if token.kind == "end" or (not depth and token.text == "}"):
                break
            if not depth and token.fresh and token.text not in _CONTINUES:
                break
            if token.text == "{":
                end = end or (token.start if not depth else None)
                if self.after().fresh:
                    self.region(op, args)
                    args = []
                    colon = end = None
                else:
                    op.attributes.update(self.dictionary())
                continue
            if not depth and token.text == "loc" and self.after().text == "(":
                end = end or token.start
                start = token.start
                self.take()
                self.skip()
                op.location = self.text[start : self.tokens[self.at - 1].end]
                continue
            if token.kind == "value":
                following = self.after()
                if following.text == ":" and following.touches and depth:
                    args.append(self.declaration())
                    continue
                self.take()
                if self.here.text == "=":
                    args.append(Value(token.text))
                else:
                    op.operands.append(self.use(token))
                    if args and op.words[-2:] == [args[-1].name, "="]:  # %argument = %initial value
                        args[-1].declared = op.operands[-1].type
                op.words.append(token.text)
                continue
            depth += (token.text in OPEN) - (token.text in CLOSE)
            if token.text == ":" and not depth and not (token.touches and self.tokens[self.at - 1].kind == "word"):
                colon, end = token.end, None
            if token.kind == "symbol" and not op.symbol:
                op.symbol = token.text[1:].strip('"')
            op.words.append(token.text)
            self.take()
        if colon is not None:
            op.types = self.text[colon : end or self.tokens[self.at - 1].end].strip()
        for value in op.results:
            self.scopes[-1][value.name] = value
        return op

    def skip(self):
        """A bracket and all in it."""
        depth = 0
        while True:
            token = self.take()
            depth += (token.text in OPEN) - (token.text in CLOSE)
            if not depth:
                return
            if token.kind == "end":
                self.fail("the text ends inside brackets")
