"""The ascend platform's host calls, against a stand-in of the `shmem` wheel and of torch_npu that records them.

Host functions really work here: the stand-in's heaps are CPU memory that the ranks share. No NPU takes part."""

import os
import random
import sys

import pytest
import torch

from triton_dist import context as table
from triton_dist import shmem
from triton_dist.errors import BackendError, CollectiveMismatchError, PeerLostError, ShmemError
from triton_dist.shmem import codes
from triton_dist.testing import Ranks, RanksFailed

MIB = 1 << 20
INIT = "aclshmem_init_using_unique_id"
COPIES = "aclshmem_putmem", "aclshmem_getmem", "aclshmemx_putmem"
BEGIN = ["aclshmemx_init_status", "set_conf_store_tls", "aclshmem_get_unique_id", INIT, "aclshmem_align"]


@pytest.fixture(scope="module")
def one(ascend_machine):
    with Ranks(1, env=ascend_machine()) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two(ascend_machine):
    with Ranks(2, env=ascend_machine()) as ranks:
        yield ranks


def enter(**answers):
    """In a rank: puts the stand-in in place; returns its record."""
    for place in reversed(os.environ["STAND_IN_PATH"].split(os.pathsep)):
        if place not in sys.path:
            sys.path.insert(0, place)
    import recording

    recording.reset(**answers)
    return recording


def init(nbytes=MIB, **fields):
    attributes = shmem.InitAttr(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "", nbytes)
    for name, value in fields.items():
        setattr(attributes.option_attr, name, value)
    return shmem.aclshmem_init(attributes)


def wheel_calls(record, without=("synchronize", "construct_tensor_from_ptr", "aclshmem_info_get_version")):
    return [name for name in record.names() if name not in without]


# -- one rank: which calls, in which order, with which arguments


def life_of_a_rank():
    record = enter()
    assert init(3 * MIB + 5) == 0, shmem.last_error()
    x = shmem.aclshmem_create_tensor((5, 7), torch.float16)
    shmem.aclshmem_free_tensor(x)
    assert shmem.aclshmem_finalize() == 0
    return record.calls


def test_the_wheel_is_called_in_its_documented_order_with_the_right_arguments(one):
    (calls,) = one.run(life_of_a_rank, init=False)
    calls = [(name, args) for name, args in calls if name not in ("synchronize", "aclshmem_info_get_version")]
    assert [name for name, _ in calls] == [
        "set_device", *BEGIN, "construct_tensor_from_ptr", "aclshmem_free", "aclshmem_finalize"
    ]  # fmt: skip
    of = dict(calls)
    assert of["set_device"] == (0,)
    assert of["set_conf_store_tls"] == (False, "")  # nobody asked for TLS
    rank, n_ranks, whole, uid = of[INIT]
    assert (rank, n_ranks) == (0, 1) and isinstance(uid, bytes) and len(uid) == 128
    assert whole % (2 * MIB) == 0 and whole >= 3 * MIB + 5 + 4 * MIB
    alignment, nbytes = of["aclshmem_align"]
    assert alignment == 2 * MIB and 3 * MIB + 5 <= nbytes <= whole
    address, shape, dtype, device = of["construct_tensor_from_ptr"]
    assert of["aclshmem_free"] == (address,) and shape == (3 * MIB + 5,) and dtype == torch.uint8
    assert device == "npu:0"


def asks_for_tls():
    record = enter()
    assert shmem.set_conf_store_tls(True, "tlsCaPath:/x") == 0
    code = init()
    asked = dict(record.calls)["set_conf_store_tls"]
    shmem.aclshmem_finalize()
    assert shmem.set_conf_store_tls(False, "") == 0
    return code, asked, record.names().index("set_conf_store_tls") < record.names().index("aclshmem_get_unique_id")


def test_tls_is_what_the_user_asked_for_and_is_told_before_the_unique_id_is_made(one):
    assert one.run(asks_for_tls, init=False) == [(0, (True, "tlsCaPath:/x"), True)]


def answers_with(call, answer):
    """Init and finalize while `call` answers so; then both once more."""
    record = enter(**{call: answer})
    began = init()
    ended = shmem.aclshmem_finalize() if began == 0 else None
    said, calls = shmem.last_error(), wheel_calls(record)
    if "aclshmem_finalize" == call:  # the stand-in is still initialised: a process can't go on from that
        import shmem as wheel

        record.reset()
        assert wheel.aclshmem_finalize() == 0
    record.reset()
    assert (init(), shmem.aclshmem_finalize()) == (0, 0), shmem.last_error()
    return began, ended, said, calls


