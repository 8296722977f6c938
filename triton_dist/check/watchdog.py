"""Ends loops that touch no memory and wait for nothing, such as `while True: pass` in host code: in them the simulation
never gets its turn.

A thread looks a few times a second whether the simulation has moved on. While it has not, it sends the simulation's thread
a signal (SIGURG, which is ignored by default, and which Go's runtime uses for the same purpose), whose handler runs between
two steps of Python code and gives up the schedule when it has come too often. A long product of torch lets it come only
once, so that slow is not taken for endless. Only the main thread handles signals: in another one, an exception is raised.
"""

import ctypes
import signal
import threading
import time

TICK = 0.25  # seconds
END_SECONDS = 2.0  # a coroutine of a schedule that was given up may run on so long: in its `finally`, say


class Interrupted(BaseException):
    """Raised in a coroutine whose schedule is given up; not an Exception, so that `except Exception` lets it pass."""


class Watchdog:
    """`with Watchdog(...)` around schedules; `watch(simulation)` before each, `release()` after.

    stall_seconds: without any progress, after which a schedule is given up. deadline: of time.monotonic(), at which it is
    given up in any case; None: never.
    """

    def __init__(self, stall_seconds, deadline=None):
        self.stall_seconds, self.deadline = stall_seconds, deadline
        self.simulation, self.seen, self.idle = None, None, 0.0
        self.lock, self.over = threading.Lock(), threading.Event()

    def __enter__(self):
        self.ident = threading.get_ident()
        self.handles = threading.current_thread() is threading.main_thread()
        if self.handles:
            self.outer = signal.signal(signal.SIGURG, self._signalled)
        self.thread = threading.Thread(target=self._look, name="triton_dist.check", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()
        if self.handles:
            signal.signal(signal.SIGURG, self.outer if self.outer is not None else signal.SIG_DFL)

    def watch(self, simulation):
        self.seen, self.idle, self.simulation = None, 0.0, simulation

    def release(self):
        with self.lock:
            self.simulation = None
            if not self.handles:
                _raise_in(self.ident, None)

    def expired(self):
        return self.deadline is not None and time.monotonic() > self.deadline

    # -- the thread
    def _look(self):
        seen = None
        while not self.over.wait(TICK):
            with self.lock:
                simulation = self.simulation
                now = simulation, simulation and simulation.progress()
                if simulation is None or now != seen:
                    seen = now
                    if not self.handles:
                        self.idle = 0.0
                elif self.handles:
                    signal.pthread_kill(self.ident, signal.SIGURG)
                else:
                    self.idle += TICK
                    if self._enough(simulation):
                        _raise_in(self.ident, Interrupted)

    def _enough(self, simulation):
        if simulation.ending:
            return self.idle > END_SECONDS
        return self.idle >= self.stall_seconds or (self.idle >= 2 * TICK and self.expired())

    # -- the simulation's thread
    def _signalled(self, number, frame):
        simulation = self.simulation
        if simulation is None:
            if callable(self.outer):
                self.outer(number, frame)
            return
        now = simulation.progress()
        if now != self.seen:
            self.seen, self.idle = now, 0.0
        self.idle += TICK
        if self._enough(simulation):
            simulation.interrupt(frame)


def _raise_in(ident, exception):
    """The exception's class for the thread to raise between two steps of Python code; None: it need not any more."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), exception and ctypes.py_object(exception))
