"""The checker: races, missing orders, deadlocks and schedules of a multi-rank kernel, in one process on the cpu platform.

    from triton_dist import check

    report = check.explore(program, world_size=4, schedules=200)
    print(report)
    report.raise_if_found()

    python -m triton_dist.check script.py --world-size 4 --schedules 200

docs/checking.md tells what is checked, and how to read a report.
"""

from .. import backend as _backend
from ..errors import BackendError as _BackendError

if _backend != "cpu":
    raise _BackendError(f"triton_dist.check runs on the cpu platform, not on {_backend}: set TRITON_DIST_BACKEND=cpu")

from .exploration import explore
from .findings import KINDS, CheckFailed, Finding, Report

__all__ = ["KINDS", "CheckFailed", "Finding", "Report", "explore"]
