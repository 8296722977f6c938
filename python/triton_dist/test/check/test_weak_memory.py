"""Weak memory: the outcomes that it gives and never gives, what it makes of the litmus programs, replay."""

import os
import random
import sys

import numpy as np
import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import check, shmem
from triton_dist.check.clocks import Threads
from triton_dist.check.history import Histories, Shadow
from triton_dist.check.weak_memory import WeakMemory
from triton_dist.interpreter.affine import Affine

import torch
import triton
import triton.language as tl

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "litmus")
sys.path.insert(0, HERE)
try:
    from suite import CASES, ORDERS, run
finally:
    sys.path.remove(HERE)


@triton.jit
def shapes_kernel(x, y, got, ctx, SHAPE: tl.constexpr, ORDER: tl.constexpr):
    """Plain stores, volatile loads; x and y lie at rank 0, as does `got`."""
    me = dl.rank(ctx)
    X, Y, G = dl.symm_at(x, 0, ctx), dl.symm_at(y, 0, ctx), dl.symm_at(got, 0, ctx)
    if SHAPE == "message":  # data and flag
        if me == 0:
            tl.store(X, 1)
            if ORDER == "fence":
                dl.fence(ctx)
            elif ORDER == "quiet":
                dl.quiet(ctx)
            tl.store(Y, 1)
        else:
            a = tl.load(Y, volatile=True)
            if ORDER != "none":
                dl.fence(ctx)
            b = tl.load(X, volatile=True)
            tl.store(G, a * 10 + b)
    elif SHAPE == "buffering":  # Dekker's: each stores its own and loads the other's
        mine, theirs = X, Y
        if me == 1:
            mine, theirs = Y, X
        tl.store(mine, 1)
        if ORDER == "fence":
            dl.fence(ctx)
        elif ORDER == "quiet":
            dl.quiet(ctx)
        tl.store(G + me, tl.load(theirs, volatile=True))
    elif SHAPE == "readers":  # independent reads of independent writes
        if me == 0:
            tl.store(X, 1)
        elif me == 1:
            tl.store(Y, 1)
        else:
            first, second = X, Y
            if me == 3:
                first, second = Y, X
            a = tl.load(first, volatile=True)
            if ORDER == "fence":
                dl.fence(ctx)
            elif ORDER == "quiet":
                dl.quiet(ctx)
            b = tl.load(second, volatile=True)
            tl.store(G + me - 2, a * 10 + b)
    elif SHAPE == "coherence":  # two reads of one word
        if me == 0:
            tl.store(X, 1)
            tl.store(X, 2)
        else:
            a = tl.load(X, volatile=True)
            b = tl.load(X, volatile=True)
            c = tl.load(X)
            tl.store(G, a * 100 + b * 10 + c)
    elif SHAPE == "loads":  # load buffering
        mine, theirs = X, Y
        if me == 1:
            mine, theirs = Y, X
        a = tl.load(mine, volatile=True)
        tl.store(theirs, 1)
        tl.store(G + me, a)
    elif SHAPE == "stores":  # 2+2W: each stores both words, in opposite orders
        first, second = X, Y
        if me == 1:
            first, second = Y, X
        tl.store(first, 1)
        tl.store(second, 2)
    elif SHAPE == "own":  # a program sees its own stores
        tl.store(X + 8 + me, 1)
        tl.store(X + 8 + me, 2)
        tl.store(G + me, tl.load(X + 8 + me))
    elif SHAPE == "relayed":  # a read of x is passed on: who hears of it must see x, too
        if me == 0:
            tl.store(X, 1)
        elif me == 1:
            a = tl.load(X, volatile=True)
            if ORDER == "fence":
                dl.fence(ctx)
            tl.store(Y, a)
        else:
            b = tl.load(Y, volatile=True)
            if ORDER == "fence":
                dl.fence(ctx)
            c = tl.load(X, volatile=True)
            tl.store(G, b * 10 + c)


def shapes(shape, order="none"):
    cells, got = shmem.create_signals(2), shmem.aclshmem_create_tensor((2,), torch.int32)
    cells.zero_(), got.fill_(-1)
    shmem.barrier_all()
    shapes_kernel[(1,)](cells[0], cells[1], got, shmem.context(), shape, order)
    shmem.barrier_all()
    if shape == "stores":
        return tuple(shmem.peer_tensor(cells, 0)[:2, 0].tolist())
    return tuple(shmem.peer_tensor(got, 0).tolist())


