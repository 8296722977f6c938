"""The host API on two ranks: what the one writes the other sees, and who disagrees is named on both."""

import ctypes
import os
import random
import time

import pytest
import torch

from triton_dist import context as table
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError, DeadlockError, ShmemError
from triton_dist.shmem import codes
from triton_dist.testing import shared_ranks


def caught(kind, call, *args):
    """(class name, code, text) of what the call raises."""
    with pytest.raises(kind) as info:
        call(*args)
    return type(info.value).__name__, info.value.code if isinstance(info.value, ShmemError) else None, str(info.value)


def write_and_read_the_peer():
    me, peer = shmem.my_pe(), 1 - shmem.my_pe()
    x = shmem.aclshmem_create_tensor((4, 8), torch.float16)
    x.fill_(me)
    shmem.barrier_all()
    theirs = shmem.peer_tensor(x, peer)
    assert theirs.shape == (4, 8) and (theirs == peer).all()
    shmem.barrier_all()
    shmem.peer_tensor(x[1:3, ::2], peer).fill_(10 + me)
    shmem.barrier_all()
    expected = torch.full((4, 8), float(me), dtype=torch.float16)
    expected[1:3, ::2] = 10 + peer
    assert torch.equal(x, expected)
    assert shmem.aclshmem_ptr(x.data_ptr(), peer) == theirs.data_ptr()
    assert ctypes.string_at(shmem.aclshmem_ptr(x.data_ptr(), peer), 64) == bytes(theirs.view(torch.uint8).view(-1)[:64])
    ctx = shmem.context()
    assert ctx[table.RANK] == me and ctx[table.NUM_RANKS] == 2
    assert x.data_ptr() + int(ctx[table.DELTAS + peer]) == theirs.data_ptr()
    assert table.heap_map.owner(theirs.data_ptr()) == (peer, x.data_ptr() - shmem.aclshmemx_get_heap_base())
    assert caught(ShmemError, shmem.peer_tensor, theirs, me)[1] == codes.INVALID_PARAM
    low, high = table.heap_map.span
    return (
        shmem.aclshmemx_get_heap_base() - low,
        theirs.data_ptr() - low,
        all(low < b < high for b in table.heap_map.bases),
    )


def test_peers_see_each_others_tensors_at_bases_that_differ():
    (own0, peer0, inside0), (own1, peer1, inside1) = shared_ranks(2).run(write_and_read_the_peer)
    assert len({own0, own1, peer0, peer1}) == 4 and inside0 and inside1


def put_and_signal(rounds):
    me, peer = shmem.my_pe(), 1 - shmem.my_pe()
    inbox = shmem.aclshmem_create_tensor((2, 256), torch.int64)
    signals = shmem.create_signals(2)
    ready, free = signals[0].data_ptr(), signals[1].data_ptr()
    outbox = torch.zeros(256, dtype=torch.int64)
    for epoch in range(1, rounds + 1):
        outbox.fill_(epoch * 10 + me)
        slot = inbox[epoch % 2]
        shmem.aclshmemx_putmem_signal(
            slot.data_ptr(), outbox.data_ptr(), slot.nbytes, ready, 1, shmem.SignalOp.SIGNAL_ADD, peer
        )
        shmem.aclshmem_signal_wait_until(ready, shmem.CmpOp.CMP_GE, epoch)
        assert (slot == epoch * 10 + peer).all()
        shmem.aclshmemx_putmem_signal(free, free, 0, free, epoch, shmem.SignalOp.SIGNAL_SET, peer)
        shmem.aclshmem_signal_wait_until(free, shmem.CmpOp.CMP_GE, epoch - 1)
    back = torch.zeros(256, dtype=torch.int64)
    shmem.barrier_all()
    shmem.aclshmem_getmem(back.data_ptr(), inbox[rounds % 2].data_ptr(), back.nbytes, peer)
    assert (back == rounds * 10 + me).all()


