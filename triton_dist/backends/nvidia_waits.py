"""Waits on NVIDIA GPUs that end: the host's share of what patience.py does in kernels, and a device that does not come to rest.

With TRITON_DIST_WAIT_TIMEOUT set, a wait in a kernel gives up after that time. What it waited for is then in host memory, where
it can be read while the device is stuck, and even when its CUDA context is lost. A thread prints it at once, and the next call
of `shmem` that looks raises it.
"""

import ctypes
import sys
import threading
import time

import torch

from .. import context, limits
from ..errors import WaitTimeoutError

LOOK_S = 0.25  # how often the thread looks
GRACE_S = 2.0  # a wait that began late in a kernel gives up before the host stops waiting for the kernel
SHOWN, PROGRAMS_SHOWN, SIGNALS_SHOWN = 8, 4, 64  # lines of a report, programs of a line, signals of an allocation
SIGNALS_BYTES = SIGNALS_SHOWN * 128  # that are read of them at a time, at least a line each
READ_S = 2.0  # that reading them may take: a copy may lie in a hardware queue behind what is stuck
_WAITED = 5  # its place in a record
_SYMBOLS = dict(zip(context.COMPARES, (">=", ">", "==", "!=", "<=", "<")))


def describe_records(records, describe):
    """A line for each signal and value waited for, those that were waited for longest first; `describe` names an address."""
    groups = {}
    for _, address, wanted, seen, compare, waited, *places in sorted(records, key=lambda words: -words[_WAITED]):
        group = groups.setdefault((address, wanted, seen, compare, tuple(places[3:6])), (waited, []))
        group[1].append(tuple(places[:3]))
    lines = []
    for (address, wanted, seen, compare, grid), (waited, programs) in groups.items():
        named = ", ".join(map(str, programs[:PROGRAMS_SHOWN]))
        more = f" and {len(programs) - PROGRAMS_SHOWN} others" if len(programs) > PROGRAMS_SHOWN else ""
        lines.append(
            f"program{'s' * (len(programs) > 1)} {named}{more} of a grid {grid} waited {waited / 1e9:.3g} s for "
            f"{describe(address & (1 << 64) - 1)}: wanted {_SYMBOLS[context.COMPARES[compare]]} {wanted}, saw {seen}"
        )
    return lines


def describe_address(address):
    return context.heap_map.describe(address) if context.heap_map else f"address {address:#x}"


class KernelWaits:
    """The clock and the records that context tables name (`words`), for waits of `seconds`."""

    def __init__(self, rank, seconds, clock, records):
        """clock: int64 [2] on the device; records: pinned int64 [WAIT_RECORDS_KEPT, WAIT_RECORD_WORDS]; both zero."""
        self.rank, self.seconds, self.clock, self.records = rank, seconds, clock, records
        self.words = (int(seconds * 1e9), clock.data_ptr(), records.data_ptr())
        self.launched = {}  # names of kernels, the latest last
        self._first = ctypes.c_int64.from_address(records.data_ptr())
        self._end, self._thread = threading.Event(), None

    @classmethod
    def on(cls, rank, seconds, device):
        clock = torch.zeros(2, dtype=torch.int64, device=device)
        size = context.WAIT_RECORDS_KEPT, context.WAIT_RECORD_WORDS
        made = cls(rank, seconds, clock, torch.zeros(size, dtype=torch.int64).pin_memory())
        made.watch()
        return made

    def launching(self, metadata):
        """Triton's launch hook: remembers the kernel's name."""
        name = metadata.get()["name"]
        self.launched.pop(name, None)
        self.launched[name] = None
        if len(self.launched) > SHOWN:
            del self.launched[next(iter(self.launched))]

    def watch(self):
        """A thread prints what gave up as soon as it has."""
        from triton import knobs

        knobs.runtime.launch_enter_hook.add(self.launching)
        self._thread = threading.Thread(target=self._look, name="triton_dist waits", daemon=True)
        self._thread.start()

    def _look(self):
        while not self._end.wait(LOOK_S):
            if self._first.value:
                time.sleep(LOOK_S)  # for the others that give up now
                print(f"[ERROR] triton_dist.shmem: {self.report()}", file=sys.stderr, flush=True)
                return

    def report(self):
        """What the waits that gave up so far waited for, as a text; None: none has."""
        if not self._first.value:
            return None
        found = [words for words in self.records.tolist() if words[0]]
        lines = describe_records(found, describe_address)
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"and {len(lines) - SHOWN} more signals"]
        if len(found) == context.WAIT_RECORDS_KEPT:
            lines.append("other programs waited, too, which are not listed")
        lines = [f"  rank {self.rank}: {line}" for line in lines]
        if self.launched:
            lines.append(f"  rank {self.rank} launched last: {', '.join(reversed(self.launched))}")
        return (
            f"rank {self.rank}: a wait in a kernel lasted longer than {self.seconds:g} s (TRITON_DIST_WAIT_TIMEOUT sets the "
            "limit). Later waits were cut short, so what this rank computed since is wrong. Finalize and init, or start "
            "again\n" + "\n".join(lines)
        )

    def check(self):
        if self._first.value:
            raise WaitTimeoutError(self.report())

    def close(self):
        if self._thread:
            from triton import knobs

            knobs.runtime.launch_enter_hook.remove(self.launching)
            self._end.set()
            self._thread.join()
            self._thread = None


def signals_now(tensor, stream, buffer):
    """Lines that say what the signals of this rank's heap (`tensor`, uint8) hold, read while kernels run: by copies alone of
    whole lines into `buffer` (pinned bytes that are there already), for an allocation and a kernel's first launch would wait
    for the device. When a copy does not come back, either, the lines end with one that says so."""
    lines = []
    for one in list(context.heap_map.live.values()) if context.heap_map else ():
        if not one.label.endswith(" signals"):
            continue
        dtype = torch.int32 if one.itemsize == 4 else torch.int64
        line = one.nbytes // max(one.shape[0], 1)
        count = min(one.shape[0], SIGNALS_SHOWN, buffer.numel() // max(line, 1))
        held = buffer[: count * line]
        with torch.cuda.stream(stream):
            held.copy_(tensor[one.offset : one.offset + count * line], non_blocking=True)
        if not passed(stream, READ_S):
            return [*lines, f"{one.label} (heap+{one.offset:#x}): not read, for a copy does not come back, either"]
        values = held.view(dtype).view(count, -1)[:, 0].tolist() if count else []
        shown = " ".join(map(str, values)) + (" ..." if one.shape[0] > count else "")
        lines.append(f"{one.label} (heap+{one.offset:#x}): {shown}")
    return lines


def device_rests(device, seconds):
    """Whether all work of the device is done within `seconds`; raises what the device's errors raise.

    A thread waits for it, and keeps waiting when it is stuck: CUDA has no wait with a limit, and no question whether a whole
    device is idle."""
    raised = []

    def wait():
        try:
            torch.cuda.synchronize(device)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, name="triton_dist synchronize", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    return not thread.is_alive()


def stream_rests(device, seconds):
    """`device_rests` for what the current stream has been given so far."""
    return passed(torch.cuda.current_stream(device).record_event(), seconds)


def passed(work, seconds):
    """Whether an event, or a stream, is done within `seconds`."""
    end = time.monotonic() + seconds
    while not work.query():
        if time.monotonic() > end:
            return False
        time.sleep(0)
    return True


def kernel_waits_limit(seconds):
    """The limit of waits in kernels in seconds; None: none, see limits.py."""
    return limits.wait_timeout(seconds) if limits.KERNEL_WAITS_LIMITED else None
