"""autotune: all ranks run the same candidates and choose the same one, whatever fails, is slow, or lies in a cache."""

import json
import os
import time
import warnings
from pathlib import Path

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import kernels, shmem
from triton_dist.errors import CollectiveMismatchError, TuningError
from triton_dist.tuning import autotune, cache, entries, identity

import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.dist

SIZES = [dict(BLOCK=block) for block in (16, 64, 256)]


@triton.jit
def exchange(x, inbox, out, signal, n, ctx, BLOCK: tl.constexpr, FAIL: tl.constexpr = False):
    """out = the left neighbour's x. The signal counts calls; out[0] of a FAIL is not."""
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    dl.put(inbox, x, n, right, ctx, 0, 1, BLOCK)
    if FAIL:
        tl.static_assert(not FAIL, "a candidate that fails")
    dl.notify(signal, right, ctx, 1, "add")
    token = dl.wait(signal, 1, ctx)
    dl.get(out, dl.consume_token(inbox, token), n, dl.rank(ctx), ctx, 0, 1, BLOCK)


class Exchange:
    """The kernel's operands; its signal has to be 0 before each call."""

    def __init__(self, n=200):
        device = shmem.device()
        self.n, self.x = n, torch.arange(n, dtype=torch.float32, device=device) + shmem.my_pe()
        self.inbox = shmem.aclshmem_create_tensor((n,), torch.float32)
        self.out, self.signal = torch.empty_like(self.x), shmem.create_signals(1)
        self.calls = []

    def __call__(self, config):
        self.calls.append(config["BLOCK"])
        exchange[(1,)](self.x, self.inbox, self.out, self.signal, self.n, shmem.context(), **config)

    def reset(self):
        self.signal.zero_()
        self.out.fill_(float("nan"))

    def check(self, config):
        left = (shmem.my_pe() - 1) % shmem.pe_count()
        expected = torch.arange(self.n, dtype=torch.float32) + left
        assert torch.equal(self.out.cpu(), expected), config


def tune(run, name="exchange", candidates=SIZES, **more):
    more = {"key": dict(n=run.n, dtype="float32"), "source": [exchange], "reset": run.reset, "check": run.check, **more}
    return autotune(name, candidates, run, **more)


def use_cache(folder):
    os.environ["TRITON_DIST_CACHE_DIR"] = str(folder)


def outcome(tuned):
    return json.dumps([tuned.best, [vars(one) for one in tuned.timings], tuned.origin])


def a_kernel_of_the_users(folder):
    use_cache(folder)
    run = Exchange()
    tuned = tune(run, samples=3)
    assert run.calls == [16, 64, 256] + [16, 64, 256] * 4  # one call each to try, one to warm up, three samples, in turn
    assert tuned.origin == "measured" and len(tuned.timings) == 3
    fastest = min(tuned.timings, key=lambda one: one.microseconds["queued"])
    assert tuned.best == fastest.candidate
    run.calls = []
    again = tune(run, samples=3)
    assert (again.origin, again.best, run.calls) == ("cache", tuned.best, [])
    assert tune(run, samples=3, again=True).origin == "measured" and run.calls
    return outcome(tuned), outcome(again)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_kernel_that_needs_fresh_signals_is_tuned_once(world, ranks, tmp_path):
    found = ranks(world).run(a_kernel_of_the_users, tmp_path, timeout=120)
    assert len(set(found)) == 1
    assert len(list(tmp_path.glob("tuned/exchange/*"))) == 1  # the first rank alone has written, and left no temporary file


def slow_on_one_rank():
    """The first candidate is fast on all ranks but the last, the second one takes 4 ms on all."""
    last = shmem.my_pe() == shmem.pe_count() - 1

    def call(config):
        time.sleep({"uneven": 0.012 if last else 0.0, "even": 0.004}[config["name"]])

    tuned = autotune("sleep", [dict(name="uneven"), dict(name="even")], call, {}, cached=False, samples=3)
    assert tuned.best == dict(name="even")
    times = [one.microseconds["queued"] for one in tuned.timings]
    assert times[0] >= 12_000 and 4_000 <= times[1] < 12_000
    return outcome(tuned)


@pytest.mark.parametrize("world", [2, 3])
def test_the_slowest_rank_counts(world, ranks):
    assert len(set(ranks(world).run(slow_on_one_rank, timeout=60))) == 1


def left_out(where):
    me, run = shmem.my_pe(), Exchange()

    def bad(config):
        return me == 1 and config["BLOCK"] == 64

    def make(config):
        if where in ("make_context", "collective make_context") and bad(config):
            raise RuntimeError("no shared memory")
        if where == "collective make_context":
            return Owner(config)  # the others wait for rank 1 in here
        return config

    def call(made):
        config = getattr(made, "config", made)
        run({**config, "FAIL": True} if where == "kernel" and bad(config) else config)  # the others' kernels wait for this one

    def check(made):
        config = getattr(made, "config", made)
        run.check(config)
        assert where != "check" or not bad(config), "no shared memory"

    start = time.monotonic()
    tuned = autotune(
        "exchange", SIZES, call, dict(n=run.n), make_context=make, reset=run.reset, check=check, samples=2, cached=False
    )
    assert time.monotonic() - start < 40
    assert [one.problem is None for one in tuned.timings] == [True, False, True]
    assert "rank 1: " in tuned.timings[1].problem
    if where != "kernel":
        assert "no shared memory" in tuned.timings[1].problem
    assert tuned.best["BLOCK"] != 64
    shmem.barrier_all()  # the ranks are in step
    return outcome(tuned)


class Owner:
    def __init__(self, config):
        self.config, self.contexts = config, [kernels.create_all_gather_context(64, torch.float32) for _ in range(2)]

    def free(self):
        for context in self.contexts:
            context.free()


@pytest.mark.parametrize("where", ["make_context", "collective make_context", "kernel", "check"])
def test_a_candidate_that_fails_on_one_rank_is_left_out_on_all(where, ranks):
    assert len(set(ranks(3 if where == "check" else 2).run(left_out, where, timeout=90))) == 1
