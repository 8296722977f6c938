"""The host API in one process: codes, exceptions, addresses, lifetimes."""

import ctypes
import gc

import numpy as np
import pytest
import torch

from triton_dist import context as table
from triton_dist import shmem
from triton_dist.errors import DeadlockError, ShmemError
from triton_dist.shmem import codes

HEAP = 4 << 20


def init(**fields):
    attributes = shmem.InitAttr(n_ranks=1, local_mem_size=HEAP)
    for name, value in fields.items():
        setattr(attributes, name, value)
    return shmem.aclshmem_init(attributes)


@pytest.fixture(autouse=True)
def parted():
    yield
    if shmem.my_pe() != -1:
        assert shmem.aclshmem_finalize() == 0


@pytest.fixture
def world(parted):
    assert init() == 0, shmem.last_error()


# -- before init and after finalize


def test_before_init_codes_are_the_wheels():
    assert (shmem.my_pe(), shmem.pe_count(), shmem.team_my_pe(0), shmem.team_n_pes(0)) == (-1, -1, -1, -1)
    assert shmem.aclshmem_finalize() == codes.NOT_INITED
    assert shmem.aclshmemx_init_status() == shmem.InitStatus.NOT_INITIALIZED
    assert shmem.team_split_strided(0, 0, 1, 1) == codes.NOT_INITED
    assert shmem.team_translate_pe(0, 0, 0) == -1
    assert shmem.aclshmem_ptr(4096, 0) == 0 and shmem.aclshmemx_get_heap_base() == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: shmem.aclshmem_malloc(64),
        lambda: shmem.aclshmem_calloc(1, 64),
        lambda: shmem.aclshmem_align(64, 64),
        lambda: shmem.aclshmem_free(64),
        lambda: shmem.aclshmem_create_tensor((1,)),
        lambda: shmem.aclshmem_free_tensor(torch.zeros(1)),
        lambda: shmem.create_signals(1),
        lambda: shmem.context(),
        lambda: shmem.barrier_all(),
        lambda: shmem.device(),
        lambda: shmem.peer_tensor(torch.zeros(1), 0),
        lambda: shmem.aclshmem_putmem(64, 64, 1, 0),
        lambda: shmem.aclshmem_signal_wait_until(64, 0, 0),
        lambda: shmem.team_split_2d(0, 1),
        lambda: shmem.team_destroy(1),
        lambda: shmem.aclshmem_team_get_config(0),
    ],
)
def test_use_before_init_says_so(call):
    with pytest.raises(ShmemError, match="not initialised: call aclshmem_init") as caught:
        call()
    assert caught.value.code == codes.NOT_INITED


def test_init_finalize_and_again():
    for _ in range(3):
        assert init() == 0, shmem.last_error()
        assert shmem.aclshmemx_init_status() == shmem.InitStatus.INITIALIZED
        assert (shmem.my_pe(), shmem.pe_count()) == (0, 1)
        assert table.heap_map.nbytes == HEAP
        assert shmem.aclshmem_finialize() == 0
        assert table.heap_map is None


def test_a_second_init_without_finalize_is_refused(world):
    assert init() == codes.INVALID_PARAM
    assert "call aclshmem_finalize first" in shmem.last_error()
    shmem.barrier_all()  # the first one is unharmed


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"local_mem_size": 0}, "local_mem_size is 0"),
        ({"local_mem_size": -1}, "local_mem_size is -1"),
        ({"local_mem_size": (40 << 30) + 1}, "40 GiB"),
        ({"local_mem_size": "64M"}, "give an int"),
        ({"my_rank": 1}, "my_rank is 1: give 0 to 0"),
        ({"my_rank": -1}, "my_rank is -1"),
        ({"n_ranks": 0}, "n_ranks is 0"),
        ({"n_ranks": 16385}, "16384"),
        ({"ip_port": 8666}, "ip_port is 8666"),
        ({"ip_port": "127.0.0.1:8666"}, "give tcp://host:port"),
        ({"ip_port": "tcp://127.0.0.1:80"}, "above 1024"),
        ({"ip_port": "tcp://" + "a" * 60 + ":2000"}, "63 characters"),
        ({"option_attr": shmem.OptionalAttr(shm_init_timeout=0)}, "seconds above 0"),
    ],
)
def test_bad_attributes_return_invalid_param(fields, said, capfd):
    assert init(**fields) == codes.INVALID_PARAM
    assert said in shmem.last_error()
    line = capfd.readouterr().err
    assert line.startswith("[ERROR] triton_dist.shmem: rank ") and line.count("\n") == 1


