"""Runs a program under many schedules, and collects what was found."""

import contextlib
import io
import re
import time

from ..shmem import InitAttr, aclshmem_finalize, aclshmem_init, last_error
from ..shmem.world import as_int
from .exhaustive import Exhaustive, Path
from .findings import RESULTS, SYMPTOMS, Report
from .recorder import write
from .simulator import Simulation
from .strategies import strategy_of
from .watchdog import Watchdog
from .weak_memory import WeakMemory

UNKNOWN = "It may just be slow: give it more time (seconds, --seconds) or smaller sizes."
HEAP_BYTES = 64 << 20
WEAK_EVERY = 4  # of the seeded schedules, unless `weak` says otherwise


def explore(
    program,
    *args,
    world_size=2,
    schedules=200,
    seed=None,
    exhaustive=False,
    init=True,
    heap_bytes=HEAP_BYTES,
    resident=None,
    keep_going=False,
    max_steps=2_000_000,
    seconds=None,
    stall_seconds=60,
    timeline=None,
    weak=None,
    races=True,
):
    """Runs `program(*args)` on `world_size` ranks, all in this process, under many schedules, and looks for faults.

    The program is what a rank would run: it allocates with `shmem`, launches kernels, uses torch.distributed, asserts what
    must be true of the result. It is called once for each rank and schedule, so it must not keep state of its own between
    calls (module globals are shared by all ranks).

    Args:
        program: a function. It must do the same in every call but for the order in which ranks come: no time, no randomness
            that is not seeded (torch's, numpy's and random's generators start alike in every schedule, a set for each rank).
        args: its arguments, the same for every rank.
        world_size: 1 to 64 ranks.
        schedules: the first is first-in first-out, the others have the seeds 0, 1, 2 ...: random for even ones, priorities
            with few changes (PCT) for odd ones.
        seed: run that schedule alone, to replay it: a number from 0, "fifo", "weak:0" and on, or the "path:..." that the
            report of an exhaustive search names.
        exhaustive: instead of by seeds, search systematically: every order of atomics, signals and waits that can make a
            difference, for small kernels. When it ends within `schedules` runs, `report.complete` is True: all were explored.
            With a seed nothing is searched: that schedule runs.
        init: initialise shmem with `heap_bytes` on each rank before, and finalize after. False: the program does so.
        resident: programs of a grid that run at a time; None: TRITON_DIST_RESIDENT, else all. Give what a device holds.
        keep_going: go on after the first schedule that shows a fault, to count how many do.
        max_steps: accesses to memory after which a schedule counts as endless.
        seconds: for all schedules together; the one that runs then is given up. When it is the first, or stands still, that
            is a finding.
        stall_seconds: a rank or program that runs so long and touches no shared memory, launches nothing and waits for
            nobody counts as endless. A long computation inside of one torch operation does not.
        timeline: a file to write, for Perfetto or chrome://tracing: what the kernels did in the schedule in which something
            was found first, else in the first one (timeline.py); `report.timeline` is a summary.
        weak: whether schedules have weak memory (weak_memory.py), in which a missing order gives wrong values. None: every
            fourth, with seeds "weak:0", "weak:1" ...; True: all but the first; False: none. Where a read may come late, the
            program is run twice in a schedule (late_reads.py).
        races: False: report wrong results, failures, hangs and bad accesses alone, not the orders that are missing. With
            weak=True it shows what a missing order does.

    Returns: a Report. `report.ok`, `report.findings`, `print(report)`, `report.raise_if_found()`.

    Memory: the heaps (as far as touched), for each 8 bytes touched 4 more (16 where single bytes are accessed), and some
    hundred bytes for each different access, at most 400,000 of them at a time.
    """
    if not callable(program):
        raise TypeError(f"explore: program is {program!r}: give the function that every rank runs")
    for name, value, least, most in (
        ("world_size", world_size, 1, 64), ("schedules", schedules, 1, None), ("max_steps", max_steps, 1, None),
        ("resident", 1 if resident is None else resident, 1, None),
    ):  # fmt: skip
        whole = as_int(value)
        if whole is None or whole < least or (most and whole > most):
            raise ValueError(f"explore: {name} is {value!r}: give {least} {f'to {most}' if most else 'or more'}")
    named = isinstance(seed, str) and re.fullmatch(r"fifo|(weak:)?[0-9]+|path:([0-9]+(\.[0-9]+)*)?", seed)
    if not (seed is None or named or (as_int(seed) is not None and seed >= 0)):
        raise ValueError(f'explore: seed is {seed!r}: give 0 or more, "fifo", or the "weak:..." or "path:..." of a report')
    exhaustive = exhaustive and seed is None
    if exhaustive and weak:
        raise ValueError("explore: exhaustive=True tries the orders of signals, not the values of weak=True: give one of them")
    for name, value in (("seconds", seconds), ("stall_seconds", stall_seconds)):
        if (value is None and name != "seconds") or (value is not None and not value > 0):
            raise ValueError(f"explore: {name} is {value!r}: give seconds, more than 0")
    if timeline:
        open(timeline, "wb").close()  # a path that cannot be written is said now
    body = program
    if init:

        def body(*args):
            return _with_shmem(program, args, heap_bytes)

    name = getattr(program, "__qualname__", getattr(program, "__name__", type(program).__name__))
    report = Report(name, world_size)
    began = time.perf_counter()
    length, recorders = 1000, []
    search = Exhaustive() if exhaustive else None
    with Watchdog(stall_seconds, None if seconds is None else time.monotonic() + seconds) as watchdog:
        for number in _paths(search, schedules) if exhaustive else _seeds(schedules, seed, weak):

            def run(memory, number=number, length=length):
                strategy = search or _strategy(number, length)
                simulation = Simulation(world_size, strategy, resident, max_steps, watchdog, bool(timeline), memory, races)
                output = io.StringIO()
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    simulation.run(body, args)
                return simulation, output

            memory = WeakMemory(number) if str(number).startswith("weak:") else None
            simulation, output = run(memory)
            if memory is not None and memory.late_reads.found and not (simulation.findings or simulation.cut):  # once more
                again = WeakMemory(number, promise=memory.late_reads.found)
                second = run(again)
                if again.late_reads.kept and second[0].findings:
                    simulation, output = second
            replayed = number is None and seed not in (None, "fifo")  # it only tells how long the schedule to replay is
            if search:
                number = f"path:{search.path()}"
                search.finish()
                report.complete = search.over and not simulation.cut
                report.redundant += simulation.redundant
                if simulation.redundant:
                    continue
            elif number is None:
                length = simulation.steps
            if simulation.cut and (report.schedules or simulation.findings or replayed):
                report.cut = True
            elif simulation.cut:
                text = f"the time given ({seconds:g} s) was over before the first schedule was\n{simulation.cut}\n{UNKNOWN}"
                simulation.found("livelock", text, ranks=range(world_size))
            elif replayed:
                continue
            if not report.cut or simulation.findings:
                _add(report, simulation, number, resident)
            if report.schedules == 1 or (simulation.findings and report.flagged == 1):
                report.outputs = output.getvalue()
                recorders, recorded = simulation.recorders, "fifo" if number is None else number
            if not simulation.findings and not simulation.cut:
                report.results = simulation.results
            if report.cut or (report.findings and not keep_going) or watchdog.expired():
                break
    if recorders:
        report.timeline = write(timeline, recorders, f"Timeline of the schedule {recorded}: {timeline}")
    report.findings.sort(key=lambda one: one.kind in SYMPTOMS)  # causes first
    report.seconds = time.perf_counter() - began
    return report


