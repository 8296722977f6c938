"""Streams and events of a heap: made once, used again, for making one takes the host longer than all else that is done with it.

The streams are not torch's, of which there are 32 of a priority for the whole process, dealt out in turn: two operators that
had one in common could wait for each other, where ranks call them in different orders on two streams.
"""

import ctypes
from collections import defaultdict

import torch

from ..errors import BackendError

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream


class Queues:
    """What the queues of a device are made of, and made of again when they are no longer used."""

    def __init__(self, device):
        self.device, self.events, self.streams, self.handles = device, [], defaultdict(list), []

    def stream(self, urgent):
        if self.streams[urgent]:
            return self.streams[urgent].pop()
        with torch.cuda.device(self.device):
            handle = ctypes.c_void_p()
            code = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority(ctypes.byref(handle), NON_BLOCKING, -urgent)
        if code:
            raise BackendError(f"the CUDA driver makes no stream of priority {-urgent}: error {code}")
        self.handles.append(handle)
        return torch.cuda.ExternalStream(handle.value, self.device)

    def close(self):
        """The device is idle."""
        for handle in self.handles:
            ctypes.CDLL("libcuda.so.1").cuStreamDestroy_v2(handle)
        self.handles, self.streams = [], defaultdict(list)


class _Mark:
    """What a stream had been given. A stream that was told to wait for an event waits for what it had recorded then, so the
    event may record again when nobody holds the mark any more."""

    def __init__(self, stream, unused):
        self.unused, self.event = unused, unused.pop() if unused else torch.cuda.Event()
        self.event.record(stream)

    def __del__(self):
        self.unused.append(self.event)


class Queue:
    """A heap's `stream(urgent)`, see backends."""

    def __init__(self, queues, urgent):
        self.queues, self.urgent, self.stream = queues, urgent, queues.stream(urgent)
        self.guard = torch.cuda.stream(self.stream)

    def __del__(self):
        if hasattr(self, "stream"):
            self.queues.streams[self.urgent].append(self.stream)

    def follow(self, mark=None):
        self.stream.wait_event((mark or self.mark()).event)

    def mark(self):
        return _Mark(torch.cuda.current_stream(self.queues.device), self.queues.events)

    def join(self):
        torch.cuda.current_stream(self.queues.device).wait_event(_Mark(self.stream, self.queues.events).event)

    def __enter__(self):
        self.guard.__enter__()

    def __exit__(self, *exc):
        self.guard.__exit__(*exc)