def test_something_else_than_attributes_is_a_code_not_an_exception():
    assert shmem.aclshmem_init(None) != 0
    assert shmem.aclshmem_init_using_unique_id(0, 1, HEAP, b"no id") == codes.INVALID_PARAM


def test_one_rank_ignores_a_port_that_is_taken(monkeypatch):
    monkeypatch.setenv("G_IP_PORT", "tcp://127.0.0.1:8666")
    assert init(ip_port="tcp6://[::1]:8666") == 0
    assert shmem.aclshmem_finalize() == 0


def test_unique_id_of_one_rank():
    uid = shmem.aclshmem_get_unique_id()
    assert isinstance(uid, bytes)
    for _ in range(2):
        assert shmem.aclshmem_init_using_unique_id(0, 1, HEAP, uid) == 0, shmem.last_error()
        assert shmem.aclshmem_finalize() == 0


def test_a_session_id_that_cannot_be_served_raises(monkeypatch):
    monkeypatch.setenv("SHMEM_UID_SESSION_ID", "127.0.0.1:80")
    with pytest.raises(RuntimeError, match="above 1024"):
        shmem.aclshmem_get_unique_id()


# -- memory


def test_addresses_are_aligned_and_apart(world):
    one, two, three = shmem.aclshmem_malloc(4), shmem.aclshmem_malloc(65), shmem.aclshmem_align(4096, 8)
    base = shmem.aclshmemx_get_heap_base()
    assert base % (2 << 20) == 0 and three % 4096 == 0
    assert one % 64 == two % 64 == 0 and abs(two - one) >= 64
    assert [one.label for one in table.heap_map.live.values()] == ["malloc(4)", "malloc(65)", "align(4096, 8)"]


def test_calloc_zeroes_memory_that_was_used(world):
    address = shmem.aclshmem_malloc(256)
    ctypes.memset(address, 7, 256)
    shmem.aclshmem_free(address)
    again = shmem.aclshmem_calloc(4, 64)
    assert again == address and ctypes.string_at(again, 256) == bytes(256)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: shmem.aclshmem_malloc(0), "size is 0"),
        (lambda: shmem.aclshmem_malloc(-8), "size is -8"),
        (lambda: shmem.aclshmem_malloc(1.5), "size is 1.5"),
        (lambda: shmem.aclshmem_calloc(0, 8), "nmemb is 0"),
        (lambda: shmem.aclshmem_align(48, 8), "power of two"),
        (lambda: shmem.aclshmem_align(4 << 20, 8), "power of two"),
        (lambda: shmem.aclshmem_create_tensor((2, -1)), "shape is"),
        (lambda: shmem.aclshmem_create_tensor((2,), "float32"), "dtype is 'float32'"),
        (lambda: shmem.aclshmem_create_tensor((2, 1.5)), r"aclshmem_create_tensor\(\[2, 1.5\], torch.float32\): shape is"),
        (lambda: shmem.create_signals(2, torch.int16), "torch.int32 or torch.int64"),
        (lambda: shmem.create_signals(-1), "number of signals"),
        (lambda: shmem.aclshmem_free(0), "in no symmetric heap"),
        (lambda: shmem.aclshmem_free(None), "no address"),
        (lambda: shmem.aclshmem_free_tensor(torch.zeros(4)), "in no symmetric heap"),
    ],
)
def test_bad_sizes_and_addresses_raise(world, call, said):
    with pytest.raises(RuntimeError, match=said) as caught:
        call()
    assert caught.value.code == codes.INVALID_PARAM
    assert not table.heap_map.live


def test_numpy_integers_are_integers(world):
    assert shmem.aclshmem_malloc(np.int64(64))
    assert shmem.aclshmem_create_tensor((np.int32(2), 3)).shape == (2, 3)


def test_out_of_memory_tells_what_is_left(world):
    blocks = [shmem.aclshmem_malloc(1 << 20) for _ in range(3)]
    shmem.aclshmem_free(blocks[1])
    with pytest.raises(ShmemError) as caught:
        shmem.aclshmem_malloc(3 << 20)
    assert caught.value.code == codes.MALLOC_FAILED
    for number in (3 << 20, 1 << 20, 2 << 20, HEAP):  # asked, largest, free, all
        assert str(number) in str(caught.value)
    assert "local_mem_size" in str(caught.value)
    with pytest.raises(ShmemError, match=r"create_signals\(1073741824, torch.int32\): no room for 68719476736 bytes"):
        shmem.create_signals(1 << 30)


def test_the_whole_heap_can_be_one_tensor(world):
    x = shmem.aclshmem_create_tensor((HEAP,), torch.uint8)
    x.fill_(1)
    assert int(x.sum()) == HEAP