def test_a_signal_comes_after_its_data():
    shared_ranks(2).run(put_and_signal, 300)


def disagree():
    me = shmem.my_pe()
    said = [
        caught(CollectiveMismatchError, shmem.aclshmem_malloc, 4096 + 64 * me),
        caught(CollectiveMismatchError, shmem.aclshmem_create_tensor, (4, 4 + me)),
        caught(CollectiveMismatchError, shmem.barrier_all if me else shmem.create_signals, *([] if me else [3])),
        caught(CollectiveMismatchError, shmem.team_split_strided, 0, 0, 1, 1 + me),
        caught(CollectiveMismatchError, shmem.check_alike, f"create_context(M={me})"),
    ]
    if me:
        said.append(caught(CollectiveMismatchError, shmem.barrier_all))
    else:
        assert shmem.aclshmem_finalize() == codes.INVALID_PARAM
        said.append(("", -1, shmem.last_error()))
    said.append(caught(ShmemError, shmem.aclshmem_malloc, 0 if me else 64))
    a, b = shmem.aclshmem_malloc(64), shmem.aclshmem_malloc(64)
    said.append(caught(CollectiveMismatchError, shmem.aclshmem_free, a if me else b))
    shmem.aclshmem_free(a)
    shmem.aclshmem_free(b)
    assert not table.heap_map.live
    return said


def test_ranks_that_disagree_are_named_on_both():
    one, other = shared_ranks(2).run(disagree)
    for (kind, code, text), (kind1, code1, text1) in zip(one, other, strict=True):
        assert code == code1 == codes.INVALID_PARAM and {kind, kind1} - {""} in (
            {"CollectiveMismatchError"},
            {"ShmemError"},
        )
        assert "rank 1" in text and "rank 1" in text1
    assert "rank 0: aclshmem_malloc(4096), called at " in one[0][2] and "test_shmem_two_ranks.py:" in one[0][2]
    assert "rank 1: aclshmem_malloc(4160)" in one[0][2]
    assert "rank 1: aclshmem_malloc(0): size is 0" in one[6][2]


def exhaust():
    x = shmem.aclshmem_malloc(1 << 20)
    said = (
        caught(ShmemError, shmem.aclshmem_malloc, 60 << 20),
        caught(ShmemError, shmem.aclshmem_create_tensor, (1 << 30,)),
    )
    shmem.aclshmem_free(x)
    shmem.aclshmem_free(shmem.aclshmem_malloc(8 << 20))
    return said


def test_no_memory_is_the_same_error_on_both():
    one, other = shared_ranks(2).run(exhaust, heap_bytes=8 << 20)
    for (_, code, text), (_, code1, text1) in zip(one, other, strict=True):
        assert code == code1 == codes.MALLOC_FAILED
        assert text.partition(":")[2] == text1.partition(":")[2] and "7340032" in text


def churn(seed):
    rng, live = random.Random(seed), []
    for _ in range(150):
        if live and rng.random() < 0.45:
            shmem.aclshmem_free_tensor(live.pop(rng.randrange(len(live))))
        else:
            try:
                live.append(shmem.aclshmem_create_tensor((rng.randrange(200), rng.randrange(50)), torch.int32))
            except ShmemError as error:
                assert error.code == codes.MALLOC_FAILED
                continue
            live[-1].fill_(len(live))
    offsets = [x.storage_offset() * 4 for x in live]
    assert len(table.heap_map.live) == len(live)
    return offsets


def test_random_allocations_stay_symmetric():
    one, other = shared_ranks(2).run(churn, 7, heap_bytes=256 << 10)
    assert one == other and one


def one_waits_one_meets():
    signals = shmem.create_signals(2)
    if shmem.my_pe() == 0:
        said = caught(DeadlockError, shmem.aclshmem_signal_wait_until, signals[1].data_ptr(), 0, 5)
    else:
        said = caught(DeadlockError, shmem.barrier_all)
    shmem.barrier_all()  # afterwards all is as before
    shmem.aclshmem_free_tensor(signals)
    return said[2]


