"""A stand-in for torch_npu, for tests without an NPU: device `npu` exists, its tensors lie in CPU memory.

Of torch.npu it has what triton_dist calls. STAND_IN_NPUS says how many devices there are. The process group `hccl` is
gloo.
"""

import contextlib
import os
import types

import torch
import torch.distributed as dist
from recording import recorded
from torch.overrides import TorchFunctionMode

_current = 0


@recorded
def set_device(index):
    global _current
    if not 0 <= index < device_count():
        raise RuntimeError(f"no NPU {index}")
    _current = index


@recorded
def synchronize(device=None):
    assert device is None or device.type == "npu"


@recorded
def synchronize_current_stream():
    pass


class Stream:
    def __init__(self, device=None):
        assert device.type == "npu"

    def synchronize(self):
        synchronize_current_stream()


def device_count():
    return int(os.environ.get("STAND_IN_NPUS", "8"))


npu = types.ModuleType("torch.npu")
npu.set_device, npu.synchronize, npu.device_count, npu.Stream = set_device, synchronize, device_count, Stream
npu.current_device = lambda: _current
npu.current_stream = Stream
npu.stream = lambda stream: contextlib.nullcontext()
npu.is_available = lambda: device_count() > 0


class _OnCpu(TorchFunctionMode):
    """What is asked for on an NPU is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "npu":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
dist.Backend.register_backend("hccl", _gloo, devices=["cpu", "npu"])
_OnCpu().__enter__()