def test_free_errors_name_what_lies_there(world):
    x = shmem.aclshmem_create_tensor((4, 8), torch.int32)
    with pytest.raises(ShmemError, match=r"lies inside int32\[4, 8\] tensor"):
        shmem.aclshmem_free_tensor(x[1:])
    address = x.data_ptr()
    shmem.aclshmem_free_tensor(x.t())  # a view that begins where the tensor begins
    with pytest.raises(ShmemError, match=r"\(int32\[4, 8\] tensor\) was freed already"):
        shmem.aclshmem_free(address)
    with pytest.raises(ShmemError, match="never allocated"):
        shmem.aclshmem_free(shmem.aclshmemx_get_heap_base() + (1 << 20))


DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


@pytest.mark.parametrize("dtype", sorted({str(dtype) for dtype in DTYPES}))
def test_tensors_of_every_dtype(world, dtype):
    dtype = getattr(torch, dtype.removeprefix("torch."))
    if dtype.is_floating_point or dtype.is_complex or dtype in (torch.int8, torch.int32, torch.bool, torch.uint16):
        x = shmem.aclshmem_create_tensor((3, 5), dtype)
        assert x.dtype == dtype and x.shape == (3, 5) and x.is_contiguous() and x.data_ptr() % 512 == 0
        x.view(torch.uint8).fill_(1)
        found = table.heap_map.allocation(x.data_ptr() - shmem.aclshmemx_get_heap_base())
        assert found.shape == (3, 5) and found.itemsize == dtype.itemsize
        shmem.aclshmem_free_tensor(x)
        assert not table.heap_map.live


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 3), 7, [2, 3], torch.Size([1])])
def test_shapes_with_and_without_elements(world, shape):
    x, y = shmem.aclshmem_create_tensor(shape), shmem.aclshmem_create_tensor(shape)
    assert x.shape == torch.empty(shape).shape and x.dtype == torch.float32
    assert shmem.peer_tensor(x, 0).shape == x.shape
    shmem.aclshmem_free_tensor(x)
    shmem.aclshmem_free_tensor(y)
    assert not table.heap_map.live


def test_signals_have_a_line_each_and_are_zero(world):
    for dtype, width in ((torch.int32, 16), (torch.int64, 8)):
        signals = shmem.create_signals(3, dtype)
        assert signals.shape == (3, width) and signals.dtype == dtype and not signals.any()
        signals.fill_(5)
        shmem.aclshmem_free_tensor(signals)
    assert not shmem.create_signals(3).any()  # the same memory again
    assert shmem.create_signals(0).shape == (0, 16)
    assert table.heap_map.describe(signals[2, 1].data_ptr()).startswith("rank 0's 3 signals, element [2, 2]")


def test_a_tensor_outlives_finalize_but_its_context_is_revoked():
    assert init() == 0
    x = shmem.aclshmem_create_tensor((1024,), torch.int32)
    x.copy_(torch.arange(1024))
    ctx = shmem.context()
    assert ctx[table.MAGIC_WORD] == table.MAGIC and ctx[table.NUM_RANKS] == 1 and ctx[table.DELTAS] == 0
    assert shmem.context() is ctx
    assert shmem.aclshmem_finalize() == 0
    gc.collect()
    assert ctx[table.MAGIC_WORD] == 0
    assert torch.equal(x, torch.arange(1024, dtype=torch.int32))
    assert init() == 0  # the new heap lies elsewhere
    assert shmem.aclshmem_create_tensor((1024,), torch.int32).data_ptr() != x.data_ptr()
    assert shmem.aclshmem_finalize() == 0


def test_mappings_go_with_their_last_tensor():
    def mapped():
        with open("/proc/self/maps") as file:
            return file.read().count("triton_dist.heap")

    gc.collect()
    before = mapped()
    assert init() == 0
    x = shmem.aclshmem_create_tensor((8,))
    assert mapped() == before + 1 and shmem.aclshmem_finalize() == 0
    gc.collect()
    assert mapped() == before + 1
    del x
    gc.collect()
    assert mapped() == before


# -- copies and signals


