"""One module a platform; nothing else on the host differs between platforms.

Each module has a `Platform` and a `Heap` with the methods below. A `Team` (shmem/teams.py) has `id`, `serial`,
`members` (world ranks), `bases` and `epoch`. Addresses are ints, sizes are bytes, ranks are world ranks.

Platform
    process_group            torch.distributed's backend name: "gloo", "nccl" or "hccl"
    load()                   makes torch know the device and the process group; BackendError says what is missing
    device_count()           devices that this host's ranks may use; None when any number of ranks may run
    prepare(rank)            checks that the platform is usable, selects and returns this rank's torch.device;
                             BackendError says what is missing
    heap(rank, n_ranks, nbytes, options)   -> Heap, local work only; options is init's OptionalAttr

Heap
    descriptor               what the peers must know (a dict for JSON), published at rendezvous
    connect(descriptors, store, timeout)   maps the peers' heaps
    mapped_by_all()          every rank has connected; what only they needed can go. From here on:
    device, bases, span      bases[r] is the address of rank r's heap in this process, span the range around them all
    tensor(rank)             rank's heap as one uint8 tensor
    exchange(team, text, describe, timeout)   collective: every member's text in team order. A full barrier: what a
                             member wrote (device work included) before the call is visible to all after it
    limit_waits(seconds)     how long a wait in a kernel may last, where the platform bounds it; None: the default. Returns
                             the words WAIT_* of context tables, where kernels need them, else None
    check_waits()            WaitTimeoutError when a wait in a kernel has given up, where that does not raise by itself
    counter(team_id)         starting point of this rank's arrivals in a new team of this id
    put / get(dst, src, nbytes, peer, blocking)   the symmetric side given by this rank's own address
    put_signal(dst, src, nbytes, signal, value, add, itemsize, peer, blocking)
    wait_signal(address, compare, value, itemsize, describe, timeout)
    stream(urgent)           a queue of work beside the current one: follow(), join(), mark(), and a context manager
                             (shmem/streams.py)
    copy(to, source)         in the order of the current stream: rows of columns, contiguous each, without a multiprocessor
    recorder()               record(give): a function that does again what give() gives to streams, nested(): whether that
                             is being recorded already; None where the platform cannot
    word_setter(*addresses)  a function: in the order of the current stream, release, the int32 words there, of any rank,
                             become 1
    word_taker(describe, *addresses)   likewise, acquire: waits until this rank's int32 words there are 1, makes them 0
    word_teller(*addresses), word_poller(describe, *addresses)   as setter and taker, where a multiprocessor is free for it
    end_peers()              best effort: asks the peers on this host to end
    stuck                    whether the device has been given work that does not end
    close()                  unmaps, as far as no tensor still uses the memory
"""

import importlib

_platform = None
in_process = None  # a Platform whose ranks all live in this process, and which makes their meetings: see triton_dist/check


def platform():
    """This process's Platform, made on first use."""
    global _platform
    if in_process is not None:
        return in_process
    if _platform is None:
        from .. import backend

        _platform = importlib.import_module(f".{backend}", __name__).Platform()
    return _platform
