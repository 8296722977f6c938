"""What to do about a failure whose message does not say it: signatures of the compilers' logs, and lines of a kernel."""

import inspect
import re

_HINTS = (
    (
        re.compile(r"Assertion `use_empty\(\) && \"Cannot destroy a value that still has uses!\"' failed"),
        "a call inside an `if` whose result nothing takes, such as a bare dl.wait or dl.atomic_add, ends so: assign the "
        "result, token = dl.wait(...), old = dl.atomic_add(...)",
    ),
    (
        re.compile(r"^triton-adapter-opt ended with -11$", re.M),
        "a pointer that is assigned in an `if` is the known cause of this crash: give each branch its own load or "
        "store, or choose an offset (tl.where) instead of a pointer; see the rules for kernels in docs/ascend.md",
    ),
)


def hint(log):
    """A line "hint: ...", or "" when the log is of no kind that is known."""
    return next((f"hint: {text}" for signature, text in _HINTS if signature.search(log)), "")


def kernel_line(fn, error):
    """Where in a kernel its front end gave up, "path:line: source"; "" when the exception does not know it.

    Of the errors that caused one another, the first belongs to the kernel itself, later ones to functions it calls.
    """
    node = getattr(error, "node", None)
    if not hasattr(node, "lineno") or not getattr(error, "src", None):
        return ""
    lines, first = inspect.getsourcelines(fn.fn)  # from the first decorator on; error.src begins at `def`
    first += next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    text = error.src.split("\n")[node.lineno - 1].strip()
    return f"{inspect.getsourcefile(fn.fn)}:{first + node.lineno - 1}: {text}"
