"""Several programs of one rank: counters, locks, order of start, ordinary memory."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import triton
import triton.language as tl
from registry import cases

N = 16


@triton.jit
def partials_kernel(x, partial, out, sig, count, ctx, V: tl.constexpr, N: tl.constexpr):
    """Every program sums its part into ordinary memory; the last, or program 0, adds them up."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, N)
    tl.store(partial + pid, tl.sum(tl.load(x + pid * N + i), 0))
    last = pid == 0
    if V == "notify":
        dl.notify(sig, dl.rank(ctx), ctx, 1, "add")
        if pid == 0:
            _ = dl.wait(sig, programs, ctx)
    elif V == "gpu-atomics":
        tl.atomic_add(count, 1, sem="release", scope="gpu")
        if pid == 0:
            while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < programs:
                pass
    elif V == "cta-atomics":
        tl.atomic_add(count, 1, sem="release", scope="cta")
        if pid == 0:
            while tl.atomic_add(count, 0, sem="acquire", scope="cta") < programs:
                pass
    elif V == "relaxed-atomics":
        tl.atomic_add(count, 1, sem="relaxed", scope="gpu")
        if pid == 0:
            while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < programs:
                pass
    elif V == "last-block":
        last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == programs - 1
    elif V == "last-block-relaxed":
        last = tl.atomic_add(count, 1, sem="relaxed", scope="gpu") == programs - 1
    elif V == "one-early":
        dl.notify(sig, dl.rank(ctx), ctx, 1, "add")
        if pid == 0:
            _ = dl.wait(sig, programs - 1, ctx)
    if last:
        total = 0.0
        for p in range(0, programs):
            total += tl.load(partial + p)
        tl.store(out, total)


def partials(V):
    programs = 3
    x = torch.arange(programs * N, dtype=torch.float32)
    partial, out, count = torch.zeros(programs), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    partials_kernel[(programs,)](x, partial, out, shmem.create_signals(1), count, shmem.context(), V, N)
    assert out.item() == x.sum()


cases(
    partials,
    {
        "notify": (),
        "gpu-atomics": (),
        "last-block": (),
        "cta-atomics": ("narrow-scope",),
        "relaxed-atomics": ("missing-release",),
        "last-block-relaxed": ("missing-release", "missing-acquire"),
        "one-early": ("data-race", "wrong-result"),
        "nothing": ("data-race", "wrong-result"),
    },
)


@triton.jit
def chain_kernel(out, sig, ctx, V: tl.constexpr):
    """Programs wait for one another: more of them than run at a time must not wait for later ones."""
    pid, programs, me = tl.program_id(0), tl.num_programs(0), dl.rank(ctx)
    if V == "forwards":
        if pid > 0:
            _ = dl.wait(dl.signal_at(sig, pid - 1), 1, ctx)
        tl.store(out + pid, pid)
        if pid < programs - 1:
            dl.notify(dl.signal_at(sig, pid), me, ctx, 1)
    elif V == "backwards":
        if pid < programs - 1:
            _ = dl.wait(dl.signal_at(sig, pid + 1), 1, ctx)
        tl.store(out + pid, pid)
        if pid > 0:
            dl.notify(dl.signal_at(sig, pid), me, ctx, 1)
    elif V == "across":
        peer = 1 - me
        dl.notify(dl.signal_at(sig, pid), peer, ctx, 1)
        _ = dl.wait(dl.signal_at(sig, programs - 1 - pid), 1, ctx)
        tl.store(out + pid, pid)


def chain(V):
    out = torch.zeros(4, dtype=torch.int32)
    chain_kernel[(4,)](out, shmem.create_signals(4), shmem.context(), V.partition("-")[0])
    assert out.tolist() == [0, 1, 2, 3]


cases(
    chain,
    {
        "forwards": (dict(resident=1),),
        "forwards-2": (dict(resident=2),),
        "backwards": (),
        "across": (),
        "backwards-1": ("deadlock", dict(resident=1)),
        "backwards-3": ("deadlock", dict(resident=3)),
        "across-2": ("deadlock", dict(resident=2)),
    },
)