CODES = [getattr(codes, name) for name in (
    "INVALID_PARAM", "INVALID_VALUE", "SMEM", "INNER", "NOT_INITED", "BOOTSTRAP", "TIMEOUT", "MALLOC_FAILED", "DL_FUNC",
    "INNER_TIMEOUT", "UNDER_API_UNLOAD", "NOT_SUPPORTED",
)]  # fmt: skip


def all_answers(calls, answers):
    return [answers_with(call, answer) for call in calls for answer in answers]


def test_every_code_of_the_wheel_is_passed_on_with_the_calls_name(one):
    ((*told,),) = one.run(all_answers, ["set_conf_store_tls", INIT], CODES, init=False)
    assert [began for began, *_ in told] == CODES * 2
    for (_, _, said, calls), call, code in zip(told, ["set_conf_store_tls"] * 12 + [INIT] * 12, CODES * 2):
        assert f"the shmem wheel's {call} returned {code} " in said
        assert calls[-1] == call, "nothing of the wheel is called after its refusal"


def test_a_code_of_the_wheels_finalize_is_returned_by_ours(one):
    ((*told,),) = one.run(all_answers, ["aclshmem_finalize"], CODES, init=False)
    assert [(began, ended) for began, ended, *_ in told] == [(0, code) for code in CODES]
    assert all("aclshmem_finalize returned" in said and calls[-1] == "aclshmem_finalize" for *_, said, calls in told)


def test_an_exception_of_the_wheel_becomes_a_code_and_an_initialised_wheel_is_finalized(one):
    broken = RuntimeError("aclInit failed")
    before = ["aclshmemx_init_status", "set_conf_store_tls", "aclshmem_get_unique_id", INIT]
    ((*told,),) = one.run(all_answers, [*before, "aclshmem_align"], [broken], init=False)
    for call, (began, ended, said, calls) in zip([*before, "aclshmem_align"], told):
        assert (began, ended) == (codes.INNER, None)
        assert f"{call} raised RuntimeError: aclInit failed" in said
        assert calls[-1] == ("aclshmem_finalize" if call == "aclshmem_align" else call)
        assert "aclshmem_free" not in calls


def test_an_allocation_that_gives_null_is_no_heap(one):
    ((began, _, said, calls),) = one.run(answers_with, "aclshmem_align", 0, init=False)
    assert began == codes.MALLOC_FAILED and "aclshmem_align" in said and calls[-1] == "aclshmem_finalize"


def test_a_free_that_raises_does_not_keep_the_wheel_from_being_finalized(one):
    ((began, ended, said, calls),) = one.run(answers_with, "aclshmem_free", RuntimeError("stream"), init=False)
    assert (began, ended) == (0, codes.INNER) and "aclshmem_free raised" in said and calls[-1] == "aclshmem_finalize"


def out_of_turn():
    record = enter()
    told = [shmem.aclshmem_finalize(), init(), init(), shmem.aclshmemx_init_status()]
    x = shmem.aclshmem_create_tensor((4,), torch.int32)
    told += [shmem.aclshmem_finalize(), shmem.aclshmem_finalize(), shmem.my_pe(), shmem.aclshmem_ptr(x.data_ptr(), 0)]
    count = len(record.calls)
    for call in (
        lambda: shmem.aclshmem_malloc(8), lambda: shmem.aclshmem_free_tensor(x), shmem.barrier_all, shmem.context,
        lambda: shmem.aclshmem_putmem(x.data_ptr(), x.data_ptr(), 4, 0), shmem.device,
    ):  # fmt: skip
        with pytest.raises(ShmemError) as info:
            call()
        told.append(info.value.code)
    return told, wheel_calls(record), len(record.calls) - count


def test_init_twice_finalize_twice_and_use_after_finalize_never_reach_the_wheel(one):
    ((told, calls, later),) = one.run(out_of_turn, init=False)
    assert told == [-5, 0, -1, codes.InitStatus.INITIALIZED, 0, -5, -1, 0] + [codes.NOT_INITED] * 6
    assert calls == ["set_device", *BEGIN, "aclshmem_free", "aclshmem_finalize"] and later == 0


def wheel_in_use():
    record = enter()
    import shmem as wheel

    assert wheel.aclshmem_init_using_unique_id(0, 1, 2 * MIB, wheel.aclshmem_get_unique_id()) == 0
    record.reset()
    code, said, calls = init(), shmem.last_error(), wheel_calls(record)
    assert wheel.aclshmem_finalize() == 0
    return code, said, calls


