"""What goes wrong between ranks ends soon, on every rank, in an error that says where and why."""

import os
import re
import signal
import time

import pytest

import triton_dist
import triton_dist.language as dl
from triton_dist import shmem
from triton_dist.errors import DeadlockError, PeerLostError, SymmetricAccessError, UnsupportedError, WaitTimeoutError
from triton_dist.testing import Ranks, RanksFailed, shared_ranks

import torch
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not triton_dist.interpreted, reason="checks the CPU engine; kernels are compiled here"),
]


SOON_S = 20  # a second or two on a machine of its own; tests may have to share theirs


def line_of(mark):
    with open(__file__) as source:
        return next(i for i, text in enumerate(source, 1) if f"# {mark}" in text)


def caught(kind, call, *args, **kwargs):
    """(text, seconds) of the error that the call raises."""
    start = time.monotonic()
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    return str(error.value), time.monotonic() - start


@triton.jit
def exchange(sig, slot, value, ctx):
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    dl.notify(dl.signal_at(sig, 0), right, ctx, 1, "add")
    dl.wait(dl.signal_at(sig, slot), value, ctx)  # the library's wait


@triton.jit
def exchange_by_hand(sig, slot, value, ctx):
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    dl.notify(dl.signal_at(sig, 0), right, ctx, 1)
    while tl.load(dl.signal_at(sig, slot), volatile=True) < value:  # the user's wait
        pass


def deadlock(by_hand):
    sig = shmem.create_signals(3)
    kernel = exchange_by_hand if by_hand else exchange
    return caught(DeadlockError, kernel[(1,)], sig, 2, 7, shmem.context())


@pytest.mark.parametrize("by_hand", [False, True], ids=["dl.wait", "user loop"])
def test_a_signal_that_nobody_sends_is_reported_on_every_rank_soon(by_hand):
    ranks = Ranks(3)
    with ranks:
        results = ranks.run(deadlock, by_hand)
    line = line_of("the user's wait" if by_hand else "the library's wait")
    for rank, (text, seconds) in enumerate(results):
        assert seconds < SOON_S
        assert f"rank {rank}: deadlock: every rank is blocked" in text
        for peer in range(3):
            assert f"rank {peer}: kernel exchange" in text, text
            assert re.search(rf"rank {peer}'s 3 signals, element \[2, 0\]", text), text
        assert text.count(f"test_reports.py:{line} ") == 3 and "wants >= 7" in text or by_hand
        assert "program (0, 0, 0)" in text and "sees 0" in text


def deadlock_between_kernel_and_barrier():
    sig = shmem.create_signals(3)
    if shmem.my_pe() == 0:
        return caught(DeadlockError, exchange[(1,)], sig, 2, 1, shmem.context())
    return caught(DeadlockError, shmem.barrier_all)


def test_a_kernel_that_waits_for_a_rank_in_a_host_barrier_is_a_deadlock():
    for text, seconds in Ranks(2).run(deadlock_between_kernel_and_barrier):
        assert seconds < SOON_S
        assert "kernel exchange" in text and "barrier_all" in text and "test_reports.py" in text


def many_correct_launches():
    sig = shmem.create_signals(1)
    for epoch in range(1, 1001):
        exchange[(1,)](sig, 0, epoch, shmem.context())
    return True


def test_a_thousand_correct_launches_give_no_report():
    assert shared_ranks(2).run(many_correct_launches, timeout=120) == [True, True]


def wait_while_the_peer_is_killed(seconds):
    sig = shmem.create_signals(3)
    if shmem.my_pe() == 1:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    text, took = caught(PeerLostError, exchange[(1,)], sig, 2, 1, shmem.context())
    raise RuntimeError(f"after {took:.1f} s: {text}")


