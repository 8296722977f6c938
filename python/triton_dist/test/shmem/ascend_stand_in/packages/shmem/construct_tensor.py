"""A tensor over memory that the stand-in wheel has mapped."""

import ctypes
import math

import torch
from recording import recorded


@recorded
def construct_tensor_from_ptr(data_ptr, shape, dtype, device, stride=None, storage_offset=None):
    if not isinstance(data_ptr, int) or data_ptr <= 0:
        raise ValueError(f"data_ptr must be positive, got {data_ptr}")
    assert device.type == "npu"
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(data_ptr)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