def test_a_barrier_that_the_other_cannot_reach_is_a_deadlock_with_both_places():
    for text in shared_ranks(2).run(one_waits_one_meets):
        assert "rank 0: in shmem.aclshmem_signal_wait_until, called at " in text
        assert "waits for rank 0's 2 signals, element [1, 0]" in text
        assert "rank 1: in shmem.barrier_all(0) on team 0 (world), called at " in text
        assert "not arrived yet: rank 0" in text


def init_with(sizes, ranks=None, n_ranks=2):
    me = int(os.environ["RANK"])
    code = shmem.aclshmem_init(shmem.InitAttr(me if ranks is None else ranks[me], n_ranks, "", sizes[me]))
    said = shmem.last_error() if code else ""
    if not code:
        assert shmem.aclshmem_finalize() == 0
    return code, said


def test_heap_sizes_that_differ_are_refused_on_both():
    for code, said in shared_ranks(2).run(init_with, [1 << 20, 2 << 20], init=False):
        assert code == codes.INVALID_PARAM
        assert "rank 0: 1048576, rank 1: 2097152" in said


def test_one_bad_rank_fails_both_at_once():
    for code, said in shared_ranks(2).run(init_with, [1 << 20, 0], init=False):
        assert code == codes.INVALID_PARAM and "rank 1 failed: InitAttr.local_mem_size is 0" in said


def descriptors():
    """What this process holds open of its own segments and of its peers' processes."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the listing's own
            pass
    return sum("memfd:" in link or "pidfd" in link for link in links)


def again_and_again():
    me, bases = int(os.environ["RANK"]), []
    assert shmem.aclshmem_init(shmem.InitAttr(me, 2, "", 0)) == codes.INVALID_PARAM  # a failure before does no harm
    for turn in range(5):
        if turn == 1:  # from here on nothing may pile up
            before = descriptors()
        assert shmem.aclshmem_init(shmem.InitAttr(me, 2, "", (turn + 1) << 20)) == 0, shmem.last_error()
        x = shmem.aclshmem_create_tensor((16,), torch.int32)
        x.fill_(turn * 2 + me)
        shmem.barrier_all()
        assert (shmem.peer_tensor(x, 1 - me) == turn * 2 + 1 - me).all()
        bases.append(x)
        assert shmem.aclshmem_finalize() == 0
    assert descriptors() == before
    return [int(x[0]) for x in bases]


def test_init_after_finalize_works_and_old_tensors_keep_their_values():
    assert shared_ranks(2).run(again_and_again, init=False) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def swift_barriers(rounds):
    x = shmem.aclshmem_create_tensor((1,), torch.int64)
    peer = shmem.peer_tensor(x, 1 - shmem.my_pe())
    for turn in range(rounds):
        x.fill_(turn)
        shmem.barrier_all()
        assert int(peer) == turn
        shmem.barrier_all()


def test_barriers_in_a_loop_never_let_a_rank_slip_ahead():
    shared_ranks(2).run(swift_barriers, 500)


def wait_too_long():
    over, said = shmem.aclshmem_create_tensor((1,), torch.int32), ""
    over.zero_()
    shmem.barrier_all()
    if shmem.my_pe() == 1:
        end = time.monotonic() + 60
        while over.item() == 0 and time.monotonic() < end:  # host code that is no wait of the library
            time.sleep(0.01)
    else:
        said = caught(RuntimeError, shmem.barrier_all)[2]
        shmem.peer_tensor(over, 1).fill_(1)
    shmem.barrier_all()
    return said


def test_a_rank_in_host_code_ends_a_wait_by_its_limit():
    from triton_dist.testing import run_ranks

    text = run_ranks(wait_too_long, 2, env={"TRITON_DIST_WAIT_TIMEOUT": "3"})[0]
    assert "longer than 3 s" in text and "not arrived yet: rank 1" in text