# shape, what orders it, ranks, the outcome that sequential consistency forbids, whether weak memory gives it
SHAPES = [
    ("message", "none", 2, (10, -1), True),
    ("message", "fence", 2, (10, -1), False),
    ("message", "quiet", 2, (10, -1), False),
    ("relayed", "none", 3, (10, -1), True),
    ("relayed", "fence", 3, (10, -1), False),
    ("buffering", "none", 2, (0, 0), True),
    ("buffering", "fence", 2, (0, 0), True),  # fence.acq_rel does not order a store before a load
    ("buffering", "quiet", 2, (0, 0), False),  # fence.sc does
    ("readers", "fence", 4, (10, 10), True),
    ("readers", "quiet", 4, (10, 10), False),
    ("stores", "none", 2, (1, 1), True),
    ("loads", "none", 2, (1, 1), False),  # stronger than PTX; by plain loads: test_late_reads.py
]


@pytest.mark.parametrize("shape, order, world, outcome, given", SHAPES, ids=lambda value: str(value))
def test_what_weak_memory_gives(shape, order, world, outcome, given):
    seeds = 50 if not given else 800 if shape == "readers" else 200
    assert (outcome in outcomes(True, shape, order, world, seeds, outcome)) == given
    assert outcome not in outcomes(False, shape, order, world, 12)


def outcomes(weak, shape, order, world_size, schedules, wanted=None):
    """What the shape gives on all its ranks, over many schedules, or until the wanted one has come."""
    seen = set()

    def record():
        got = shapes(shape, order)
        seen.add(got)
        assert got != wanted

    check.explore(record, races=False, world_size=world_size, schedules=schedules, weak=weak, heap_bytes=1 << 16)
    return seen


def test_reads_of_one_word_never_go_back():
    seen = {f"{value:03}" for value, _ in outcomes(True, "coherence", "none", 2, 100)}
    assert seen <= {"000", "001", "002", "011", "012", "022", "111", "112", "122", "222"} and len(seen) >= 6


def test_a_program_sees_its_own_stores():
    assert outcomes(True, "own", "none", 2, 40) == {(2, 2)}


@pytest.mark.parametrize("case", [case for case in CASES if not case.verdict], ids=lambda case: case.name)
def test_a_right_program_gives_the_same_results(case):
    verdict = run(case, 3, weak=True)
    assert verdict.outcome == "passed", str(verdict.report)


ORDER_ALONE = [case for case in CASES if case.verdict and set(case.verdict) <= ORDERS]


@pytest.mark.parametrize("case", ORDER_ALONE, ids=lambda case: case.name)
def test_a_missing_order_gives_a_wrong_result(case):
    report = run(case, 50, keep_going=False, weak=True, races=False).report
    if case.name == "host/tensors-clear-signal":  # the signal is gone in any memory
        assert report.kinds == ["deadlock"]
        return
    # An addition at a scope that does not reach the other may be lost, and then its wait does not end.
    assert report.kinds == ["deadlock" if case.name == "programs/partials-cta-atomics" else "wrong-result"], str(report)
    assert report.findings[0].seed.startswith("weak:") and "--triton-dist-seed weak:" in str(report)
    again = check.explore(case.program, *case.args, seed=report.findings[0].seed, races=False, **case.options)
    assert [one.key for one in again.findings] == [one.key for one in report.findings]
    ordinary = run(case, 8, weak=False, races=False)
    assert ordinary.outcome == "missed", str(ordinary.report)


def test_a_wrong_result_tells_what_was_late():
    case = next(one for one in CASES if one.name == "exchange/words-store")
    text = str(run(case, 50, keep_going=False, weak=True, races=False).report)
    assert "Late in this schedule, the latest last:" in text
    assert ": load by rank 1 program (0, 0, 0) at " in text, text
    assert "misses put (write) by rank 0 program (0, 0, 0) at " in text, text


