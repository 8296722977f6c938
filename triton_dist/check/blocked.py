"""Reports of a schedule that cannot go on: who stands where, and waits for what."""

from .. import context
from . import sites
from .tasks import HostWait

SHOWN = 24
NOT_STARTED = "its start"


def place(task):
    """"file.py:12 in name" where a coroutine stands that does not run now."""
    frame = task.greenlet.gr_frame
    if frame is None:
        return NOT_STARTED
    found = sites.text((sites.of_host if task.launch is None else sites.of)(frame))
    return "the checker's own init or finalize of shmem" if found == sites.UNKNOWN else found


def places(tasks):
    return tuple(sorted({place(task) for task in tasks if task.wait is not None}))


def describe(tasks, heap_map):
    """A line for each coroutine. `heap_map(rank)` names what lies in the rank's heap."""
    lines = []
    for task in tasks[:SHOWN]:
        context.heap_map = heap_map(task.rank)
        if task.wait is None or (isinstance(task.wait, HostWait) and task.wait.ready()):
            what = "could run"
        else:
            what = f"waits: {task.wait}" if isinstance(task.wait, HostWait) else str(task.wait)
            what = what.replace(", called at ?", "")  # by explore itself
        lines.append(f"{task} at {place(task)}: {what}")
    if len(tasks) > SHOWN:
        lines.append(f"... and {len(tasks) - SHOWN} more")
    unstarted = {id(t.launch): t.launch for t in tasks if t.launch is not None and t.launch.next < t.launch.programs}
    for launch in unstarted.values():
        lines.append(
            f"rank {launch.rank} kernel {launch.kernel}: {launch.programs - launch.next} of {launch.programs} programs "
            f"not started ({launch.limit} run at a time)"
        )
    return "\n".join(lines)
