"""Waits in kernels that end by TRITON_DIST_WAIT_TIMEOUT, on two NVIDIA GPUs. Skipped where there are fewer."""

import os
import time

import pytest
import torch
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import backend, kernels, shmem
from triton_dist.backends.nvidia_graph import uncollected
from triton_dist.errors import WaitTimeoutError
from triton_dist.shmem import codes
from triton_dist.testing import Ranks, run_ranks

pytestmark = pytest.mark.skipif(
    backend != "nvidia" or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs and TRITON_DIST_BACKEND=nvidia"
)

LIMIT_S = 0.5


@triton.jit
def wait_kernel(sig, out, value, n, ctx, MANY: tl.constexpr):
    if MANY:
        token = dl.wait(sig, value, ctx, n=n)
    else:
        token = dl.wait(dl.signal_at(sig, tl.program_id(0)), value, ctx)
    tl.store(out + tl.program_id(0), token)


@triton.jit
def many_waits_kernel(sig, out, ctx):
    for i in range(1, 1001):
        token = dl.wait(sig, i, ctx)
        tl.store(out, token)


@triton.jit
def ping_pong_kernel(sig, out, rounds, ctx):
    peer = 1 - dl.rank(ctx)
    token = tl.full((), 0, tl.int32)
    for i in range(1, rounds + 1):
        dl.notify(sig, peer, ctx, i)
        token = dl.wait(sig, i, ctx)
    tl.store(out, token)