def test_every_fourth_seed_is_weak_unless_told_otherwise():
    flags = {}

    def lost(key):
        value = shapes("message")
        if shmem.my_pe() == 0:
            flags.setdefault(key, []).append(value)

    for weak in (None, True, False):
        check.explore(lost, weak, schedules=13, weak=weak, races=False).raise_if_found()
        assert len(flags[weak]) == 13
    ordinary, weak = flags[False], flags[True]
    turns = [i // 4 if i % 4 == 0 else None for i in range(1, 13)]
    seeds = iter(ordinary[1:])
    assert flags[None][1:] == [next(seeds) if turn is None else weak[turn] for turn in turns]


def test_a_search_of_all_schedules_refuses_weak_memory():
    with pytest.raises(ValueError, match="exhaustive=True tries the orders of signals"):
        check.explore(shapes, "message", exhaustive=True, weak=True)


@pytest.mark.parametrize("seed", range(30))
def test_a_read_gives_what_a_view_allows(seed):
    """Against a plain model: every byte keeps all its values in order, and a read goes back to the newest one that it must see
    at most."""
    rng, weak, threads = random.Random(seed), WeakMemory(seed), Threads(3)
    size, histories = 96, Histories()
    memory, shadow = np.zeros(size, np.uint8), None
    shadow = Shadow(memory.ctypes.data, size)
    history = [[(0, None, 0)] for _ in range(size)]  # of each byte: (value, writer, its clock), oldest first
    seen = np.zeros((3, size), np.int64)  # the latest entry that a thread has seen
    late = 0
    for step in range(1, 250):
        thread = threads.hosts[rng.randrange(3)]
        if rng.random() < 0.1:
            threads.meet(rng.sample(range(3), 2))
        where, offsets = pattern(rng, size, memory.ctypes.data)
        if rng.random() < 0.4:
            weak.store(thread, shadow, where, 1, histories.event(thread, 0, "store"))
            memory[offsets] = step % 251
            overtaken = weak.passed is not None  # it comes to lie below the newest
            weak.settle()
            for i in offsets:
                place = len(history[i]) - overtaken
                history[i].insert(place, (step % 251, thread.id, thread.clock))
                for other in range(3):
                    seen[other, i] += seen[other, i] >= place
                seen[thread.id, i] = max(seen[thread.id, i], place)
            thread.tick()
        else:
            missed = weak.load(thread, [(shadow, where)], 1, histories.event(thread, 0, "load"))
            got = memory[offsets].copy()
            weak.restore()
            late += bool(missed)
            for i, value in zip(offsets, got):
                known = [n for n, (_, writer, clock) in enumerate(history[i]) if writer is None or thread.knows(writer, clock)]
                must = max(known[-1], seen[thread.id, i])
                places = [n for n, (one, _, _) in enumerate(history[i]) if one == value]
                assert places and places[-1] >= must, (i, value, history[i], must)
                seen[thread.id, i] = min(n for n in places if n >= must)
        assert memory.tolist() == [one[-1][0] for one in history]
    assert late > 3


@pytest.mark.parametrize("seed", range(10))
def test_atomics_miss_one_another_only_where_a_scope_is_too_narrow(seed):
    """Additions by three threads of two ranks to eight words: what is written is what was read plus one, whatever that was."""
    rng, weak, threads, histories = random.Random(seed), WeakMemory(seed), Threads(2), Histories()
    threads.launched(0)
    some = [*threads.hosts, threads.program(0, (0, 0, 0), 0)]
    memory = np.zeros(8, np.int32)
    shadow = Shadow(memory.ctypes.data, memory.nbytes)
    narrow = seed % 2 == 1
    latest, writers, missed = np.zeros(8, np.int64), [None] * 8, 0
    for _ in range(300):
        thread, scope = rng.choice(some), rng.choice(("gpu", "sys")) if narrow else "sys"
        words = sorted(rng.sample(range(8), rng.randrange(1, 5)))
        lanes = np.array(words, np.uint64) * np.uint64(4) + np.uint64(memory.ctypes.data)
        wrote = np.array([rng.random() < 0.7 for _ in words])
        weak.atomic(thread, [(shadow, lanes)], 4, histories.event(thread, 0, "atomic", scope, True))
        read = memory[words].copy()
        memory[words] += wrote.astype(np.int32)
        weak.atomic_done(thread, wrote if wrote.any() else False, lanes, 4)
        for word, value, changed in zip(words, read, wrote):
            reached = writers[word] is None or writers[word][0] is thread
            if not reached:
                needed = ("gpu", "sys") if writers[word][0].rank == thread.rank else ("sys",)
                reached = scope in needed and writers[word][1] in needed
            assert value == latest[word] or not reached, (word, value, latest[word])
            missed += int(value != latest[word])
            if changed:
                latest[word], writers[word] = value + 1, (thread, scope)
        assert memory.tolist() == latest.tolist()
        thread.tick()
    assert (missed > 0) == narrow


def pattern(rng, size, base):
    """(Affine or addresses, offsets) of a random access to single bytes."""
    if rng.random() < 0.3:
        offsets = sorted(rng.sample(range(size), rng.randrange(1, 12)))
        return np.array(offsets, np.uint64) + np.uint64(base), offsets
    if rng.random() < 0.5:
        start, count = rng.randrange(size), rng.randrange(1, 40)
        offsets = list(range(start, min(start + count, size)))
        return Affine(base + start, (1,), (len(offsets),)), offsets
    rows, columns, step = rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(6, 20)
    start = rng.randrange(size - (rows - 1) * step - columns + 1)
    return Affine(base + start, (step, 1), (rows, columns)), [start + r * step + c for r in range(rows) for c in range(columns)]
