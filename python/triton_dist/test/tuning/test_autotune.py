"""autotune: all ranks run the same candidates and choose the same one, whatever fails, is slow, or lies in a cache."""

import json
import os
import time

import pytest

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import kernels, shmem
from triton_dist.errors import CollectiveMismatchError, TuningError
from triton_dist.tuning import autotune, identity
from triton_dist.tuning.compile_only import compiles

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
    tries = 2 if compiles() else 1  # a call for the compiler, one to try; then one to warm up, and three samples, in turn
    assert run.calls == [block for block in (16, 64, 256) for _ in range(tries)] + [16, 64, 256] * 4
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
    """The first candidate is fast on all ranks but the last, the second one takes 50 ms on all."""
    last = shmem.my_pe() == shmem.pe_count() - 1

    def call(config):
        time.sleep({"uneven": 0.5 if last else 0.0, "even": 0.05}[config["name"]])

    tuned = autotune("sleep", [dict(name="uneven"), dict(name="even")], call, {}, cached=False, samples=3)
    assert tuned.best == dict(name="even")
    times = [one.microseconds["queued"] for one in tuned.timings]
    assert times[0] >= 500_000 and 50_000 <= times[1] < 500_000
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


def nothing_works():
    def call(config):
        if config["BLOCK"] == 16 or shmem.my_pe() == 1:
            raise ValueError("no room")

    with pytest.raises(TuningError, match="(?s)no candidate works.*BLOCK=16: rank 0: .*no room; rank 1: .*BLOCK=64"):
        autotune("nothing", SIZES, call, {}, cached=False)
    shmem.barrier_all()


def test_an_error_says_what_each_candidate_lacks_when_none_works(ranks):
    ranks(2).run(nothing_works)


def wrong_arguments():
    me, nothing = shmem.my_pe(), lambda config: None

    def refused(text, **changed):
        arguments = dict(name="wrong", candidates=SIZES, call=nothing, key={}, cached=False)
        with pytest.raises(ValueError, match=text):
            autotune(**{**arguments, **changed})

    refused("candidates is .*: give a list of dicts", candidates=[])
    refused("no two of them alike", candidates=[dict(a=1), dict(a=1)])
    refused("candidates is", candidates=dict(a=1))
    refused("key: .*JSON", key={1: 2})
    refused("key: ", key=dict(dtype=torch.float16))
    refused("samples is 0", samples=0)
    refused("ways is", ways="queued")
    refused("ways is", ways=["hourly"])
    refused("rank 1: .*calls is -1", calls=-1 if me else 1)  # what one rank finds wrong all ranks raise
    refused("source: ", source=[3])
    with pytest.raises(CollectiveMismatchError, match="different collective calls"):
        autotune("wrong", SIZES if me else SIZES[:2], nothing, {}, cached=False)
    assert autotune("right", SIZES, nothing, {}, cached=False).origin == "measured"


def test_wrong_and_different_arguments_are_refused_on_all_ranks(ranks):
    ranks(2).run(wrong_arguments)


class Large:
    """Half of the heap."""

    def __init__(self, config):
        self.config, self.memory = config, shmem.aclshmem_create_tensor((9 << 18,), torch.float32)

    def free(self):
        shmem.aclshmem_free_tensor(self.memory)


def contexts_that_do_not_fit_together():
    order = []

    def call(large):
        order.append(large.config["BLOCK"])

    tuned = autotune("large", SIZES, call, {}, make_context=Large, cached=False, samples=2, calls=1)
    assert all(one.microseconds for one in tuned.timings)
    calls = 5 if compiles() else 4
    assert order == [16] * calls + [64] * calls + [256] * calls
    Large(None).free()  # nothing was kept


def test_contexts_for_which_the_heap_is_too_small_together_are_timed_one_after_the_other(ranks):
    ranks(2).run(contexts_that_do_not_fit_together, heap_bytes=16 << 20)


def a_cache_on_one_rank(folder):
    """Every rank has a cache of its own, as on hosts without a common disk; rank `owner` alone finds something in it."""
    me, run = shmem.my_pe(), Exchange()
    use_cache(folder / str(me))
    first = tune(run, samples=2)  # the first rank writes
    assert (folder / "0" / "tuned" / "exchange").is_dir() == (me == 0) or me
    shmem.barrier_all()
    run.calls = []
    second = tune(run, samples=2)
    assert (second.origin, run.calls) == ("cache", [])
    # only the last rank has the cache now: nobody uses it
    shmem.barrier_all()
    use_cache(folder / "0" if me == shmem.pe_count() - 1 else folder / f"none{me}")
    third = tune(run, samples=2)
    assert third.origin == "measured" and run.calls
    return [outcome(one) for one in (first, second, third)]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_caches_choose_alike(world, ranks, tmp_path):
    found = ranks(world).run(a_cache_on_one_rank, tmp_path, timeout=120)
    assert all(one == found[0] for one in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "none0"]