def test_put_get_and_signal_to_oneself(world):
    src, dst = torch.arange(16, dtype=torch.int32), shmem.aclshmem_create_tensor((16,), torch.int32)
    back = torch.zeros(16, dtype=torch.int32)
    for put, get in (
        (shmem.aclshmem_putmem, shmem.aclshmem_getmem),
        (shmem.aclshmem_putmem_nbi, shmem.aclshmem_getmem_nbi),
    ):
        dst.zero_()
        put(dst.data_ptr(), src.data_ptr(), 64, 0)
        get(back.data_ptr(), dst.data_ptr(), 64, 0)
        assert torch.equal(back, src)
    signals = shmem.create_signals(1, torch.int64)
    big = 1 << 40
    shmem.aclshmemx_putmem_signal(dst.data_ptr(), src.data_ptr(), 8, signals.data_ptr(), big, 0, 0)
    op = shmem.SignalOp.SIGNAL_ADD
    shmem.aclshmemx_putmem_signal_nbi(dst.data_ptr(), src.data_ptr(), 0, signals.data_ptr(), -1, op, 0)
    assert signals[0, 0] == big - 1
    for cmp, value in ((0, big - 1), (1, 0), (2, 0), (3, big - 1), (4, big), (5, big)):
        shmem.aclshmem_signal_wait_until(signals.data_ptr(), cmp, value)


def test_a_signal_in_raw_memory_is_int32(world):
    address = shmem.aclshmem_calloc(1, 64)
    shmem.aclshmemx_putmem_signal(address + 8, address, 0, address, -2, shmem.SignalOp.SIGNAL_SET, 0)
    assert ctypes.c_int32.from_address(address).value == -2
    assert ctypes.c_int32.from_address(address + 4).value == 0


def test_a_signal_that_nobody_sends_is_a_deadlock(world):
    signals = shmem.create_signals(4)
    with pytest.raises(DeadlockError) as caught:
        shmem.aclshmem_signal_wait_until(signals[2].data_ptr(), shmem.CmpOp.CMP_GE, 3)
    for part in ("test_shmem_one_rank.py:", "rank 0's 4 signals, element [2, 0]", ">= 3", "seen 0"):
        assert part in str(caught.value)
    shmem.barrier_all()


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda a: shmem.aclshmem_putmem(a, a, 65, 0), "do not fit into one allocation"),
        (lambda a: shmem.aclshmem_putmem(a, a, 8, 1), "pe is 1: give 0 to 0"),
        (lambda a: shmem.aclshmem_putmem(a, a, -1, 0), "elem_size is -1"),
        (lambda a: shmem.aclshmem_putmem(a, 0, 1, 0), "local address is 0"),
        (lambda a: shmem.aclshmem_putmem(4096, a, 1, 0), "no address of this rank's symmetric heap"),
        (lambda a: shmem.aclshmem_getmem(a, 4096, 1, 0), "no address of this rank's symmetric heap"),
        (lambda a: shmem.aclshmem_getmem(a, a + 4096, 1, 0), "not allocated"),
        (lambda a: shmem.aclshmem_putmem(torch.ones(4), a, 1, 0), r"symmetric address is a tensor: give its data_ptr\(\)"),
        (lambda a: shmem.aclshmem_putmem(a, None, 1, 0), "local address is None: give an int"),
        (lambda a: shmem.aclshmem_signal_wait_until(torch.ones(1), 0, 1), "signal's address is a tensor: give its data_ptr"),
        (lambda a: shmem.aclshmemx_putmem_signal(a, a, 1, a, 1, 2, 0), "sig_op is 2"),
        (lambda a: shmem.aclshmemx_putmem_signal(a, a, 1, a, 1 << 31, 0, 0), "no int32"),
        (lambda a: shmem.aclshmemx_putmem_signal(a, a, 1, a + 2, 1, 0, 0), "not aligned"),
        (lambda a: shmem.aclshmem_signal_wait_until(a, 6, 1), "cmp is 6"),
        (lambda a: shmem.peer_tensor(torch.zeros(1), 0), "not in this rank's symmetric heap"),
        (lambda a: shmem.barrier_all(3), "3 is no team"),
        (lambda a: shmem.team_destroy(0), "ends with aclshmem_finalize"),
        (lambda a: shmem.team_split_2d(0, 0), "x_range is 0"),
        (lambda a: shmem.aclshmem_team_get_config(9), "9 is no team"),
    ],
)
def test_bad_arguments_are_named(world, call, said):
    address = shmem.aclshmem_malloc(64)
    with pytest.raises(ShmemError, match=said) as caught:
        call(address)
    assert caught.value.code == codes.INVALID_PARAM


def test_a_null_signal_is_a_value_error(world):
    with pytest.raises(ValueError, match="null"):
        shmem.aclshmem_signal_wait_until(0, 0, 0)


def test_ptr_translates_only_symmetric_addresses(world):
    address = shmem.aclshmem_malloc(64)
    assert shmem.aclshmem_ptr(address, 0) == address
    assert shmem.aclshmem_ptr(address, 1) == shmem.aclshmem_ptr(4096, 0) == shmem.aclshmem_ptr(None, 0) == 0