def _seeds(schedules, seed, weak):
    if seed == "fifo":
        return [None]
    if isinstance(seed, str) and seed.startswith("path:"):
        return [seed]
    if seed is not None:
        return [None, seed if str(seed).startswith("weak:") else int(seed)]
    if weak:
        return [None, *[f"weak:{number}" for number in range(schedules - 1)]]
    seeds = iter(range(schedules))
    turns = range(1, schedules)
    return [None, *[f"weak:{i // WEAK_EVERY - 1}" if weak is None and i % WEAK_EVERY == 0 else next(seeds) for i in turns]]


def _strategy(seed, length):
    if isinstance(seed, str) and seed.startswith("path:"):
        return Path(seed.removeprefix("path:"))
    return strategy_of(None if seed is None else int(str(seed).removeprefix("weak:")), length)


def _paths(search, schedules):
    """As many runs as it takes, at most `schedules`."""
    for _ in range(schedules):
        if search.over:
            return
        search.begin()
        yield None


def _add(report, simulation, seed, resident):
    report.schedules += 1
    report.steps += simulation.steps
    report.flagged += bool(simulation.findings)
    shown = "fifo" if seed is None else seed
    for one in simulation.findings:
        if simulation.detector.weak is not None and one.kind in RESULTS:
            one.text = "\n".join([one.text, *simulation.detector.weak.explain()])
        known = next((found for found in report.findings if found.key == one.key), None)
        if known is not None:
            known.count += 1
            continue
        one.seed, one.count = shown, 1
        limit = "" if resident is None else f", resident={resident}"
        one.replay = f"seed={shown!r}, world_size={report.world_size}{limit} (--triton-dist-seed {shown})"
        report.findings.append(one)


def _with_shmem(program, args, heap_bytes):
    import os

    attr = InitAttr(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "", heap_bytes)
    if aclshmem_init(attr) != 0:
        raise RuntimeError(f"aclshmem_init failed: {last_error()}")
    result = program(*args)
    aclshmem_finalize()
    return result