def test_a_wheel_that_somebody_else_initialised_is_left_alone(one):
    ((code, said, calls),) = one.run(wheel_in_use, init=False)
    assert code == codes.INVALID_PARAM and "initialised already" in said and "not both" in said
    assert calls == ["set_device", "aclshmemx_init_status"]


def on_devices(count, environment, nbytes=MIB):
    enter()
    changed = {"STAND_IN_NPUS": str(count), **environment}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        from triton_dist import backends

        code, said = init(nbytes), shmem.last_error()
        device = str(shmem.device()) if code == 0 else None
        if code == 0:
            assert shmem.aclshmem_finalize() == 0
        return code, said, device, backends.platform().device_count(), backends.platform().process_group
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def test_too_few_npus_are_named_before_the_wheel_is_called(one):
    ((code, said, *rest),) = one.run(on_devices, 0, {"ASCEND_RT_VISIBLE_DEVICES": "7,8"}, init=False)
    assert code == codes.NOT_SUPPORTED and "no NPU is visible" in said and "7,8" in said and rest == [None, 0, "hccl"]
    for local in ("1", "5"):
        ((code, said, *_),) = one.run(on_devices, 2, {"LOCAL_WORLD_SIZE": "6", "LOCAL_RANK": local}, init=False)
        assert code == codes.NOT_SUPPORTED
        assert "6 ranks run on this host but it has 2 NPUs: start at most 2" in said and "TRITON_DIST_BACKEND=cpu" in said


def test_the_rank_uses_the_npu_of_its_local_rank_or_the_one_that_it_was_given(one):
    ((code, said, device, *_),) = one.run(on_devices, 4, {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, init=False)
    assert (code, device) == (0, "npu:3"), said
    given = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "ASCEND_RT_VISIBLE_DEVICES": "6"}
    ((code, said, device, *_),) = one.run(on_devices, 1, given, init=False)
    assert (code, device) == (0, "npu:0"), said


def test_a_heap_that_the_wheel_cannot_hold_is_refused_with_the_limit(one):
    ((code, said, *_),) = one.run(on_devices, 1, {}, (40 << 30) - MIB, init=False)
    assert code == codes.INVALID_PARAM and str((40 << 30) - (6 << 20)) in said


# -- two ranks


