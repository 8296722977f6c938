"""The race detector's parts: histories of granules against a plain model, clocks, and what a report says."""

import random

import numpy as np
import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import check, shmem
from triton_dist.check.clocks import Threads
from triton_dist.check.history import READ, WRITE, Histories, Shadow
from triton_dist.interpreter.affine import Affine

import torch
import triton
import triton.language as tl


class Model:
    """Byte by byte, all accesses ever made: slow and simple."""

    def __init__(self, nbytes):
        self.seen = [[] for _ in range(nbytes)]

    def access(self, addresses, size, write, thread, vc):
        races = set()
        for address in addresses:
            for byte in range(address, address + size):
                for other, clock, other_write in self.seen[byte]:
                    if other != thread and (write or other_write) and clock > vc[other]:
                        races.add(other)
        for address in addresses:
            for byte in range(address, address + size):
                self.seen[byte].append((thread, vc[thread], write))
        return races


@pytest.mark.parametrize("seed", range(60))
def test_shadow_finds_the_first_race_exactly_where_the_plain_model_finds_it(seed):
    rng = random.Random(seed)
    world, nbytes, base = 4, 96, 1 << 20
    threads, histories, shadow, model = Threads(world), Histories(), Shadow(base, nbytes), Model(nbytes)
    for _ in range(200):
        thread = rng.choice(threads.hosts)
        if rng.random() < 0.6:  # a release and an acquire
            other = rng.choice(threads.hosts)
            thread.join(other.vc, other.wide)
            other.tick()
            continue
        size = rng.choice([1, 2, 4, 8])
        shape = rng.choice([(1,), (3,), (2, 2)])
        strides = rng.choice([(size,), (2 * size,)]) if len(shape) == 1 else (3 * size, size)
        extent = sum((n - 1) * s for n, s in zip(shape, strides)) + size
        start = rng.randrange((nbytes - extent) // size + 1) * size
        where = Affine(base + start, strides, shape)
        addresses = where.array(np.int64).ravel() - base
        write = rng.random() < 0.25
        races = set()

        def report(earlier, address, number, races=races):
            races.add(earlier.thread)

        event = histories.event(thread, 0, "access")
        given = where if rng.random() < 0.7 else where.array(np.uint64).ravel()
        shadow.access(histories, given, size, WRITE if write else READ, event, thread, report)
        vc = {one.id: int(thread.vc[one.id]) if one.id < len(thread.vc) else 0 for one in threads.hosts}
        expected = model.access(addresses.tolist(), size, write, thread.id, vc)
        assert bool(races) == bool(expected) and races <= expected, (races, expected)
        if races:
            return


def test_histories_that_no_granule_has_are_forgotten():
    threads, histories, shadow = Threads(1), Histories(), Shadow(0, 64)
    thread = threads.hosts[0]
    for step in range(50):
        thread.tick()
        where = Affine(8 * (step % 8), (8,), (1,))
        shadow.access(histories, where, 8, WRITE, histories.event(thread, 0, "store"), thread, None)
    before = [histories.states[n] for n in shadow.numbers.tolist()]
    histories.collect([shadow])
    assert len(histories.states) == 9 and [histories.states[n] for n in shadow.numbers.tolist()] == before


@triton.jit
def late_kernel(data, sig, out, ctx, N: tl.constexpr):
    i = tl.arange(0, N)
    if dl.rank(ctx) == 0:
        dl.notify(sig, 1, ctx, 1)
        dl.put(data + N, data, N, 1, ctx)  # the put of the report
    else:
        _ = dl.wait(sig, 1, ctx)
        tl.store(out + i, tl.load(data + N + i))  # the load of the report


def late():
    data, sig = shmem.aclshmem_create_tensor((2, 8), torch.float32), shmem.create_signals(1)
    late_kernel[(1,)](data, sig, torch.zeros(8), shmem.context(), 8)


def line_of(text):
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


def test_a_report_names_lines_ranks_programs_tensor_index_and_seed():
    report = check.explore(late, schedules=1)
    assert [one.kind for one in report.findings] == ["data-race"]
    finding = report.findings[0]
    text = str(finding)
    assert "rank 1's float32[2, 8] tensor, element [1, 0] (heap+0x20)" in text
    assert "put (write) by rank 0 program (0, 0, 0)" in text and "load by rank 1 program (0, 0, 0)" in text
    for words in ("the put of the report", "the load of the report"):
        assert f"test_detector.py:{line_of('# ' + words)} in late_kernel" in text
    assert "Replay: seed='fifo', world_size=2 (--triton-dist-seed fifo)" in text
    assert finding.ranks == (0, 1) and finding.seed == "fifo" and "To do: add the notify and the wait" in text
    with pytest.raises(check.CheckFailed, match="data-race"):
        report.raise_if_found()


@triton.jit
def add_kernel(total, ctx, N: tl.constexpr):
    for peer in range(dl.num_ranks(ctx)):
        tl.atomic_add(dl.symm_at(total, peer, ctx) + tl.arange(0, N), 1.0, sem="relaxed", scope="sys")


def cleared():
    total = shmem.aclshmem_create_tensor((16,), torch.float32)
    for _ in range(2):
        add_kernel[(1,)](total, shmem.context(), 16)
        shmem.barrier_all()
        total[3:9].zero_()


def test_a_host_that_clears_a_sum_too_early_needs_no_signal():
    report = check.explore(cleared, world_size=3, schedules=6, keep_going=True)
    assert report.kinds and set(report.kinds) <= {"data-race", "buffer-reuse"}, report


def test_every_kind_has_a_meaning_and_an_advice():
    assert all(len(pair) == 2 and all(pair) for pair in check.KINDS.values())