@triton.jit
def lock_kernel(lock, count, out, ctx, V: tl.constexpr, TIMES: tl.constexpr):
    """A spin lock at rank 0 around a plain counter there."""
    for _ in range(0, TIMES):
        if V != "none":
            at = dl.symm_at(lock, 0, ctx)
            if V == "gpu":
                while tl.atomic_cas(at, 0, 1, sem="acquire", scope="gpu") != 0:
                    pass
            elif V == "relaxed-lock":
                while tl.atomic_cas(at, 0, 1, sem="relaxed", scope="sys") != 0:
                    pass
            elif V == "dl":
                while dl.atomic_cas(lock, 0, 1, 0, ctx) != 0:
                    pass
            else:
                while tl.atomic_cas(at, 0, 1, sem="acquire", scope="sys") != 0:
                    pass
        here = dl.symm_at(count, 0, ctx)
        tl.store(here, tl.load(here) + 1)
        if V == "gpu":
            tl.atomic_xchg(dl.symm_at(lock, 0, ctx), 0, sem="release", scope="gpu")
        elif V == "relaxed-unlock":
            tl.atomic_xchg(dl.symm_at(lock, 0, ctx), 0, sem="relaxed", scope="sys")
        elif V == "fenced-unlock":
            dl.fence(ctx)
            tl.store(dl.symm_at(lock, 0, ctx), 0)
        elif V == "store-unlock":
            tl.store(dl.symm_at(lock, 0, ctx), 0)
        elif V == "dl":
            dl.atomic_xchg(lock, 0, 0, ctx)
        elif V != "none":
            tl.atomic_xchg(dl.symm_at(lock, 0, ctx), 0, sem="release", scope="sys")


def lock(V):
    cells = shmem.create_signals(2)
    out, programs, times = torch.zeros(1), 2, 2
    lock_kernel[(programs,)](cells[0], cells[1], out, shmem.context(), V, times)
    shmem.barrier_all()
    if shmem.my_pe() == 0:
        assert cells[1, 0].item() == shmem.pe_count() * programs * times


cases(
    lock,
    {
        "sys": (),
        "dl": (),
        "fenced-unlock": (dict(world_size=3),),
        "none": ("data-race", "wrong-result"),
        "gpu": ("narrow-scope", "wrong-result"),
        "relaxed-lock": ("missing-acquire",),
        "relaxed-unlock": ("missing-release",),
        "store-unlock": ("missing-release", "data-race"),
    },
)