def scenario(function, *arguments):
    """Runs it between init and finalize; (its result, seconds, what finalize returned)."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    code = shmem.aclshmem_init(shmem.InitAttr(rank, world, "", 64 << 20))
    assert code == 0, shmem.last_error()
    start = time.monotonic()
    result = function(*arguments)
    return result, time.monotonic() - start, shmem.aclshmem_finalize()


@pytest.fixture(scope="module")
def limited():
    """`limited(function, *arguments)`: what `scenario` returned on both ranks. The same processes for all tests: each init
    after a wait that gave up starts clean."""
    with Ranks(2, env={"TRITON_DIST_WAIT_TIMEOUT": str(LIMIT_S)}) as ranks:
        yield lambda function, *arguments: ranks.run(scenario, function, *arguments, init=False, timeout=60)


def text_of(call):
    with pytest.raises(WaitTimeoutError) as info:
        call()
    return str(info.value)


def wait_for_two(only_rank):
    signals, out = shmem.create_signals(4), torch.zeros(4, dtype=torch.int32, device=shmem.device())
    signals[:2, 0] = 5
    signals[2, 0] = 4
    shmem.barrier_all()
    if shmem.my_pe() in only_rank:
        wait_kernel[(4,)](signals, out, 5, 1, shmem.context(), MANY=False)
    said = text_of(shmem.barrier_all)
    return said, out.tolist()


def test_a_wait_that_gives_up_names_rank_program_signal_wanted_and_seen_on_all_ranks(limited):
    for (said, out), seconds, code in limited(wait_for_two, [0, 1]):
        for who in (0, 1):
            assert f"rank {who}: a wait in a kernel lasted longer than 0.5 s" in said
            for program, seen in ((2, 4), (3, 0)):
                line = next(line for line in said.splitlines() if f"rank {who}: program ({program}, 0, 0)" in line)
                assert "of a grid (4, 1, 1) waited 0.5" in line
                assert f"rank {who}'s 4 signals, element [{program}, 0]" in line and f"wanted >= 5, saw {seen}" in line
            assert f"rank {who} launched last: wait_kernel" in said
        assert out[:2] == [5, 5]
        assert seconds < 3 * LIMIT_S + 3
        assert code == codes.TIMEOUT


def test_the_rank_whose_kernels_did_not_wait_is_told_too(limited):
    for (said, _), _, code in limited(wait_for_two, [1]):
        assert "rank 1: a wait in a kernel lasted longer" in said and "rank 0: a wait" not in said
        assert code == codes.TIMEOUT


def wait_for_many():
    signals, out = shmem.create_signals(70, torch.int64), torch.zeros(1, dtype=torch.int32, device=shmem.device())
    signals[:, 0] = 3
    signals[61, 0] = -7
    shmem.barrier_all()
    wait_kernel[(1,)](signals, out, 3, 70, shmem.context(), MANY=True)
    torch.cuda.synchronize()
    return text_of(shmem.check_waits)


def test_a_wait_for_many_signals_names_the_one_that_did_not_come(limited):
    for said, _, _ in limited(wait_for_many):
        assert "70 signals, element [61, 0]" in said and "wanted >= 3, saw -7" in said


def wait_again_and_again():
    signals, out = shmem.create_signals(1), torch.zeros(1, dtype=torch.int32, device=shmem.device())
    ctx = shmem.context()
    shmem.barrier_all()
    start = time.monotonic()
    for _ in range(5):
        many_waits_kernel[(1,)](signals, out, ctx)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    return seconds, text_of(shmem.check_waits)


def test_after_the_first_no_wait_takes_long(limited):
    for (seconds, said), _, _ in limited(wait_again_and_again):
        assert seconds < LIMIT_S + 2, "5000 waits"
        assert said.count("program (0, 0, 0)") == 1


def come_through():
    signals, out = shmem.create_signals(1), torch.zeros(1, dtype=torch.int32, device=shmem.device())
    shmem.barrier_all()
    if shmem.my_pe() == 1:
        time.sleep(LIMIT_S / 2)  # the peer waits for a while, in its first turn
    ping_pong_kernel[(1,)](signals, out, 20000, shmem.context())
    shmem.barrier_all()
    shmem.check_waits()
    return out.item()


def test_waits_that_come_true_in_time_are_left_alone(limited):
    for value, _, code in limited(come_through):
        assert value == 20000 and code == 0


def replay():
    signals, out = shmem.create_signals(1), torch.zeros(1, dtype=torch.int32, device=shmem.device())
    ctx = shmem.context()
    wait_kernel[(1,)](signals, out, 0, 1, ctx, MANY=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        wait_kernel[(1,)](signals, out, 7, 1, ctx, MANY=False)
    signals.fill_(7)
    shmem.barrier_all()
    graph.replay()
    torch.cuda.synchronize()
    shmem.check_waits()
    signals.fill_(6)
    graph.replay()
    torch.cuda.synchronize()
    return text_of(shmem.check_waits)


def test_waits_in_replayed_graphs_are_limited(limited):
    for said, _, _ in limited(replay):
        assert "1 signals, element [0, 0]" in said and "wanted >= 7, saw 6" in said


def receive_nothing(captured):
    handoffs = shmem.Handoffs(2)
    peer = 1 - shmem.my_pe()

    def exchange(parts):
        handoffs.claim(peer)
        for part in range(parts):
            handoffs.publish(peer, part)
        for part in range(2):
            handoffs.receive(peer, part)
        handoffs.release(peer)

    exchange(2)
    shmem.barrier_all()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            exchange(1)
        graph.replay()
    else:
        exchange(1)
    return text_of(shmem.barrier_all)


@pytest.mark.parametrize("captured", [False, True])
def test_waits_in_the_order_of_a_stream_are_limited(limited, captured):
    for said, seconds, _ in limited(receive_nothing, captured):
        assert "6 signals, element [" in said and "wanted == 1, saw 0" in said
        assert seconds < LIMIT_S + 5


def reduce_alone():
    context = kernels.create_all_reduce_context(4096, torch.float32, "flagged")
    x = torch.ones(4096, device=shmem.device())
    assert torch.equal(kernels.all_reduce(x, context), 2 * x)
    shmem.barrier_all()
    if shmem.my_pe() == 0:
        kernels.all_reduce(x, context)
    return text_of(shmem.barrier_all)


def test_words_that_carry_their_own_flags_are_waited_for_with_a_limit(limited):
    for said, _, _ in limited(reduce_alone):
        assert "wanted == 2, saw 0" in said and "int64[2, 2, 4096] tensor" in said


def hang_for_ever():
    options = shmem.OptionalAttr(control_operation_timeout=2)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert shmem.aclshmem_init(shmem.InitAttr(rank, world, "", 1 << 20, options)) == 0, shmem.last_error()
    signals, out = shmem.create_signals(2), torch.zeros(1, dtype=torch.int32, device=shmem.device())
    signals[1, 0] = 9
    wait_kernel[(1,)](signals, out, 5, 1, shmem.context(), MANY=False)
    start = time.monotonic()
    said = text_of(shmem.barrier_all)
    between = time.monotonic() - start
    return said, between, shmem.aclshmem_finalize()


def test_without_a_limit_the_host_says_that_the_device_is_busy_and_what_the_signals_hold():
    environment = {"TRITON_DIST_BACKEND": "nvidia"}
    start = time.monotonic()
    for said, seconds, code in run_ranks(hang_for_ever, 2, env=environment, init=False, timeout=60):
        assert "rank 0: its device is still busy after 2 s" in said and "2 signals (heap+0x0): 0 9" in said
        assert "rank 1: its device is still busy after 2 s" in said and "TRITON_DIST_WAIT_TIMEOUT" in said
        assert seconds < 8 and code == codes.TIMEOUT
    assert time.monotonic() - start < 60, "the processes end although their kernels hang"
