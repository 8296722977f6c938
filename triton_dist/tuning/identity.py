"""What a measured time is good for: this device, these versions, this source."""

import functools
import hashlib
import inspect
import json
import platform
import re
from pathlib import Path

import torch
import triton

import triton_dist

DIGITS = 16  # of a digest, hexadecimal


def device_name():
    """As the vendor names this process's device: "NVIDIA H200"; on cpu the architecture: "cpu x86_64"."""
    if triton_dist.backend == "cpu":
        return f"cpu {platform.machine()}"
    return torch.get_device_module().get_device_name()


def slug(name):
    """A name as part of a file's name: "NVIDIA H200" gives nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def versions():
    return dict(triton_dist=triton_dist.__version__, torch=torch.__version__, triton=triton.__version__)


def digest(value):
    """Of anything JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]


def source_digest(functions):
    """Of the text of functions and kernels. Of a compiled kernel Triton's own key, which counts what it calls, too."""
    texts = []
    for function in functions:
        key = getattr(function, "cache_key", None)  # not in the interpreter
        texts.append(key if isinstance(key, str) else inspect.getsource(getattr(function, "fn", function)))
    return digest(texts)


@functools.cache
def operators_digest():
    """Of the source of this library's operators and of the words that they are written in."""
    package = Path(triton_dist.__file__).parent
    files = sorted(path for part in ("kernels", "language") for path in (package / part).rglob("*.py"))
    return digest([[str(path.relative_to(package)), path.read_text()] for path in files])