def test_kill_9_of_a_peer_ends_a_wait_within_10_s_and_names_it():
    with pytest.raises(RanksFailed) as failed:
        Ranks(2).run(wait_while_the_peer_is_killed, 0.5)
    text = failed.value.failures[0]
    assert float(re.search(r"after ([\d.]+) s", text)[1]) < 10
    assert "rank 1 exited" in text and "kernel exchange" in text


@triton.jit
def failing(x, sig, ctx):
    if dl.rank(ctx) == 1:
        tl.device_assert(tl.load(x) == 0, "x must be zero")
    dl.notify(sig, 1 - dl.rank(ctx), ctx, 1)
    dl.wait(sig, 1, ctx)


def one_rank_fails():
    sig = shmem.create_signals(1)
    x = torch.ones(1, dtype=torch.int32)
    kind = Exception if shmem.my_pe() == 1 else PeerLostError
    shmem.barrier_all()
    time.sleep(0.2 * shmem.my_pe())
    text, seconds = caught(kind, failing[(1,)], x, sig, shmem.context())
    time.sleep(3)  # as a rank that shows its traceback and does not end at once
    return text, seconds


def test_a_kernel_that_fails_on_one_rank_ends_the_wait_of_the_others():
    (waiting, seconds), (asserting, _) = Ranks(2).run(one_rank_fails)
    assert seconds < SOON_S
    assert "x must be zero" in asserting and "program (0, 0, 0)" in asserting
    assert "waits for rank 1, whose kernel failed" in waiting and "x must be zero" in waiting


def wait_for_a_rank_in_host_code():
    sig, over = shmem.create_signals(3), shmem.aclshmem_create_tensor((1,), torch.int32)
    over.zero_()
    shmem.barrier_all()
    if shmem.my_pe() == 1:
        for _ in range(600):  # host code that is no wait of the library
            if over.item():
                return "told", 0
            time.sleep(0.1)
    os.environ["TRITON_DIST_WAIT_TIMEOUT"] = "1.5"
    result = caught(WaitTimeoutError, exchange[(1,)], sig, 2, 1, shmem.context())
    del os.environ["TRITON_DIST_WAIT_TIMEOUT"]
    shmem.peer_tensor(over, 1).fill_(1)
    return result


def test_a_wait_for_a_rank_in_host_code_ends_at_the_time_limit():
    text, seconds = shared_ranks(2).run(wait_for_a_rank_in_host_code)[0]
    assert seconds > 1.4
    assert "TRITON_DIST_WAIT_TIMEOUT" in text and "rank 1: in host code" in text


# -- bad accesses


@triton.jit
def access(what: tl.constexpr, x, sig, other, ctx):
    if what == "peer":
        dl.remote_store(x, 1.0, 2, ctx)  # line of peer
    elif what == "negative peer":
        dl.notify(sig, -1, ctx, 1)  # line of negative peer
    elif what == "outside":
        tl.store(dl.symm_at(other, 1, ctx), 1.0)  # line of outside
    elif what == "past the end":
        tl.store(dl.symm_at(x, 1, ctx) + tl.arange(0, 32), 1.0)  # line of past the end
    elif what == "plain past the end":
        tl.store(x + tl.arange(0, 32), 1.0)  # line of plain past the end
    elif what == "put past the end":
        dl.put(x, other, 17, 1, ctx)  # line of put past the end
    elif what == "put from outside to outside":
        dl.put(other, x, 1, 1, ctx)  # line of put from outside to outside
    elif what == "misaligned signal":
        dl.wait((sig.to(tl.int64) + 2).to(sig.dtype), 1, ctx)  # line of misaligned signal
    elif what == "signal outside":
        dl.wait(other.to(sig.dtype), 1, ctx)  # line of signal outside
    elif what == "signal type":
        dl.notify(x, 1, ctx, 1)  # line of signal type
    elif what == "freed":
        tl.load(x)  # line of freed
    elif what == "remote freed":
        dl.remote_load(x, 1, ctx)  # line of remote freed
    elif what == "not a context":
        dl.rank(other.to(ctx.dtype))  # line of not a context
    elif what == "op":
        dl.notify(sig, 1, ctx, 1, "max")  # line of op
    elif what == "cmp":
        dl.wait(sig, 1, ctx, "equal")  # line of cmp
    elif what == "wait for too much":
        dl.wait(sig, 2147483648, ctx, "lt")  # line of wait for too much
    elif what == "test for too little":
        dl.test(sig, -2147483649, ctx)  # line of test for too little
    elif what == "wait for a fraction":
        dl.wait(sig, 0.5, ctx, "lt")  # line of wait for a fraction
    elif what == "misaligned atomic":
        tl.atomic_add((sig.to(tl.int64) + 2).to(sig.dtype), 1)  # line of misaligned atomic