def hosts_work(seed):
    """Every host function that touches memory; returns where the heaps lie here."""
    record = enter()
    import torch.distributed as dist

    me, peer = int(os.environ["RANK"]), 1 - int(os.environ["RANK"])
    dist.init_process_group(shmem.process_group_backend())
    assert init(4 * MIB) == 0, shmem.last_error()
    assert (shmem.my_pe(), shmem.pe_count(), str(shmem.device())) == (me, 2, f"npu:{me}")
    import shmem as wheel

    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, 33, 65, generator=generator)
    x = shmem.aclshmem_create_tensor((33, 65), torch.float32)
    x.copy_(both[me])
    ctx = shmem.context()
    shmem.barrier_all()
    theirs = shmem.peer_tensor(x, peer)
    assert torch.equal(theirs, both[peer]) and theirs.data_ptr() != x.data_ptr()
    assert shmem.aclshmem_ptr(x.data_ptr(), peer) == wheel.aclshmem_ptr(x.data_ptr(), peer) == theirs.data_ptr()
    delta = wheel.aclshmem_ptr(shmem.aclshmemx_get_heap_base(), peer) - shmem.aclshmemx_get_heap_base()
    assert ctx.tolist() == table.table_words(me, ctx[table.DELTAS :].tolist(), 4 * MIB)
    assert ctx[table.DELTAS + me] == 0 and int(ctx[table.DELTAS + peer]) == delta and delta % 64 == 0
    assert x.data_ptr() + delta == theirs.data_ptr() and x.data_ptr() % 512 == 0

    inbox, mine = shmem.aclshmem_create_tensor((33, 65)), both[me] * 2
    inbox.fill_(float("nan"))
    signals = shmem.create_signals(3)
    assert not signals.any()
    shmem.barrier_all()
    nbytes = mine.nbytes
    shmem.aclshmemx_putmem_signal(inbox.data_ptr(), mine.data_ptr(), nbytes, signals[1].data_ptr(), 5, 0, peer)
    shmem.aclshmem_signal_wait_until(signals[1].data_ptr(), shmem.CmpOp.CMP_GE, 5)
    assert torch.equal(inbox, both[peer] * 2)
    shmem.aclshmemx_putmem_signal_nbi(inbox.data_ptr(), mine.data_ptr(), 0, signals[1].data_ptr(), 7, 1, peer)
    shmem.aclshmem_signal_wait_until(signals[1].data_ptr(), shmem.CmpOp.CMP_EQ, 12)
    assert torch.equal(inbox, both[peer] * 2) and signals[:, 0].tolist() == [0, 12, 0], "a signal alone writes no data"
    shmem.barrier_all()
    local = torch.full_like(mine, float("nan"))
    shmem.aclshmem_getmem(local.data_ptr(), x.data_ptr(), nbytes, peer)
    assert torch.equal(local, both[peer])
    shmem.barrier_all()
    shmem.aclshmem_putmem_nbi(x.data_ptr(), mine.data_ptr(), 65 * 4, peer)
    shmem.aclshmem_getmem_nbi(local.data_ptr(), inbox.data_ptr(), nbytes, peer)
    shmem.barrier_all()
    assert torch.equal(local, both[me] * 2) and torch.equal(x, torch.cat([both[peer][:1] * 2, both[me][1:]]))
    wide = shmem.create_signals(1, torch.int64)
    with pytest.raises(RuntimeError, match=f"rank {me}: ascend: host calls signal int32 words only.*64 bits"):
        shmem.aclshmemx_putmem_signal(inbox.data_ptr(), mine.data_ptr(), 4, wide.data_ptr(), 1, 0, peer)

    swapped = [shmem.team_split_strided(0, 1, 1, 1), shmem.team_split_strided(0, 0, 1, 2)]
    assert (swapped[0] == -1) == (me == 0) and shmem.team_n_pes(swapped[1]) == 2
    row, column = shmem.team_split_2d(0, 1)
    assert shmem.context(row).tolist()[1:3] == [0, 1] and shmem.context(column).tolist()[1:3] == [me, 2]
    address = shmem.aclshmem_calloc(8, 4)
    words = shmem.aclshmem_align(4096, 64)
    assert words % 4096 == 0 and shmem.aclshmem_ptr(address, peer) == address + delta
    for one in (address, words):
        shmem.aclshmem_free(one)
    with pytest.raises(ShmemError, match="was freed already"):
        shmem.aclshmem_free(address)
    for one in (x, inbox, signals, wide):
        shmem.aclshmem_free_tensor(one)
    said = record.names()
    copies = [index for index, name in enumerate(said) if name.startswith(COPIES)]
    assert len(copies) == 5
    assert all(said[index - 1] == "synchronize_current_stream" for index in copies), "what fills src comes first"
    total = torch.tensor([me + 1.0])
    dist.all_reduce(total)
    assert shmem.aclshmem_finalize() == 0 and ctx[table.MAGIC_WORD] == 0
    return delta, total.item()


def test_host_functions_work_on_two_ranks_and_the_context_has_the_wheels_addresses(two):
    (first, sum0), (second, sum1) = two.run(hosts_work, random.randrange(1 << 30), init=False)
    assert first != 0 and second != 0 and sum0 == sum1 == 3.0


def sizes_differ():
    record, me = enter(), int(os.environ["RANK"])
    code, said = init(MIB * (1 + me)), shmem.last_error()
    begun = INIT in record.names()
    assert init() == 0
    with pytest.raises(CollectiveMismatchError) as info:
        shmem.aclshmem_malloc(64 + me)
    with pytest.raises(CollectiveMismatchError):
        shmem.aclshmem_create_tensor((8, 8 + me))
    after = shmem.aclshmem_malloc(64) - shmem.aclshmemx_get_heap_base()
    assert shmem.aclshmem_finalize() == 0
    return code, said, begun, str(info.value), after


def test_sizes_that_differ_between_ranks_are_named_on_both_and_nothing_is_allocated(two):
    told = two.run(sizes_differ, init=False)
    for code, said, begun, text, after in told:
        assert code == codes.INVALID_PARAM and f"rank 0: {MIB}, rank 1: {2 * MIB}" in said and not begun
        assert "aclshmem_malloc(64)" in text and "aclshmem_malloc(65)" in text and after == 0


def fails_on_rank_1(call, answer):
    record = enter(**({call: answer} if os.environ["RANK"] == "1" else {}))
    code, said, calls = init(), shmem.last_error(), wheel_calls(record)
    record.reset()
    assert (init(), shmem.aclshmem_finalize()) == (0, 0), shmem.last_error()
    return code, said, calls


