"""A script, as torchrun would start it, as a program for `explore`."""

import os
import sys


def script(path, argv=()):
    """A function that runs the script at `path` from its first line to its last, as __main__, with `argv`: once for each
    rank and schedule, in a namespace of its own, so that ranks share no globals but those of modules that it imports."""
    path = os.path.abspath(path)
    with open(path) as file:
        code = compile(file.read(), path, "exec")

    def run():
        saved, sys.argv = sys.argv, [path, *argv]
        folder = os.path.dirname(path)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            exec(code, {"__name__": "__main__", "__file__": path, "__builtins__": __builtins__})
        finally:
            sys.argv = saved

    run.__qualname__ = os.path.basename(path)
    return run
