"""Init and finalize: the ranks meet, map each other's heaps, and part again."""

import json
import os
import secrets

from .. import backends
from ..backends import addresses, processes
from ..errors import ShmemError, TritonDistError
from . import codes, log, rendezvous, world
from .attributes import InitAttr


def aclshmem_init(attributes):
    """Makes the symmetric heap. Collective over the `attributes.n_ranks` ranks; a full barrier.

    Returns 0, or a code of shmem.codes, never an exception; the reason is logged and kept in last_error(). -1: a bad
    argument, sizes that differ between ranks, or init without finalize; -3: a peer's heap cannot be mapped; -6, -7: the
    ranks did not meet; -8: no memory; -100: the platform is not usable here. When all ranks have met, all return alike.
    """
    rank = getattr(attributes, "my_rank", None)
    try:
        return _init(attributes)
    except Exception as error:
        return world.report(error, rank if isinstance(rank, int) else None)


def aclshmem_init_using_unique_id(mype, npes, mem_size, uid):
    """As aclshmem_init, meeting at the id that one process made with aclshmem_get_unique_id and gave to all."""
    try:
        return _init(InitAttr(mype, npes, "", mem_size), uid)
    except Exception as error:
        return world.report(error, mype if isinstance(mype, int) else None)


def aclshmem_get_unique_id():
    """bytes for aclshmem_init_using_unique_id. This process serves the meeting, so it must outlive everybody's init.

    SHMEM_UID_SESSION_ID="host:port" sets the address that it serves, else SHMEM_UID_SOCK_IFNAME the interface; else
    this host's own address (cpu: loopback). ShmemError when it cannot be served."""
    session = os.environ.get("SHMEM_UID_SESSION_ID", "")
    if session:
        scheme = "tcp6" if session.startswith("[") else "tcp"
        host, port = rendezvous.parse_ip_port(f"{scheme}://{session}")
    else:
        host, port = addresses.own_address(loopback=backends.platform().process_group == "gloo"), 0
    try:
        store = rendezvous.serve(host, port, 120)
    except (RuntimeError, OSError) as error:
        raise ShmemError(
            f"aclshmem_get_unique_id cannot serve {host}:{port}: {str(error).splitlines()[0]}", codes.BOOTSTRAP
        ) from error
    token = secrets.token_hex(16)
    rendezvous.keep(f"{host}:{store.port}", store)
    return json.dumps({"host": host, "port": store.port, "token": token}).encode()


def _check(attributes):
    """Raises ShmemError(-1) for what is wrong without asking anybody."""

    def bad(text):
        raise ShmemError(text, codes.INVALID_PARAM)

    def integer(name):
        value = getattr(attributes, name, None)
        number = world.as_int(value)
        if number is None:
            bad(f"InitAttr.{name} is {value!r}: give an int")
        return number

    rank, n_ranks = integer("my_rank"), integer("n_ranks")
    if not 1 <= n_ranks <= codes.MAX_PES:
        bad(f"InitAttr.n_ranks is {n_ranks}: give 1 to {codes.MAX_PES}")
    if not 0 <= rank < n_ranks:
        bad(f"InitAttr.my_rank is {rank}: give 0 to {n_ranks - 1} (n_ranks is {n_ranks})")
    if not isinstance(attributes.ip_port, str):
        bad(f"InitAttr.ip_port is {attributes.ip_port!r}: give a str")
    timeouts = [getattr(attributes.option_attr, name, None) for name in ("shm_init_timeout", "shm_create_timeout")]
    if not all(isinstance(value, (int, float)) and value > 0 for value in timeouts):
        bad(f"OptionalAttr's time-outs are {timeouts}: give seconds above 0")
    return rank, n_ranks, integer("local_mem_size")


def _init(attributes, uid=None):
    if world.active():
        raise ShmemError("shmem is initialised already: call aclshmem_finalize first", codes.INVALID_PARAM)
    rank, n_ranks, nbytes = _check(attributes)
    options = attributes.option_attr
    meeting = _meeting(attributes, rank, n_ranks, uid)
    heap = None
    try:
        meeting.claim()
        # From here on a failure of one rank is told to the others, so that nobody waits for it.
        problem, code, descriptor = None, 0, {}
        try:
            if not 0 < nbytes <= codes.MAX_HEAP_BYTES:
                limit = f"{codes.MAX_HEAP_BYTES} (40 GiB)"
                raise ShmemError(f"InitAttr.local_mem_size is {nbytes}: give 1 to {limit}", codes.INVALID_PARAM)
            platform = backends.platform()
            platform.prepare(rank)
            heap = platform.heap(rank, n_ranks, nbytes, options)
            descriptor = heap.descriptor
        except Exception as error:
            problem, code = str(error), _code(error)
        joined = meeting.join([problem, code, nbytes, descriptor])
        meeting.met()
        _raise_alike(joined)
        sizes = [one[2] for one in joined]
        if len(set(sizes)) > 1:
            listed = ", ".join(f"rank {peer}: {size}" for peer, size in enumerate(sizes))
            raise ShmemError(f"local_mem_size must be equal on all ranks ({listed})", codes.INVALID_PARAM)
        _warn_if_tight(rank, nbytes, n_ranks)
        descriptors = [one[3] for one in joined]
        peers = processes.Peers(rank, [one["process"] for one in descriptors])
        try:
            heap.connect(descriptors, meeting.store, options.shm_create_timeout)
        except Exception as error:
            problem, code = str(error), _code(error)
        votes = meeting.vote([problem, code], options.shm_create_timeout, peers.lost)
        peers.close()
        _raise_alike(votes)
        heap.mapped_by_all()
        limit = None if "TRITON_DIST_WAIT_TIMEOUT" in os.environ else options.control_operation_timeout
        made = world.World(heap, limit)
        made.collective("aclshmem_init")
        meeting.clear()
    except BaseException:
        meeting.withdraw()
        if heap:
            heap.close()
        raise
    made.status = codes.InitStatus.INITIALIZED
    world.set_active(made)
    log.info(f"initialised: {n_ranks} ranks, {nbytes} bytes of heap each, met at {meeting.address}", rank)
    return codes.SUCCESS


