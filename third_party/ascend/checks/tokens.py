"""MLIR's text as tokens with their lines, and the brackets in it."""

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<newline>\n) | (?P<blank>[ \t\r]+ | //[^\n]*)
    | (?P<string>"(?:\\.|[^"\\])*")
    | (?P<value>%(?:\d+|[A-Za-z$._-][\w$.-]*)(?:\#\d+)?)
    | (?P<symbol>@(?:"[^"]*"|[\w$.-]+))
    | (?P<alias>[#!][A-Za-z_][\w$.]*)
    | (?P<block>\^[\w$.-]+)
    | (?P<arrow>->|>=|<=|==|::)
    | (?P<number>-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*(?:[eE][-+]?\d+)?)?))
    | (?P<word>[A-Za-z_][\w$.]*)
    | (?P<other>.)
    """,
    re.VERBOSE,
)
OPEN, CLOSE = {"(": ")", "[": "]", "<": ">", "{": "}"}, {")", "]", ">", "}"}


class ParseError(ValueError):
    """The text is not the MLIR that this reader knows; names the line."""


class Token(NamedTuple):
    kind: str
    text: str
    line: int
    start: int
    end: int
    fresh: bool  # the first of its line
    touches: bool  # no blank before it


def tokens(text):
    line, fresh, touches = 1, True, True
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "newline":
            line, fresh, touches = line + 1, True, False
        elif kind == "blank":
            touches = False
        else:
            yield Token(kind, match.group(), line, match.start(), match.end(), fresh, touches)
            fresh, touches = False, True
    yield Token("end", "", line, len(text), len(text), True, False)


def closing(text, at):
    depth = 0
    for match in re.finditer(r'"(?:\\.|[^"\\])*"|->|[<>()\[\]{}]', text[at:]):
        depth += (match.group() in OPEN) - (match.group() in CLOSE)
        if not depth:
            return at + match.start()
    raise ParseError(f"no closing bracket in {text!r}")


def split(text):
    """Parts between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r'"(?:\\.|[^"\\])*"|->|[<>()\[\]{},]', text):
        depth += (match.group() in OPEN) - (match.group() in CLOSE)
        if match.group() == "," and not depth:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()] if text[start:].strip() else parts