def test_a_failure_on_one_rank_is_told_to_both_and_the_next_init_works(two):
    (code0, said0, calls0), (code1, said1, calls1) = two.run(fails_on_rank_1, "set_conf_store_tls", -9, init=False)
    assert code0 == code1 == -9 and said0 == said1 and "rank 1 failed: the shmem wheel's set_conf_store_tls" in said0
    assert INIT not in calls0 + calls1
    null = two.run(fails_on_rank_1, "aclshmem_ptr", 0, init=False)
    for code, said, calls in null:
        assert code == codes.SMEM and "rank 1 failed" in said and "rank 0: no HCCS path" in said
        assert calls[-1] == "aclshmem_finalize" and "aclshmem_free" not in calls


def one_npu_for_both():
    record = enter()
    os.environ["ASCEND_RT_VISIBLE_DEVICES"], os.environ["STAND_IN_NPUS"] = "3", "1"
    try:
        return init(), shmem.last_error(), INIT in record.names()
    finally:
        del os.environ["ASCEND_RT_VISIBLE_DEVICES"], os.environ["STAND_IN_NPUS"]


def test_two_ranks_on_one_npu_are_named(two):
    for code, said, begun in two.run(one_npu_for_both, init=False):
        assert code == codes.INVALID_PARAM and "ranks 0 and 1 use the same NPU (3 of " in said and not begun


def across_hosts(engine):
    record, peer = enter(), 1 - int(os.environ["RANK"])
    os.environ["STAND_IN_UNREACHABLE"] = str(peer)
    try:
        code = init(data_op_engine_type=engine, shm_create_timeout=33)
        if code:
            return code, shmem.last_error()
        (attributes,) = dict(record.calls)["aclshmem_init"]
        x = shmem.aclshmem_create_tensor((4,))
        with pytest.raises(ShmemError, match=f"do not reach the heap of rank {peer}: it is on another host"):
            shmem.peer_tensor(x, peer)
        x.zero_()
        shmem.barrier_all()
        mine = torch.arange(4.0) + peer
        shmem.aclshmem_putmem(x.data_ptr(), mine.data_ptr(), 16, peer)  # the wheel's own engine goes there all the same
        shmem.barrier_all()
        assert x.tolist() == [1.0 - peer + i for i in range(4)]
        assert shmem.aclshmem_ptr(x.data_ptr(), peer) == 0
        assert shmem.aclshmem_finalize() == 0
        options = attributes.option_attr
        about = attributes.my_rank, attributes.n_ranks, int(options.data_op_engine_type), options.shm_create_timeout
        return code, attributes.ip_port, about, INIT in record.names()
    finally:
        del os.environ["STAND_IN_UNREACHABLE"]


def test_peers_without_an_address_need_an_engine_that_reaches_them(two):
    for code, said in two.run(across_hosts, codes.OpEngineType.MTE, init=False):
        assert code == codes.SMEM and "no HCCS path" in said and "ROCE" in said
    engine = codes.OpEngineType.MTE | codes.OpEngineType.ROCE
    (_, address0, about0, by_id0), (_, address1, about1, by_id1) = two.run(across_hosts, engine, init=False)
    assert address0 == address1 and address0.startswith("tcp://") and not (by_id0 or by_id1)
    assert (about0, about1) == ((0, 2, 5, 33), (1, 2, 5, 33))


def test_what_is_missing_is_named_before_torch_is_asked_for_devices_or_a_process_group(monkeypatch):
    from triton_dist.backends import ascend

    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    for call in (ascend.Platform().device_count, ascend.Platform().load):
        with pytest.raises(BackendError, match="CANN: found no folder at ASCEND_HOME_PATH=/nowhere"):
            call()


def peer_dies():
    record = enter()
    assert init() == 0
    if os.environ["RANK"] == "1":
        os._exit(3)
    with pytest.raises(PeerLostError, match="rank 1 exited"):
        shmem.barrier_all()
    code = shmem.aclshmem_finalize()
    return code, wheel_calls(record), shmem.my_pe()


def test_a_lost_peer_ends_waits_and_no_collective_call_of_the_wheel_waits_for_it(two):  # last: it ends the two ranks
    with pytest.raises(RanksFailed) as info:
        two.run(peer_dies, init=False)
    code, calls, pe = info.value.results[0]
    assert code == codes.BOOTSTRAP and pe == -1
    assert calls[-1] == "aclshmem_ptr", "the wheel's free and finalize meet the peers"