def _meeting(attributes, rank, n_ranks, uid):
    if backends.in_process is not None:
        return backends.in_process.meeting(rank, n_ranks)
    limit = attributes.option_attr.shm_init_timeout
    if uid is None:
        address, store = rendezvous.choose(rank, n_ranks, attributes.ip_port, limit)
        token = ""
    else:
        address, store, token = _join_unique_id(uid, limit)
    return rendezvous.Meeting(address, store, rank, n_ranks, limit, token)


def _code(error):
    code = getattr(error, "code", None)
    return code or (codes.NOT_SUPPORTED if isinstance(error, TritonDistError) else codes.INNER)


def _raise_alike(said):
    failed = [(peer, one[0], one[1]) for peer, one in enumerate(said) if one[0]]
    if failed:
        texts = {text for _, text, _ in failed}
        if len(failed) == len(said) and len(texts) == 1:
            raise ShmemError(failed[0][1], failed[0][2])
        raise ShmemError("; ".join(f"rank {peer} failed: {text}" for peer, text, _ in failed), failed[0][2])


def _join_unique_id(uid, timeout):
    try:
        about = json.loads(bytes(uid))
        host, port, token = about["host"], about["port"], about["token"]
    except (ValueError, TypeError, KeyError) as error:
        raise ShmemError("uid is not what aclshmem_get_unique_id returned", codes.INVALID_PARAM) from error
    address = f"{host}:{port}"
    return address, rendezvous.at(address, host, port, False, timeout), token


def _warn_if_tight(rank, nbytes, n_ranks):
    if backends.platform().process_group != "gloo" or rank:
        return
    with open("/proc/meminfo") as file:
        available = next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable")), None)
    if available is not None and nbytes * n_ranks > available:
        log.warn(
            f"the heaps of {n_ranks} ranks take up to {nbytes * n_ranks} bytes, but this machine has {available} "
            "available: memory is taken as it is touched; a rank that finds none left is killed",
            rank,
        )


def aclshmem_finalize():
    """Ends what init began. Collective; a full barrier. Returns 0, or a code: -5 when shmem is not initialised, -1
    when a peer is in another collective call (shmem then stays initialised on all ranks), -6 or -7 when a peer is
    gone or does not come (this rank has then parted all the same). Tensors stay readable until they are dropped, but
    no peer is told anything through them any more."""
    made = world.active()
    if made is None:
        log.error("aclshmem_finalize: shmem is not initialised")
        return codes.NOT_INITED
    code = codes.SUCCESS
    try:
        made.collective("aclshmem_finalize")
    except ShmemError as error:
        return world.report(error, made.rank)
    except TritonDistError as error:
        code = world.report(error, made.rank)
    live = made.heap_map.live
    if live:
        labels = ", ".join(one.label for one in list(live.values())[:8])
        log.info(f"finalized with {len(live)} allocations not freed: {labels}", made.rank)
    made.status = codes.InitStatus.NOT_INITIALIZED
    world.set_active(None)
    try:
        made.close()
    except Exception as error:
        return world.report(error, made.rank)
    return code


aclshmem_finialize = aclshmem_finalize  # the wheel's old spelling


def aclshmemx_init_status():
    """InitStatus of this process."""
    made = world.active()
    return made.status if made else codes.InitStatus.NOT_INITIALIZED


def set_conf_store_tls(enable, tls_info):
    """The wheel's TLS switch for its own rendezvous. Ours has none: on cpu and nvidia False gives 0, True -100. On ascend the
    wheel is told at the next init, whose code is then the answer; without this call it is told False."""
    if not isinstance(enable, (bool, int)) or not isinstance(tls_info, (str, bytes)):
        log.error(f"set_conf_store_tls({enable!r}, {tls_info!r}): give a bool and a str")
        return codes.INVALID_PARAM
    from .. import backend

    if backend == "ascend":
        from ..backends import ascend

        ascend.set_tls(bool(enable), tls_info)
    elif enable:
        log.error("set_conf_store_tls: the rendezvous of cpu and nvidia has no TLS; call set_conf_store_tls(False, '')")
        return codes.NOT_SUPPORTED
    return codes.SUCCESS


def aclshmem_global_exit(status):
    """Ends this process with `status` at once, and asks the peers on this host to end (SIGTERM). Does not return."""
    made = world.active()
    if made:
        log.error(f"aclshmem_global_exit({status})", made.rank)
        made.heap.end_peers()
    os._exit(status)


def aclshmem_info_get_version():
    """(major, minor) of the API that these names follow."""
    return 1, 1


def aclshmem_info_get_name():
    """What this is, with its version and platform."""
    from .. import __version__, backend

    return f"triton_dist {__version__} ({backend})"


def process_group_backend():
    """The name of torch.distributed's backend for this platform: "gloo", "nccl" or "hccl". torch knows it then: on ascend
    torch_npu is imported; BackendError says what is missing."""
    platform = backends.platform()
    platform.load()
    return platform.process_group
