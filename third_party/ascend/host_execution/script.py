"""Runs a user's script on several ranks with its kernels as lowered code: what torchrun would start, in a process a rank."""

import runpy
import sys
from pathlib import Path

from .compiler import Compiler


def in_rank(address, limit_s, script, arguments):
    from . import engine

    engine.install(address, limit_s)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    return engine.ran


def run(script, arguments, world, limit_s, timeout):
    """Returns (the launches of each kernel as lowered code, of rank 0; the output of each rank).

    Raises triton_dist.testing.RanksFailed, whose text has every rank's output, when one fails.
    """
    from triton_dist.testing import Ranks

    with Compiler() as compiler, Ranks(world, env={"TRITON_DIST_BACKEND": "cpu"}) as ranks:
        arguments = (compiler.address, limit_s, str(Path(script).resolve()), list(arguments))
        ran = ranks.run(in_rank, *arguments, timeout=timeout, init=False)
        return ran[0], ranks.outputs