def in_a_team(folder):
    """Ranks 0 and 2 tune, rank 1 does not take part."""
    use_cache(folder)
    team = shmem.team_split_strided(0, 0, 2, 2)
    if team == -1:
        return None

    def call(config):
        time.sleep(0.02 * config["slow"] * (shmem.my_pe() + 1))

    tuned = autotune("team", [dict(slow=slow) for slow in (5, 1)], call, {}, team=team, samples=2)
    assert tuned.best == dict(slow=1) and tuned.timings[1].microseconds["queued"] >= 60_000
    return outcome(tuned)


def test_a_team_tunes_without_the_other_ranks(ranks, tmp_path):
    first, none, last = ranks(3).run(in_a_team, tmp_path)
    assert none is None and first == last
    (file,) = tmp_path.glob("tuned/team/*.json")
    assert json.loads(file.read_text())["entries"][0]["world"] == 2


def what_misses(folder):
    use_cache(folder)
    run = Exchange()
    origin = lambda **more: tune(run, samples=1, **more).origin  # noqa: E731
    assert [origin(), origin()] == ["measured", "cache"]
    assert origin(key=dict(n=220, dtype="float32")) == "cache"  # the same bucket
    assert origin(key=dict(n=300, dtype="float32")) == "measured"
    assert origin(key=dict(n=200, dtype="float16")) == "measured"
    assert origin(candidates=SIZES[:2]) == "measured"
    assert origin(candidates=SIZES[::-1]) == "cache"  # the same ones
    assert origin(source=[exchange, what_misses]) == "measured"
    real = identity.versions
    identity.versions = lambda: {**real(), "triton": "4.0.0"}
    assert [origin(), origin()] == ["measured", "cache"]
    identity.versions = real
    assert origin() == "cache"
    return len(list((folder / "tuned" / "exchange").iterdir()))


def test_another_version_size_dtype_source_or_list_is_measured_anew(ranks, tmp_path):
    # 200, 300, float16, two candidates, another source, another version: a file each
    assert ranks(1).run(what_misses, tmp_path, timeout=120) == [6]


def a_folder_that_cannot_be_written(folder):
    use_cache(folder)
    with pytest.warns(RuntimeWarning, match="measured times are not kept") if shmem.my_pe() == 0 else _nothing():
        assert tune(Exchange(), samples=1).origin == "measured"
    assert tune(Exchange(), samples=1).origin == "measured"


class _nothing:  # noqa: N801
    __enter__ = __exit__ = lambda *args: None


def test_a_cache_that_cannot_be_written_is_a_warning(ranks, tmp_path):
    (tmp_path / "file").write_text("no folder")
    ranks(2).run(a_folder_that_cannot_be_written, tmp_path / "file", timeout=60)


@triton.jit
def too_large(x, signal, ctx, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Waits for the neighbour, then needs shared memory for as many stages of its loop as num_stages says."""
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    dl.notify(signal, right, ctx, 1, "add")
    dl.wait(signal, 1, ctx)
    i = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(STEPS):
        acc = tl.dot(tl.load(x + step * BLOCK * BLOCK + i), tl.load(x + step * BLOCK * BLOCK + i), acc)
    tl.store(x + i, acc.to(tl.float16))


def too_much_shared_memory_on_one_rank():
    x = torch.zeros(16, 128, 128, dtype=torch.float16, device=shmem.device())
    signal = shmem.create_signals(1)

    def call(config):
        stages = 9 if config["stages"] == 4 and shmem.my_pe() == 1 else config["stages"]
        too_large[(1,)](x, signal, shmem.context(), BLOCK=128, STEPS=16, num_stages=stages, num_warps=8)

    candidates = [dict(stages=stages) for stages in (2, 4, 3)]
    tuned = autotune("too large", candidates, call, {}, reset=signal.zero_, samples=3, cached=False)
    assert [one.problem is None for one in tuned.timings] == [True, False, True]
    assert "rank 1: OutOfResources" in tuned.timings[1].problem
    return outcome(tuned)


@pytest.mark.gpu
@pytest.mark.skipif(triton_dist.backend != "nvidia", reason="an interpreter has no shared memory to run out of")
def test_a_kernel_that_one_ranks_device_cannot_hold_is_launched_by_nobody(ranks):
    assert len(set(ranks(2).run(too_much_shared_memory_on_one_rank, timeout=90))) == 1
