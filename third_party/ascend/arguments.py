"""A kernel's arguments as text: types of a signature, values of constants. Imports nothing of triton: the command is read
where triton is absent, and constants travel as JSON between the two environments."""

import argparse
import ast
import re
from dataclasses import dataclass

SCALARS = (
    *("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"),
    *("fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e4b8", "fp8e4b15", "fp8e5", "fp8e5b16"),
)


@dataclass(frozen=True)
class Dtype:
    """A dtype of triton.language by its name there, such as "float16", or by triton's short one, "fp16"."""

    name: str


def unknown_type(kind):
    """None for a type of a signature ("*fp16", "**fp32", "*kfp16", "i32"), else what is wrong with it."""
    if isinstance(kind, str) and re.sub(r"^\*+k?", "", kind) in SCALARS:
        return None
    return f"{kind!r} is no type; the types are {', '.join(SCALARS)}, and *type for a pointer"


def signature_of(text):
    """[type, ...] of "*fp16, i32", or {parameter: type} of "x: *fp16, n: i32"."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    named = [":" in item for item in items]
    if any(named) and not all(named):
        raise argparse.ArgumentTypeError("name all parameters or none: 'x: *fp16, n: i32' or '*fp16, i32'")
    pairs = [item.split(":", 1) if ":" in item else ("", item) for item in items]
    pairs = [(name.strip(), kind.strip()) for name, kind in pairs]
    for _, kind in pairs:
        if wrong := unknown_type(kind):
            raise argparse.ArgumentTypeError(wrong)
    return dict(pairs) if any(named) else [kind for _, kind in pairs]


def constant_of(text):
    """(name, value) of "NAME=value": a Python literal, a dtype such as tl.float16, or a word such as sum."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=value")
    name, value = name.strip(), value.strip()
    if dtype := re.fullmatch(r"(?:tl|triton\.language)\.(\w+)", value):
        return name, Dtype(dtype[1])
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
    try:
        encoded(literal)
    except TypeError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None
    return name, literal


def encoded(value):
    """A constant as JSON can hold it; TypeError for one that no constant can be."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return {"tuple": [encoded(item) for item in value]}
    if isinstance(value, Dtype) or (type(value).__name__ == "dtype" and type(value).__module__.startswith("triton.")):
        return {"dtype": value.name}
    raise TypeError(
        f"{value!r} is a {type(value).__name__}: a constant is a number, True, False, None, a word, a tuple of them or a dtype "
        "of triton.language, such as tl.float16"
    )


def decoded(value, language):
    """The constant that `encoded` was given; `language` is triton.language. ValueError for a dtype that it does not have."""
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decoded(item, language) for item in value["tuple"])
    name = value["dtype"]
    known = {key: dtype for key, dtype in vars(language).items() if isinstance(dtype, language.dtype)}
    for key, dtype in known.items():
        if name in (key, dtype.name):
            return dtype
    raise ValueError(f"triton.language has no dtype {name!r}; it has {', '.join(known)}")
