"""Loads and stores of the CPU engine: strided copies where a block is affine, and the checks of symmetric accesses."""

import numpy as np

from .. import context
from ..errors import SymmetricAccessError
from .affine import affine_of, rectangle_of
from .scheduler import scheduler

_LOWEST = 1 << 16
_whole = {}  # dtype -> all of user space as one array, for gathers


class _Interface:
    __slots__ = ("__array_interface__",)


def view(address, dtype, shape, strides=None):
    """A numpy view of raw memory; strides in bytes."""
    holder = _Interface()
    holder.__array_interface__ = {
        "data": (address, False),
        "shape": tuple(shape),
        "strides": strides,
        "typestr": dtype.str,
        "version": 3,
    }
    return np.asarray(holder)


def bytes_between(low, high):
    """Raw memory [low, high) as a numpy view of bytes."""
    return view(low, np.dtype(np.uint8), (high - low,))


def _whole_memory(dtype):
    found = _whole.get(dtype)
    if found is None:
        found = _whole[dtype] = view(_LOWEST, dtype, ((1 << 47) // dtype.itemsize - _LOWEST,))
    return found


# -- checks


def check(low, high, what):
    """Raises unless [low, high) lies inside one live allocation or wholly outside of the range kept for heaps."""
    heap = context.heap_map
    if heap is None or high <= heap.span[0] or low >= heap.span[1]:
        return
    place = heap.owner(low)
    if place is not None:
        rank, offset = place
        found = heap.allocation(offset)
        if found is not None and high <= heap.bases[rank] + found.offset + found.nbytes:
            return
        if found is not None:
            past = high - heap.bases[rank] - found.offset - found.nbytes
            raise SymmetricAccessError(
                f"{what} of {high - low} bytes at {heap.describe(low)} runs {past} bytes past its end ({scheduler.place()})"
            )
    raise SymmetricAccessError(f"{what} at {heap.describe(low)} ({scheduler.place()})")


def _check_form(form, itemsize, what):
    low, high = form.bounds()
    try:
        check(low, high + itemsize, what)
    except SymmetricAccessError as error:
        # evenly spaced lanes may lie in the memory of several ranks
        try:
            check_lanes(form.array(np.uint64).ravel(), itemsize, what)
        except SymmetricAccessError:
            raise error from None


def check_lanes(addresses, itemsize, what):
    """The same for a block of unrelated addresses (already without the masked ones)."""
    heap = context.heap_map
    if heap is None or not addresses.size:
        return
    low, high = int(addresses.min()), int(addresses.max()) + itemsize
    if high <= heap.span[0] or low >= heap.span[1]:
        return
    place = heap.owner(low)
    if place is not None:
        found = heap.allocation(place[1])
        if found is not None and high <= heap.bases[place[0]] + found.offset + found.nbytes:
            return
    for address in np.unique(addresses).tolist():
        check(address, address + itemsize, what)


def check_symmetric(low, high, what, rank=None):
    """Raises unless [low, high) lies inside one live allocation of `rank`'s heap (default: this rank's)."""
    heap = context.heap_map
    if heap is None:
        raise SymmetricAccessError(
            f"{what}: there is no symmetric heap; call shmem.aclshmem_init before the kernel ({scheduler.place()})"
        )
    rank = heap.rank if rank is None else rank
    place = heap.owner(low)
    if place is None or place[0] != rank:
        where = heap.describe(low) if place else f"address {low:#x}"
        raise SymmetricAccessError(
            f"{what}: {where} is not in rank {rank}'s symmetric heap; give this rank's own pointer to memory "
            f"from shmem.aclshmem_create_tensor or malloc ({scheduler.place()})"
        )
    check(low, high, what)


# -- blocks


def load_affine(form, rectangle, dtype, other):
    """Reads an Affine block of addresses inside `rectangle` (None: all of it); `other` fills the rest (None: zeros)."""
    if rectangle is None or rectangle.full():
        out, part, into = np.empty(form.shape, dtype), form, ...
    else:
        out = np.zeros(form.shape, dtype)
        if other is not None:
            out[...] = other
        part, into = form.part(rectangle), rectangle.slices()
    if 0 not in part.shape:
        _check_form(part, dtype.itemsize, "load")
        if _spans(part, dtype.itemsize, out):
            out[into] = _take(part.array(np.uint64), dtype)
        else:
            out[into] = view(part.base, dtype, part.shape, part.strides)
    return out


def _spans(form, itemsize, out):
    """Whether `out` lies between addresses of the block, as it may when those belong to several tensors. numpy takes that for
    an overlap, and copies first, to where the same may be true: without end."""
    low, high = form.bounds()
    address = out.__array_interface__["data"][0]
    return low < address + out.nbytes and address < high + itemsize


def store_affine(form, rectangle, value):
    """Writes an Affine block; False when lanes share an address, so that their order matters."""
    part = form if rectangle is None else form.part(rectangle)
    if 0 in part.shape:
        return True
    if any(s == 0 and n > 1 for s, n in zip(part.strides, part.shape)):
        return False
    _check_form(part, value.itemsize, "store")
    target = view(part.base, value.dtype, part.shape, part.strides)
    value = np.broadcast_to(value, form.shape)
    target[...] = value if rectangle is None else value[rectangle.slices()]
    return True


def forms_of(addresses, mask):
    """(Affine, Rectangle or None) of arrays when both have the form, else None."""
    rectangle = None if mask is None else rectangle_of(np.broadcast_to(mask, addresses.shape))
    if mask is not None and rectangle is None:
        return None
    form = affine_of(addresses)
    return None if form is None else (form, rectangle)


def gather(addresses, mask, dtype, other):
    """Reads unrelated addresses."""
    if mask is None:
        check_lanes(addresses, dtype.itemsize, "load")
        return _take(addresses, dtype)
    mask = np.broadcast_to(mask, addresses.shape)
    out = np.zeros(addresses.shape, dtype) if other is None else np.array(np.broadcast_to(other, addresses.shape), dtype)
    lanes = addresses[mask]
    check_lanes(lanes, dtype.itemsize, "load")
    out[mask] = _take(lanes, dtype)
    return out


def _take(addresses, dtype):
    if dtype.itemsize > 1 and (addresses & np.uint64(dtype.itemsize - 1)).any():
        flat = addresses.ravel()
        parts = [view(a, np.dtype(np.uint8), (dtype.itemsize,)) for a in flat.tolist()]
        return np.stack(parts).view(dtype).reshape(addresses.shape) if parts else np.zeros(addresses.shape, dtype)
    index = (addresses - np.uint64(_LOWEST)) // np.uint64(dtype.itemsize)
    return _whole_memory(dtype).take(index.astype(np.int64))