@triton.jit
def last_rank_kernel(x, parts, count, out, ctx, V: tl.constexpr, N: tl.constexpr):
    """Every rank leaves its part at rank 0; the last to come adds all of them up."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    i = tl.arange(0, N)
    dl.remote_store(parts + me * N + i, tl.load(x + i), 0, ctx)
    at = dl.symm_at(count, 0, ctx)
    place = 0
    if V == "sys":
        place = tl.atomic_add(at, 1, sem="acq_rel", scope="sys")
    elif V == "default":
        place = tl.atomic_add(at, 1)
    elif V == "release":
        place = tl.atomic_add(at, 1, sem="release", scope="sys")
    elif V == "fences":
        dl.fence(ctx)
        place = tl.atomic_add(at, 1, sem="relaxed", scope="sys")
        dl.fence(ctx)
    if place == world - 1:
        total = tl.zeros((N,), tl.float32)
        for rank in range(0, world):
            total += dl.remote_load(parts + rank * N + i, 0, ctx)
        dl.remote_store(out + i, total, 0, ctx)


def last_rank(V):
    me, world = shmem.my_pe(), shmem.pe_count()
    x = torch.full((N,), 1.0 + me)
    parts, count = shmem.aclshmem_create_tensor((world, N), torch.float32), shmem.create_signals(1)
    out = shmem.aclshmem_create_tensor((N,), torch.float32)
    last_rank_kernel[(1,)](x, parts, count, out, shmem.context(), V, N)
    shmem.barrier_all()
    assert me or (out == world * (world + 1) // 2).all()


cases(
    last_rank,
    {
        "sys": (dict(world_size=3),),
        "fences": (dict(world_size=3),),
        "default": ("narrow-scope", dict(world_size=3)),
        "release": ("missing-acquire", dict(world_size=3)),
    },
)


@triton.jit
def sibling_kernel(x, inbox, out, sig, ctx, V: tl.constexpr, N: tl.constexpr):
    """Program 0 sends, program 1 receives: a wait orders the program that waits alone."""
    i = tl.arange(0, N)
    peer = 1 - dl.rank(ctx)
    if tl.program_id(0) == 0:
        dl.put_signal(inbox, x, N, sig, peer, ctx)
        if V != "own":
            _ = dl.wait(sig, 1, ctx)
        if V == "forwarded":
            dl.notify(dl.signal_at(sig, 1), dl.rank(ctx), ctx, 1)
    else:
        if V == "own":
            _ = dl.wait(sig, 1, ctx)
        elif V == "forwarded":
            _ = dl.wait(dl.signal_at(sig, 1), 1, ctx)
        tl.store(out + i, tl.load(inbox + i))


def sibling(V):
    x, out = torch.ones(N), torch.zeros(N)
    inbox, sig = shmem.aclshmem_create_tensor((N,), torch.float32), shmem.create_signals(2)
    sibling_kernel[(2,)](x, inbox, out, sig, shmem.context(), V, N)
    assert V == "other" or (out == 1).all()


cases(sibling, {"own": (), "forwarded": (), "other": ("data-race",)})


@triton.jit
def two_locks_kernel(locks, ctx, V: tl.constexpr):
    me = dl.rank(ctx)
    first, second = me, 1 - me
    if V == "ordered":
        first, second = 0, 1
    a = dl.symm_at(locks, first, ctx)
    b = dl.symm_at(locks, second, ctx)
    while tl.atomic_cas(a, 0, 1, sem="acquire", scope="sys") != 0:
        pass
    while tl.atomic_cas(b, 0, 1, sem="acquire", scope="sys") != 0:
        pass
    tl.atomic_xchg(b, 0, sem="release", scope="sys")
    tl.atomic_xchg(a, 0, sem="release", scope="sys")


def two_locks(V):
    two_locks_kernel[(1,)](shmem.create_signals(1), shmem.context(), V)


cases(two_locks, {"ordered": (), "crossed": ("deadlock",)})


@triton.jit
def queue_kernel(counter, taken, out, ctx, V: tl.constexpr, N: tl.constexpr):
    """Ranks take numbers from a counter at rank 0 and write the places that they took."""
    for _ in range(0, 3):
        if V == "atomic":
            number = dl.atomic_add(counter, 1, 0, ctx)
        elif V == "gpu":
            number = tl.atomic_add(dl.symm_at(counter, 0, ctx), 1)
        else:
            at = dl.symm_at(counter, 0, ctx)
            number = tl.load(at)
            tl.store(at, number + 1)
        dl.remote_store(taken + number, 1, 0, ctx)


def queue(V):
    counter, taken = shmem.create_signals(1), shmem.aclshmem_create_tensor((16,), torch.int32)
    taken.zero_()
    shmem.barrier_all()
    queue_kernel[(1,)](counter, taken, taken, shmem.context(), V, N)
    shmem.barrier_all()
    if shmem.my_pe() == 0:
        assert int(taken.sum()) == 3 * shmem.pe_count()


cases(
    queue,
    {
        "atomic": (dict(world_size=3),),
        "gpu": ("narrow-scope",),
        "plain": ("data-race", "wrong-result"),
    },
)


@triton.jit
def spin_kernel(sig, out, ctx, V: tl.constexpr):
    me = dl.rank(ctx)
    if V == "bounded":
        tries = 0
        while (tl.load(sig, volatile=True) == 0) & (tries < 50):
            tries += 1
    elif V == "endless":
        if me == 0:
            while tl.load(sig, volatile=True) == 0:
                pass
    elif V == "counting":
        while tl.load(sig, volatile=True) == 0:
            tl.store(out, tl.load(out) + 1)


def spin(V):
    spin_kernel[(1,)](shmem.create_signals(1), torch.zeros(1), shmem.context(), V)


cases(
    spin,
    {
        "bounded": (),
        "endless": ("deadlock",),
        "counting": ("livelock", dict(max_steps=3000)),
    },
)
