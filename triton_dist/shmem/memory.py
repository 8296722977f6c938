"""Symmetric memory: allocations at one offset on every rank, and tensors over them.

Allocating and freeing are collective and a full barrier. Arguments that differ between ranks raise
CollectiveMismatchError on all ranks; no memory raises ShmemError(-8) on all ranks. Sizes are rounded up to 64 bytes.
"""

import math

import torch

from .. import context as table
from ..errors import ShmemError
from . import codes, world
from .allocator import LINE, OutOfMemory

TENSOR_ALIGNMENT = 512  # an L2 line of an NPU; more than any tensor descriptor asks for
MAX_ALIGNMENT = 2 << 20  # what heaps themselves are aligned to


def _allocate(call, nbytes, label, alignment=LINE, shape=(), itemsize=1, problem=None):
    made = world.current(call)
    made.collective(call, problem=problem)
    try:
        offset = made.allocator.alloc(nbytes, alignment)
    except OutOfMemory:
        heap = made.allocator
        raise ShmemError(
            f"rank {made.rank}: {call}: no room for {nbytes} bytes: the largest free block has {heap.largest_free}, "
            f"{heap.free_bytes} of {heap.nbytes} bytes are free. Raise InitAttr.local_mem_size, or free something",
            codes.MALLOC_FAILED,
        ) from None
    made.heap_map.add(table.Allocation(offset, nbytes, label, tuple(shape), itemsize))
    return made, offset


def _size(size, name="size"):
    """(int, None), or (1, what is wrong with it)."""
    number = world.as_int(size)
    if number is None:
        return 1, f"{name} is {size!r}: give an int"
    return (number, None) if number > 0 else (1, f"{name} is {number}: give 1 or more")


def aclshmem_malloc(size):
    """Address of `size` bytes, not zeroed."""
    nbytes, problem = _size(size)
    made, offset = _allocate(f"aclshmem_malloc({size})", nbytes, f"malloc({size})", problem=problem)
    return made.base + offset


def aclshmem_calloc(nmemb, size):
    """Address of nmemb * size zeroed bytes; zeroed on all ranks when it returns."""
    call = f"aclshmem_calloc({nmemb}, {size})"
    (count, problem), (each, other) = _size(nmemb, "nmemb"), _size(size)
    nbytes = count * each
    made, offset = _allocate(call, nbytes, f"calloc({nmemb}, {size})", problem=problem or other)
    _zero(made, offset, nbytes, call)
    return made.base + offset


def aclshmem_align(alignment, size):
    """Address of `size` bytes, not zeroed, at a multiple of `alignment` (a power of two, at most 2 MiB)."""
    call, label = f"aclshmem_align({alignment}, {size})", f"align({alignment}, {size})"
    (alignment, problem), (nbytes, other) = _size(alignment, "alignment"), _size(size)
    if alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        problem = f"alignment is {alignment}: give a power of two, at most {MAX_ALIGNMENT}"
    made, offset = _allocate(call, nbytes, label, alignment, problem=problem or other)
    return made.base + offset


def _zero(made, offset, nbytes, call):
    made.heap.tensor(made.rank)[offset : offset + nbytes].zero_()
    made.collective(f"{call}, zeroed")  # no peer may write before all have zeroed


def aclshmem_free(ptr):
    """Gives back what malloc, calloc, align or create_tensor returned. Meets all ranks first, so that nobody still
    uses it."""
    _free("aclshmem_free", ptr)


def _free(name, ptr):
    made = world.current(f"{name}({ptr})")
    address = world.as_int(ptr)
    offset = None if address is None else made.offset(address)
    problem = None
    if address is None:
        problem = f"{ptr!r} is no address"
    elif offset is None:
        owner = made.heap_map.owner(address)
        whose = f"rank {owner[0]}'s heap; each rank frees its own address" if owner else "in no symmetric heap"
        problem = f"{address:#x} is not in this rank's heap but in {whose}" if owner else f"{address:#x} is {whose}"
    elif offset not in made.heap_map.live:
        inside = made.heap_map.allocation(offset)
        gone = next((one for one in reversed(made.heap_map.freed) if one.offset == offset), None)
        if inside:
            problem = f"{ptr:#x} lies inside {inside.label}, which begins at {made.base + inside.offset:#x}"
        elif gone:
            problem = f"{ptr:#x} ({gone.label}) was freed already"
        else:
            problem = f"{ptr:#x} was never allocated"
    what = "?" if offset is None else f"heap+{offset:#x}"
    made.collective(f"{name}({what})", problem=problem)
    made.allocator.free(offset)
    made.heap_map.remove(offset)


def aclshmem_create_tensor(shape, dtype=torch.float32, device_id=0):
    """A contiguous symmetric tensor of `shape` and `dtype` on this rank's device, not zeroed, aligned to 512 bytes.

    Extents may be 0. `device_id` is the wheel's argument; init has chosen the device, so it is ignored.
    """
    return _tensor("aclshmem_create_tensor", shape, dtype)