WRONG = {
    "peer": (SymmetricAccessError, "peer 2 is out of range: this team has 2 ranks"),
    "negative peer": (SymmetricAccessError, "peer -1 is out of range"),
    "outside": (SymmetricAccessError, "not in rank 0's symmetric heap"),
    "past the end": (SymmetricAccessError, r"rank 1's float32\[16\] tensor.* runs 64 bytes past its end"),
    "plain past the end": (SymmetricAccessError, r"rank 0's float32\[16\] tensor.* runs 64 bytes past its end"),
    "put past the end": (SymmetricAccessError, r"put .*runs 4 bytes past its end"),
    "put from outside to outside": (SymmetricAccessError, "put: .*not in rank 0's symmetric heap"),
    "misaligned signal": (SymmetricAccessError, "misaligned signal"),
    "signal outside": (SymmetricAccessError, "wait: .*not in rank 0's symmetric heap"),
    "signal type": (UnsupportedError, "signals are int32 or int64, not fp32"),
    "freed": (SymmetricAccessError, r"load at rank 0's freed float32\[16\] tensor"),
    "remote freed": (SymmetricAccessError, r"rank 0's freed float32\[16\] tensor"),
    "not a context": (SymmetricAccessError, "ctx is not a live context table"),
    "op": (UnsupportedError, 'op is "set" or "add", not \'max\''),
    "cmp": (UnsupportedError, "cmp is one of eq, ge, gt, le, lt, ne, not 'equal'"),
    "wait for too much": (UnsupportedError, "wait: value is 2147483648, which no int32 signal ever holds"),
    "test for too little": (UnsupportedError, "test: value is -2147483649, which no int32 signal ever holds"),
    "wait for a fraction": (UnsupportedError, "wait: value is 0.5; signals hold integers"),
    "misaligned atomic": (SymmetricAccessError, "misaligned address"),
}


def wrong_accesses():
    x, sig = shmem.aclshmem_create_tensor((16,), torch.float32), shmem.create_signals(1)
    spare = shmem.aclshmem_create_tensor((16,), torch.float32)
    shmem.aclshmem_create_tensor((1024,), torch.float32)
    gone = spare[:]
    shmem.aclshmem_free_tensor(spare)
    texts = {}
    for what, (kind, _) in WRONG.items():
        if shmem.my_pe() == 0:
            target = gone if "freed" in what else x
            texts[what] = caught(kind, access[(1,)], what, target, sig, torch.zeros(64), shmem.context())[0]
        shmem.barrier_all()
    return texts


def test_every_wrong_access_is_an_error_with_its_source_line():
    texts = shared_ranks(2).run(wrong_accesses)[0]
    for what, (_, pattern) in WRONG.items():
        assert re.search(pattern, texts[what]), (what, texts[what])
        assert f"test_reports.py:{line_of(f'line of {what}')} in access" in texts[what], (what, texts[what])
        assert "kernel access, program (0, 0, 0)" in texts[what]


def wait_before_init():
    sig, ctx = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    return caught(SymmetricAccessError, exchange[(1,)], sig, 0, 1, ctx)[0]


def test_device_words_before_init_say_so():
    assert "ctx is not a live context table" in wait_before_init()
