"""What `python -m third_party.ascend.lower --all` lowers: every word of the device language, every kernel of the operators,
every tutorial, each as it is launched on Ascend (the constants are those of the operators' Ascend defaults).

A case is data: this package is read where triton is absent.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """name: unique, what the table shows. source: "path:kernel", the path from the repository's root. signature:
    {parameter: type}. constants: {parameter: value}. refused: None, or a part of the message with which the kernel must
    be refused at compile time."""

    name: str
    source: str
    signature: dict
    constants: dict = field(default_factory=dict)
    refused: str | None = None


def types(text):
    """{parameter: type} of "x: *fp16, n: i32"."""
    pairs = [item.split(":") for item in text.replace("\n", " ").split(",") if item.strip()]
    return {name.strip(): kind.strip() for name, kind in pairs}


def all_cases():
    """Every case, words first."""
    from . import collectives, exchanges, gemms, tutorials, words

    return [case for part in (words, collectives, exchanges, gemms, tutorials) for case in part.CASES]
