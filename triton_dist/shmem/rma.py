"""Copies and signals from the host, to and from a peer's symmetric memory.

Sizes are bytes and ranks are world ranks, as in the wheel. The symmetric side is named by this rank's own address of
it. The blocking forms are done when they return: the peer sees the bytes after the next signal or barrier. The _nbi
forms are done by the next barrier_all (cpu: at once). A signal's width is that of the tensor it lies in (int32 or
int64); in raw memory it is int32. What is out of bounds raises ShmemError(-1) before anything is written."""

import operator

import torch

from ..errors import ShmemError
from . import codes, world

_COMPARE = {
    codes.CmpOp.CMP_EQ: operator.eq,
    codes.CmpOp.CMP_NE: operator.ne,
    codes.CmpOp.CMP_GT: operator.gt,
    codes.CmpOp.CMP_GE: operator.ge,
    codes.CmpOp.CMP_LT: operator.lt,
    codes.CmpOp.CMP_LE: operator.le,
}
_SYMBOL = dict(zip(_COMPARE, ("==", "!=", ">", ">=", "<", "<=")))


def _refuse(made, call, text):
    raise ShmemError(f"rank {made.rank}: {call}: {text}", codes.INVALID_PARAM)


def _refuse_type(made, call, name, value):
    what = "a tensor: give its data_ptr()" if isinstance(value, torch.Tensor) else f"{value!r}: give an int"
    _refuse(made, call, f"{name} is {what}")


def _check(call, symmetric, local, nbytes, pe):
    """The World, and the arguments as ints."""
    made = world.current(call)
    numbers = [world.as_int(value) for value in (symmetric, local, nbytes, pe)]
    names = "the symmetric address", "the local address", "elem_size", "pe"
    for name, value, number in zip(names, (symmetric, local, nbytes, pe), numbers):
        if number is None:
            _refuse_type(made, call, name, value)
    symmetric, local, nbytes, pe = numbers
    if not 0 <= pe < made.n_ranks:
        _refuse(made, call, f"pe is {pe}: give 0 to {made.n_ranks - 1}")
    if nbytes < 0:
        _refuse(made, call, f"elem_size is {nbytes}: give bytes, 0 or more")
    _symmetric(made, call, symmetric, nbytes)
    if nbytes and local <= 0:
        _refuse(made, call, f"the local address is {local}")
    return made, symmetric, local, nbytes, pe


def _symmetric(made, call, address, nbytes):
    """The allocation that holds [address, address + nbytes) of this rank's heap."""
    offset = made.offset(address)
    if offset is None:
        _refuse(made, call, f"{address:#x} is no address of this rank's symmetric heap")
    found = made.heap_map.allocation(offset)
    if found is None or offset + nbytes > found.offset + max(found.nbytes, 1):
        where = made.heap_map.describe(address)
        _refuse(made, call, f"{nbytes} bytes at {where} do not fit into one allocation")
    return found


def _signal(made, call, address):
    """(address, width in bytes) of a signal."""
    number = world.as_int(address)
    if number is None:
        _refuse_type(made, call, "the signal's address", address)
    itemsize = _symmetric(made, call, number, 4).itemsize
    itemsize = itemsize if itemsize in (4, 8) else 4
    if number % itemsize:
        _refuse(made, call, f"the signal at {number:#x} is not aligned to {itemsize} bytes")
    return number, itemsize


def _value(made, call, value, itemsize):
    number, bits = world.as_int(value), itemsize * 8 - 1
    if number is None or not -(1 << bits) <= number < 1 << bits:
        _refuse(made, call, f"{value!r} is no int{itemsize * 8}")
    return number


def _put(call, dst, src, elem_size, pe, blocking):
    made, dst, src, nbytes, pe = _check(call, dst, src, elem_size, pe)
    if nbytes:
        made.heap.put(dst, src, nbytes, pe, blocking)


def _get(call, dst, src, elem_size, pe, blocking):
    made, src, dst, nbytes, pe = _check(call, src, dst, elem_size, pe)
    if nbytes:
        made.heap.get(dst, src, nbytes, pe, blocking)


def aclshmem_putmem(dst, src, elem_size, pe):
    """Copies `elem_size` bytes from this rank's `src` (any memory) to rank pe's copy of symmetric `dst`."""
    _put("aclshmem_putmem", dst, src, elem_size, pe, True)


def aclshmem_putmem_nbi(dst, src, elem_size, pe):
    """aclshmem_putmem that may still be under way when it returns."""
    _put("aclshmem_putmem_nbi", dst, src, elem_size, pe, False)


def aclshmem_getmem(dst, src, elem_size, pe):
    """Copies `elem_size` bytes from rank pe's copy of symmetric `src` to this rank's `dst` (any memory)."""
    _get("aclshmem_getmem", dst, src, elem_size, pe, True)


def aclshmem_getmem_nbi(dst, src, elem_size, pe):
    """aclshmem_getmem that may still be under way when it returns."""
    _get("aclshmem_getmem_nbi", dst, src, elem_size, pe, False)


def _put_signal(call, dst, src, elem_size, sig, signal, sig_op, pe, blocking):
    made, dst, src, nbytes, pe = _check(call, dst, src, elem_size, pe)
    sig, itemsize = _signal(made, call, sig)
    value = _value(made, call, signal, itemsize)
    try:
        add = codes.SignalOp(int(sig_op)) is codes.SignalOp.SIGNAL_ADD
    except (ValueError, TypeError):
        _refuse(made, call, f"sig_op is {sig_op!r}: give SignalOp.SIGNAL_SET (0) or SIGNAL_ADD (1)")
    made.heap.put_signal(dst, src, nbytes, sig, value, add, itemsize, pe, blocking)


def aclshmemx_putmem_signal(dst, src, elem_size, sig, signal, sig_op, pe):
    """aclshmem_putmem, then sets rank pe's copy of `sig` to `signal`, or adds `signal` to it (sig_op, see SignalOp):
    who sees the signal sees the bytes."""
    _put_signal("aclshmemx_putmem_signal", dst, src, elem_size, sig, signal, sig_op, pe, True)


def aclshmemx_putmem_signal_nbi(dst, src, elem_size, sig, signal, sig_op, pe):
    """aclshmemx_putmem_signal that may still be under way when it returns."""
    _put_signal("aclshmemx_putmem_signal_nbi", dst, src, elem_size, sig, signal, sig_op, pe, False)


def aclshmem_signal_wait_until(sig_addr, cmp, cmp_val):
    """Waits until this rank's signal compares with `cmp_val` (cmp: see CmpOp). What its sender put before is visible
    then.

    ValueError for a null address; DeadlockError, PeerLostError or WaitTimeoutError when it cannot come true.
    """
    call = "aclshmem_signal_wait_until"
    if not sig_addr:
        raise ValueError(f"{call}: sig_addr is null")
    made = world.current(call)
    sig_addr, itemsize = _signal(made, call, sig_addr)
    cmp_val = _value(made, call, cmp_val, itemsize)
    try:
        cmp = codes.CmpOp(int(cmp))
    except (ValueError, TypeError):
        _refuse(made, call, f"cmp is {cmp!r}: give a CmpOp, CMP_EQ (0) to CMP_LE (5)")
    where = world.caller()

    def describe():
        what = made.heap_map.describe(sig_addr)
        return f"in shmem.{call}, called at {where}: waits for {what} {_SYMBOL[cmp]} {cmp_val}"

    made.heap.wait_signal(sig_addr, _COMPARE[cmp], cmp_val, itemsize, describe, made.wait_limit)