def test_teams_of_one(world):
    team = shmem.team_split_strided(0, 0, 1, 1)
    assert team == 1 and shmem.team_n_pes(team) == 1 and shmem.team_split_2d(0, 5) == (2, 3)
    assert shmem.aclshmem_team_get_config(team).num_contexts == 0
    shmem.team_destroy(team)
    shmem.team_destroy(-1)
    assert shmem.team_my_pe(team) == -1
    for wrong in ((0, 1, 1, 1), (0, 0, 1, 2), (0, 0, 0, 2), (7, 0, 1, 1), (0, "a", 1, 1)):
        assert shmem.team_split_strided(*wrong) == codes.INVALID_PARAM


def test_all_team_ids_in_use_is_an_error(world, monkeypatch):
    monkeypatch.setattr(codes, "MAX_TEAMS", 3)
    assert [shmem.team_split_strided(0, 0, 1, 1) for _ in range(2)] == [1, 2]
    with pytest.raises(ShmemError, match="all 3 teams are in use"):
        shmem.team_split_strided(0, 0, 1, 1)


# -- the rest of the wheel's surface


def test_names_versions_and_logs(capfd, monkeypatch, tmp_path):
    assert shmem.aclshmem_info_get_version() == (1, 1)
    assert shmem.aclshmem_info_get_name().startswith("triton_dist ")
    assert shmem.set_conf_store_tls(False, "") == 0
    assert shmem.set_conf_store_tls(True, "tls") == codes.NOT_SUPPORTED
    assert shmem.set_log_level(9) == -1
    capfd.readouterr()
    from triton_dist.shmem import log

    monkeypatch.setattr(log, "_level", None)
    monkeypatch.setenv("SHMEM_LOG_LEVEL", "info")
    monkeypatch.setenv("SHMEM_LOG_TO_STDOUT", "1")
    monkeypatch.setenv("SHMEM_LOG_PATH", str(tmp_path))
    assert init() == 0 and shmem.aclshmem_finalize() == 0
    out = capfd.readouterr()
    assert "[INFO] triton_dist.shmem: rank 0: initialised: 1 ranks" in out.out and not out.err
    assert "initialised" in next(tmp_path.iterdir()).read_text()
    assert shmem.set_log_level(3) == 0
    assert init() == 0 and shmem.aclshmem_finalize() == 0
    assert not capfd.readouterr().out


def test_an_unknown_log_level_is_said_once_and_warnings_are_shown(capfd, monkeypatch):
    from triton_dist.shmem import log

    monkeypatch.setattr(log, "_level", None)
    monkeypatch.setenv("SHMEM_LOG_LEVEL", "loud")
    log.warn("first")
    log.info("not shown")
    log.warn("second")
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("[WARN] triton_dist.shmem: SHMEM_LOG_LEVEL='loud': give DEBUG, INFO")
    assert said[1:] == ["[WARN] triton_dist.shmem: first", "[WARN] triton_dist.shmem: second"]


def test_every_name_of_the_wheel_is_here():
    names = """aclshmem_init aclshmem_finalize aclshmem_finialize aclshmem_get_unique_id aclshmem_init_using_unique_id
        aclshmemx_init_status set_conf_store_tls aclshmem_malloc aclshmem_calloc aclshmem_align aclshmem_free
        aclshmem_create_tensor aclshmem_free_tensor aclshmem_ptr aclshmemx_get_heap_base my_pe pe_count team_my_pe
        team_n_pes team_split_strided team_split_2d team_translate_pe team_destroy aclshmem_team_get_config
        aclshmem_putmem aclshmem_putmem_nbi aclshmem_getmem aclshmem_getmem_nbi aclshmemx_putmem_signal
        aclshmemx_putmem_signal_nbi aclshmem_signal_wait_until set_log_level aclshmem_global_exit
        aclshmem_info_get_version aclshmem_info_get_name InitAttr OptionalAttr InitStatus TeamConfig"""
    for name in names.split():
        assert name in shmem.__all__ and getattr(shmem, name).__doc__, name


def test_finalize_gives_the_memory_back_without_a_garbage_collection():
    def heaps():
        with open("/proc/self/maps") as file:
            return sum("triton_dist.heap" in line for line in file)

    before = heaps()
    gc.disable()
    try:
        for _ in range(3):
            assert shmem.aclshmem_init(shmem.InitAttr(0, 1, "", 1 << 20)) == 0
            assert shmem.aclshmem_finalize() == 0
        assert heaps() == before
    finally:
        gc.enable()
