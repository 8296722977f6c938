"""One rank writes, another reads: every way to order the two, and every way to get it wrong."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import triton
import triton.language as tl
from registry import cases

N = 32


def neighbours():
    """x, inbox, out, signals: what an exchange with the right neighbour needs."""
    rank, world = shmem.my_pe(), shmem.pe_count()
    x = torch.arange(N, dtype=torch.float32) + 100 * rank
    inbox = shmem.aclshmem_create_tensor((N,), torch.float32)
    return x, inbox, torch.full((N,), -1.0), shmem.create_signals(2), (rank - 1) % world


@triton.jit
def words_kernel(x, inbox, out, sig, ctx, V: tl.constexpr, N: tl.constexpr):
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    i = tl.arange(0, N)
    if V == "signal-first":
        dl.notify(sig, right, ctx, 1)
    if V == "put_signal":
        dl.put_signal(inbox, x, N, sig, right, ctx)
    elif V == "remote_store" or V == "fence-only":
        dl.remote_store(inbox + i, tl.load(x + i), right, ctx)
    elif V == "put_2d":
        dl.put_2d(inbox, x, 2, N // 2, N // 2, N // 2, right, ctx)
    elif V == "symm_at":
        tl.store(dl.symm_at(inbox, right, ctx) + i, tl.load(x + i))
    elif V == "half":
        dl.put(inbox, x, N // 2, right, ctx)
    else:
        dl.put(inbox, x, N, right, ctx)
    if V == "add":
        dl.notify(sig, right, ctx, 1, "add")
    elif V == "wrong-peer":
        dl.notify(sig, dl.rank(ctx), ctx, 1)
    elif V == "wrong-index":
        dl.notify(dl.signal_at(sig, 1), right, ctx, 1)
    elif V == "too-small":
        dl.notify(sig, right, ctx, 0)
    elif V == "fence-store":
        dl.fence(ctx)
        dl.remote_store(sig, 1, right, ctx)
    elif V == "store":
        dl.remote_store(sig, 1, right, ctx)
    elif V == "quiet-store":
        dl.quiet(ctx)
        dl.remote_store(sig, 1, right, ctx)
    elif V != "signal-first" and V != "put_signal" and V != "fence-only" and V != "no-notify" and V != "wait-first":
        dl.notify(sig, right, ctx, 1)
    if V == "half":
        dl.put(inbox + N // 2, x + N // 2, N // 2, right, ctx)
    if V == "fence-only":
        dl.fence(ctx)
    elif V == "wait-zero":
        _ = dl.wait(sig, 0, ctx)
    elif V == "test":
        while not dl.test(sig, 1, ctx):
            pass
    elif V == "test-once":
        _ = dl.test(sig, 1, ctx)
    elif V == "eq":
        _ = dl.wait(sig, 1, ctx, "eq")
    elif V == "wait-other":
        _ = dl.wait(dl.signal_at(sig, 1), 0, ctx)
    elif V == "volatile":
        while tl.load(sig, volatile=True) < 1:
            pass
    elif V == "volatile-fence":
        while tl.load(sig, volatile=True) < 1:
            pass
        dl.fence(ctx)
    elif V != "no-wait":
        _ = dl.wait(sig, 1, ctx)
    if V == "wait-first":
        dl.notify(sig, right, ctx, 1)
    tl.store(out + i, tl.load(inbox + i))


def words(V):
    x, inbox, out, sig, left = neighbours()
    words_kernel[(1,)](x, inbox, out, sig, shmem.context(), V, N)
    if V != "test-once":
        assert torch.equal(out, torch.arange(N) + 100.0 * left)


cases(
    words,
    {
        "put": (),
        "put_signal": (),
        "remote_store": (),
        "put_2d": (),
        "symm_at": (),
        "add": (),
        "test": (),
        "eq": (),
        "fence-store": (),
        "quiet-store": (),
        "volatile-fence": (),
        "three": (dict(world_size=3),),
        "eight": (dict(world_size=8),),
        "no-wait": ("data-race", "wrong-result", "unwaited-signal"),
        "signal-first": ("data-race", "wrong-result"),
        "half": ("data-race", "wrong-result"),
        "wait-zero": ("data-race", "wrong-result"),
        "wait-other": ("data-race", "wrong-result", "unwaited-signal"),
        "fence-only": ("data-race", "wrong-result"),
        "test-once": ("data-race",),
        "store": ("missing-release",),
        "volatile": ("missing-acquire",),
        "wrong-peer": ("data-race", "wrong-result"),
        "wrong-index": ("deadlock",),
        "too-small": ("deadlock",),
        "no-notify": ("deadlock",),
        "wait-first": ("deadlock",),
    },
)


@triton.jit
def atomics_kernel(
    x, inbox, out, sig, ctx, SEM: tl.constexpr, SCOPE: tl.constexpr, TO_SEM: tl.constexpr, TO_SCOPE: tl.constexpr,
    HOW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    i = tl.arange(0, N)
    dl.put(inbox, x, N, right, ctx)
    if HOW == "fences":
        dl.fence(ctx)
    if HOW == "xchg":
        tl.atomic_xchg(dl.symm_at(sig, right, ctx), 1, sem=SEM, scope=SCOPE)
    elif HOW == "cas":
        tl.atomic_cas(dl.symm_at(sig, right, ctx), 0, 1, sem=SEM, scope=SCOPE)
    elif HOW == "max":
        tl.atomic_max(dl.symm_at(sig, right, ctx), 1, sem=SEM, scope=SCOPE)
    else:
        tl.atomic_add(dl.symm_at(sig, right, ctx), 1, sem=SEM, scope=SCOPE)
    if HOW == "wait":
        _ = dl.wait(sig, 1, ctx)
    else:
        while tl.atomic_add(sig, 0, sem=TO_SEM, scope=TO_SCOPE) < 1:
            pass
    if HOW == "fences":
        dl.fence(ctx)
    tl.store(out + i, tl.load(inbox + i))


ATOMICS = {
    "release-acquire": ("release", "sys", "acquire", "sys", "add"),
    "acq_rel-acq_rel": ("acq_rel", "sys", "acq_rel", "sys", "add"),
    "xchg": ("release", "sys", "acquire", "sys", "xchg"),
    "cas": ("release", "sys", "acquire", "sys", "cas"),
    "max": ("release", "sys", "acquire", "sys", "max"),
    "release-wait": ("release", "sys", "acquire", "sys", "wait"),
    "relaxed-fences": ("relaxed", "sys", "relaxed", "sys", "fences"),
    "relaxed-acquire": ("relaxed", "sys", "acquire", "sys", "add"),
    "relaxed-wait": ("relaxed", "sys", "acquire", "sys", "wait"),
    "release-relaxed": ("release", "sys", "relaxed", "sys", "add"),
    "relaxed-relaxed": ("relaxed", "sys", "relaxed", "sys", "add"),
    "acquire-acquire": ("acquire", "sys", "acquire", "sys", "add"),
    "release-release": ("release", "sys", "release", "sys", "add"),
    "gpu-sys": ("release", "gpu", "acquire", "sys", "add"),
    "sys-gpu": ("release", "sys", "acquire", "gpu", "add"),
    "gpu-gpu": ("acq_rel", "gpu", "acq_rel", "gpu", "add"),
    "cta-sys": ("release", "cta", "acquire", "sys", "add"),
    "gpu-wait": ("release", "gpu", "acquire", "sys", "wait"),
    "relaxed-xchg": ("relaxed", "sys", "acquire", "sys", "xchg"),
}


def atomics(V):
    x, inbox, out, sig, left = neighbours()
    atomics_kernel[(1,)](x, inbox, out, sig, shmem.context(), *ATOMICS[V], N)
    assert torch.equal(out, torch.arange(N) + 100.0 * left)


cases(
    atomics,
    {
        "release-acquire": (),
        "acq_rel-acq_rel": (),
        "xchg": (),
        "cas": (),
        "max": (),
        "release-wait": (),
        "relaxed-fences": (),
        "relaxed-acquire": ("missing-release",),
        "relaxed-wait": ("missing-release",),
        "relaxed-xchg": ("missing-release",),
        "release-relaxed": ("missing-acquire",),
        "relaxed-relaxed": ("missing-release", "missing-acquire"),
        "acquire-acquire": ("missing-release",),
        "release-release": ("missing-acquire",),
        "gpu-sys": ("narrow-scope",),
        "sys-gpu": ("narrow-scope",),
        "gpu-gpu": ("narrow-scope",),
        "cta-sys": ("narrow-scope",),
        "gpu-wait": ("narrow-scope",),
    },
)


@triton.jit
def pull_kernel(mine, x, out, sig, ctx, V: tl.constexpr, N: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    i = tl.arange(0, N)
    tl.store(mine + i, tl.load(x + i))
    if V == "late-store":
        dl.notify_all(dl.signal_at(sig, me), ctx, 1)
        tl.store(mine + i, tl.load(x + i))
    elif V != "silent":
        dl.notify_all(dl.signal_at(sig, me), ctx, 1)
    for k in range(0, world):
        if V == "all-at-once":
            _ = dl.wait(sig, 1, ctx, "ge", world)
        elif V == "one-short":
            _ = dl.wait(sig, 1, ctx, "ge", world - 1)
        elif V != "silent":
            _ = dl.wait(dl.signal_at(sig, k), 1, ctx)
        if V == "remote_load":
            tl.store(out + k * N + i, dl.remote_load(mine + i, k, ctx))
        elif V == "get_2d":
            dl.get_2d(out + k * N, mine, 2, N // 2, N // 2, N // 2, k, ctx)
        else:
            dl.get(out + k * N, mine, N, k, ctx)


def pull(V):
    world = shmem.pe_count()
    x = torch.arange(N, dtype=torch.float32) + 100 * shmem.my_pe()
    mine, sig = shmem.aclshmem_create_tensor((N,), torch.float32), shmem.create_signals(world)
    out = torch.zeros(world, N)
    pull_kernel[(1,)](mine, x, out, sig, shmem.context(), V, N)
    shmem.barrier_all()
    assert torch.equal(out, torch.arange(N) + 100.0 * torch.arange(world)[:, None])


cases(
    pull,
    {
        "get": (dict(world_size=3),),
        "remote_load": (dict(world_size=3),),
        "get_2d": (),
        "all-at-once": (dict(world_size=4),),
        "one-short": ("data-race", "wrong-result", "unwaited-signal", dict(world_size=3)),
        "late-store": ("data-race", dict(world_size=3)),
        "silent": ("data-race", "wrong-result"),
    },
)