def _spell(dtype, shape):
    return f"{str(dtype).removeprefix('torch.')}{shape}"


def _tensor(name, shape, dtype, label=None, call=None):
    asked = shape if isinstance(shape, (list, tuple)) else [shape]
    shape = [world.as_int(extent) for extent in asked]
    problem = None
    if not isinstance(dtype, torch.dtype):
        problem = f"dtype is {dtype!r}: give a torch.dtype"
    elif None in shape or any(extent < 0 for extent in shape):
        problem = f"shape is {asked}: give extents of 0 or more"
    itemsize = 1 if problem else dtype.itemsize
    nbytes = 0 if problem else math.prod(shape) * itemsize
    label = label or f"{_spell(dtype, shape)} tensor"
    call = call or f"{name}({list(asked) if problem else shape}, {dtype})"
    made, offset = _allocate(call, nbytes, label, TENSOR_ALIGNMENT, shape, itemsize, problem)
    return made.heap.tensor(made.rank)[offset : offset + nbytes].view(dtype).view(shape)


def create_signals(n, dtype=torch.int32):
    """`n` zeroed signals as a tensor [n, 64 // itemsize] of int32 or int64: each has 64 bytes to itself, its value is
    element [i, 0]. Zeroed on all ranks when it returns."""
    call, n = f"create_signals({n}, {dtype})", world.as_int(n)
    if dtype not in (torch.int32, torch.int64) or n is None or n < 0:
        world.current(call).collective(call, problem="give a number of signals and torch.int32 or torch.int64")
    width = table.SIGNAL_BYTES // dtype.itemsize
    signals = _tensor("create_signals", [n, width], dtype, f"{n} signals", call)
    made = world.current(call)
    _zero(made, _offset_of(made, signals), n * table.SIGNAL_BYTES, call)
    return signals


def _offset_of(made, tensor):
    """Heap offset of a tensor's first element, None when it is elsewhere. An empty tensor's data_ptr() is 0."""
    if tensor.untyped_storage().data_ptr() != made.heap.tensor(made.rank).untyped_storage().data_ptr():
        return None
    return tensor.storage_offset() * tensor.element_size()


def aclshmem_free_tensor(tensor):
    """Frees a tensor of aclshmem_create_tensor or create_signals, given as such or as a view that begins where it
    begins."""
    made = world.current("aclshmem_free_tensor")
    if not isinstance(tensor, torch.Tensor):
        made.collective("aclshmem_free_tensor(?)", problem=f"{type(tensor).__name__} is no tensor")
    offset = _offset_of(made, tensor)
    _free("aclshmem_free_tensor", tensor.data_ptr() if offset is None else made.base + offset)


def peer_tensor(tensor, peer, team=codes.TEAM_WORLD):
    """Rank `peer`'s copy of a symmetric tensor or a view of one: same shape, strides and dtype, memory shared with
    the peer.

    For host code; the caller orders accesses (barrier_all, signals). ShmemError(-1) when `tensor` is not symmetric
    memory of this rank or the team has no rank `peer`."""
    call = "peer_tensor"
    made = world.current(call)
    if not isinstance(tensor, torch.Tensor):
        raise ShmemError(f"rank {made.rank}: peer_tensor: {type(tensor).__name__} is no tensor", codes.INVALID_PARAM)
    members = made.team(team, call).members
    place = world.as_int(peer)
    if place is None or not 0 <= place < len(members):
        raise ShmemError(
            f"rank {made.rank}: peer_tensor: team {team} has ranks 0 to {len(members) - 1}, not {peer!r}",
            codes.INVALID_PARAM,
        )
    if _offset_of(made, tensor) is None:
        raise ShmemError(
            f"rank {made.rank}: peer_tensor: the {_spell(tensor.dtype, list(tensor.shape))} tensor at "
            f"{tensor.data_ptr():#x} is not in this rank's symmetric heap: make it with aclshmem_create_tensor",
            codes.INVALID_PARAM,
        )
    flat = made.heap.tensor(members[place])
    flat = flat[: flat.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def aclshmem_ptr(ptr, peer):
    """The address in this process of rank `peer`'s copy of one of this rank's symmetric addresses; 0 for any other."""
    made, ptr, peer = world.active(), world.as_int(ptr), world.as_int(peer)
    if made is None or ptr is None or peer is None or not 0 <= peer < made.n_ranks:
        return 0
    offset = made.offset(ptr)
    return 0 if offset is None else made.heap.bases[peer] + offset


def aclshmemx_get_heap_base(mem_type=None):
    """The address of this rank's symmetric heap, 0 when not initialised. One heap, whatever `mem_type` says."""
    made = world.active()
    return made.base if made else 0


def device():
    """The torch.device that this rank's symmetric tensors are on."""
    return world.current("device").heap.device
