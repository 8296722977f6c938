"""Which bytes: overlap and neighbourhood, bounds, lines of signals, sets and adds on one cell, relays."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import triton
import triton.language as tl
from registry import cases

N = 16


@triton.jit
def parts_kernel(board, x, start, stride, n, ctx, N: tl.constexpr):
    i = tl.arange(0, N)
    dl.remote_store(board + start + i * stride, tl.load(x + i, mask=i < n), 0, ctx, mask=i < n)


PARTS = {
    "adjacent": (torch.float32, lambda me, world: (me * N, 1, N)),
    "bytes": (torch.int8, lambda me, world: (me * 3, 1, 3)),
    "halves": (torch.float16, lambda me, world: (me * 5, 1, 5)),
    "interleaved": (torch.float32, lambda me, world: (me, world, N)),
    "interleaved-bytes": (torch.uint8, lambda me, world: (me, world, N)),
    "doubles": (torch.float64, lambda me, world: (me * N, 1, N)),
    "overlap": (torch.float32, lambda me, world: (me * (N - 1), 1, N)),
    "overlap-bytes": (torch.int8, lambda me, world: (me * 3, 1, 4)),
    "crossing": (torch.int32, lambda me, world: (me, 2 + me, N)),
    "same": (torch.float32, lambda me, world: (0, 1, N)),
}


def parts(V):
    """Each rank writes its part of a tensor at rank 0."""
    dtype, part = PARTS[V]
    me, world = shmem.my_pe(), shmem.pe_count()
    board = shmem.aclshmem_create_tensor((N * 4,), dtype)
    x = (torch.arange(N) + me).to(dtype)
    parts_kernel[(1,)](board, x, *part(me, world), shmem.context(), N)


cases(
    parts,
    {
        "adjacent": (dict(world_size=3),),
        "bytes": (dict(world_size=4),),
        "halves": (dict(world_size=3),),
        "interleaved": (dict(world_size=3),),
        "interleaved-bytes": (dict(world_size=4),),
        "doubles": (),
        "overlap": ("data-race", dict(world_size=3)),
        "overlap-bytes": ("data-race", dict(world_size=4)),
        "crossing": ("data-race",),
        "same": ("data-race",),
    },
)


@triton.jit
def beside_kernel(board, data, out, ctx, V: tl.constexpr, N: tl.constexpr):
    """A flag among data words: the sender goes on to store to the words beside it."""
    i = tl.arange(0, N)
    if dl.rank(ctx) == 0:
        there = dl.symm_at(board, 1, ctx)
        dl.put(data, data + N, N, 1, ctx)
        tl.atomic_xchg(there + 3, 1, sem="release", scope="sys")
        if V == "strided":
            tl.store(there + 2 * i, i)
        elif V == "masked":
            tl.store(there + i, i, mask=i != 3)
        elif V == "rows":
            tl.store(there + i[:, None] * 4 + tl.arange(0, 2)[None, :], i[:, None])
        elif V == "over":
            tl.store(there + i, tl.where(i == 3, 1, i))
    else:
        while tl.atomic_add(board + 3, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.store(out + i, tl.load(data + i))


def beside(V):
    me = shmem.my_pe()
    board, data = (shmem.aclshmem_create_tensor((4 * N,), torch.int32) for _ in range(2))
    board.zero_()
    data.copy_(torch.arange(4 * N) + 100 * me)
    out = torch.zeros(N, dtype=torch.int32)
    shmem.barrier_all()
    beside_kernel[(1,)](board, data, out, shmem.context(), V, N)
    shmem.barrier_all()
    assert me == 0 or torch.equal(out, torch.arange(N, 2 * N, dtype=torch.int32))


cases(
    beside,
    {
        "strided": (),
        "masked": (),
        "rows": (),
        "over": ("data-race", "missing-release", "missing-acquire"),
    },
)


@triton.jit
def fenced_kernel(word, sig, ctx, V: tl.constexpr):
    """Ranks 0 and 1 store one word at rank 2."""
    me = dl.rank(ctx)
    if me < 2:
        if V != "unfenced" and (V != "one-fenced" or me == 0):
            dl.fence(ctx)
        if V == "ordered" and me == 1:
            _ = dl.wait(sig, 1, ctx)
        if V == "published" and me == 1:  # rank 0's fenced store to a signal, then a plain one
            _ = dl.wait(dl.signal_at(sig, 1), 1, ctx)
        dl.remote_store(word, 5, 2, ctx)
        if V == "notified":  # a later atomic of the same word hides nothing
            tl.atomic_add(dl.symm_at(word, 2, ctx), 1, sem="relaxed", scope="sys")
        if V == "ordered" and me == 0:
            dl.notify(sig, 1, ctx, 1)
        if V == "published" and me == 0:
            dl.fence(ctx)
            dl.remote_store(dl.signal_at(sig, 1), 1, 1, ctx)


def fenced(V):
    word, sig = shmem.aclshmem_create_tensor((1,), torch.int32), shmem.create_signals(2)
    word.zero_()
    shmem.barrier_all()
    fenced_kernel[(1,)](word, sig, shmem.context(), V)
    shmem.barrier_all()
    assert V in ("notified",) or shmem.my_pe() != 2 or word.item() == 5


cases(
    fenced,
    {
        "ordered": (dict(world_size=3),),
        "published": (dict(world_size=3),),
        "both": ("data-race", dict(world_size=3)),
        "one-fenced": ("data-race", dict(world_size=3)),
        "unfenced": ("data-race", dict(world_size=3)),
        "notified": ("data-race", dict(world_size=3)),
    },
)


@triton.jit
def wiped_kernel(word, sig, out, ctx, V: tl.constexpr):
    """Ranks 1 and 2 add to a word at rank 0, which rank 0 sets by a plain store after a fence, or by a notify."""
    me = dl.rank(ctx)
    there = dl.symm_at(word, 0, ctx)
    if me > 0:
        if V == "before":  # rank 0's set comes first
            _ = dl.wait(sig, 1, ctx)
        if V == "exchange":  # takes what is there and leaves nothing, as long as there is nothing: a doorbell
            while tl.atomic_xchg(there, 0, sem="acquire", scope="sys") == 0:
                pass
        elif V == "compare-and-swap":
            while tl.atomic_cas(there, 5, 0, sem="acquire", scope="sys") != 5:
                pass
        elif V == "look":
            while tl.atomic_add(there, 0, sem="acquire", scope="sys") == 0:
                pass
        elif V == "maximum":
            tl.atomic_max(there, me + 5, sem="relaxed", scope="sys")
        else:
            tl.atomic_add(there, 1, sem="release", scope="sys")
        if V == "after":
            dl.notify(sig, 0, ctx, 1, "add")
    elif V == "exchange" or V == "compare-and-swap":
        for _ in range(0, 2):  # one for each rank
            while tl.load(word, volatile=True) != 0:
                pass
            dl.fence(ctx)
            tl.store(word, 5)
    else:
        if V == "after":
            _ = dl.wait(sig, 2, ctx)
        elif V == "seen":
            _ = dl.wait(word, 2, ctx)
        elif V == "seen-relaxed":
            while tl.load(word, volatile=True) < 2:
                pass
        elif V == "half-seen":
            _ = dl.wait(word, 1, ctx)
        if V == "notify":
            dl.notify(word, 0, ctx, 5)
        else:
            dl.fence(ctx)
            tl.store(word, 5)
        if V == "before":
            dl.notify_all(sig, ctx, 1)


def wiped(V):
    word, sig, out = shmem.create_signals(1), shmem.create_signals(1), torch.zeros(1, dtype=torch.int32)
    wiped_kernel[(1,)](word, sig, out, shmem.context(), V)
    shmem.barrier_all()
    assert shmem.my_pe() or V not in ("before", "after", "seen", "look") or word[0, 0].item() == 5 + 2 * (V == "before")


cases(
    wiped,
    {
        "after": (dict(world_size=3),),
        "before": (dict(world_size=3),),
        "seen": (dict(world_size=3),),
        "seen-relaxed": (dict(world_size=3),),
        "look": (dict(world_size=3),),
        "exchange": (dict(world_size=3),),
        "compare-and-swap": (dict(world_size=3),),
        "store": ("lost-update", dict(world_size=3)),
        "notify": ("lost-update", dict(world_size=3)),
        "maximum": ("lost-update", dict(world_size=3)),
        "half-seen": ("lost-update", dict(world_size=3)),
    },
)


@triton.jit
def bounds_kernel(buffer, plain, sig, n, ctx, V: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    me = dl.rank(ctx)
    if V == "ragged":
        dl.remote_store(buffer + i, i, me, ctx, mask=i < n)
    elif V == "past-end":
        dl.remote_store(buffer + i, i, me, ctx)
    elif V == "put-past-end":
        dl.put(buffer, plain, n + 8, me, ctx)
    elif V == "peer":
        dl.put(buffer, plain, n, dl.num_ranks(ctx), ctx)
    elif V == "not-symmetric":
        dl.put(plain, buffer, n, me, ctx)
    elif V == "get-plain":
        dl.get(plain, buffer, n, me, ctx)
    elif V == "signal-outside":
        dl.notify(dl.signal_at(sig, 40), me, ctx, 1)
    elif V == "freed":
        tl.store(buffer + i, i, mask=i < n)


def bounds(V):
    n = 10
    buffer, plain = shmem.aclshmem_create_tensor((n,), torch.int32), torch.zeros(N, dtype=torch.int32)
    sig, ctx = shmem.create_signals(1), shmem.context()
    if V == "freed":
        shmem.aclshmem_free_tensor(buffer)
    bounds_kernel[(1,)](buffer, plain, sig, n, ctx, V, N)


cases(
    bounds,
    {
        "ragged": (),
        "get-plain": (),
        "past-end": ("bad-access",),
        "put-past-end": ("bad-access",),
        "peer": ("bad-access",),
        "not-symmetric": ("bad-access",),
        "signal-outside": ("bad-access",),
        "freed": ("bad-access",),
    },
)


@triton.jit
def cells_kernel(sig, ctx, V: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    if V == "packed":
        dl.notify_all(sig + me, ctx, 1)
        _ = dl.wait(sig + (1 - me), 1, ctx)
    elif V == "half-line":
        dl.notify_all(sig + me * 4, ctx, 1)
        _ = dl.wait(sig + (1 - me) * 4, 1, ctx)
    elif V == "own-line":
        dl.notify(dl.signal_at(sig, me), 1 - me, ctx, 1)
        _ = dl.wait(dl.signal_at(sig, 1 - me), 1, ctx)
    elif V == "all-add":
        dl.notify(sig, 0, ctx, 1, "add")
        if me == 0:
            _ = dl.wait(sig, world, ctx)
    elif V == "set-and-add":
        if me == 1:
            dl.notify(sig, 0, ctx, 1, "set")
        else:
            dl.notify(sig, 0, ctx, 1, "add")
        if me == 0:
            _ = dl.wait(sig, 1, ctx)
    elif V == "two-sets":
        dl.notify(sig, 0, ctx, me + 1, "set")
        if me == 0:
            _ = dl.wait(sig, 1, ctx)
    elif V == "same-set":
        dl.notify(sig, 0, ctx, 1, "set")
        if me == 0:
            _ = dl.wait(sig, 1, ctx)
    elif V == "reset":  # the owner clears what others still add to
        dl.notify(sig, 0, ctx, 1, "add")
        if me == 0:
            _ = dl.wait(sig, 2, ctx)
            dl.notify(sig, 0, ctx, 0, "set")
    elif V == "take-away":
        dl.notify(sig, 0, ctx, 1, "add")
        if me == 0:
            _ = dl.wait(sig, world, ctx)
            dl.notify(sig, 0, ctx, -world, "add")
    elif V == "unwaited":
        dl.notify(dl.signal_at(sig, 1), 1 - me, ctx, 1)
    elif V == "looked-at":
        dl.notify(dl.signal_at(sig, 1), 1 - me, ctx, 1)
        _ = dl.test(dl.signal_at(sig, 1), 1, ctx)


def cells(V):
    dtype = torch.int64 if V.endswith("-64") else torch.int32
    sig = shmem.create_signals(4, dtype)
    cells_kernel[(1,)](sig, shmem.context(), V.removesuffix("-64"))
    if V in ("all-add", "take-away"):
        shmem.barrier_all()
        assert shmem.my_pe() or sig[0, 0].item() == (shmem.pe_count() if V == "all-add" else 0)


cases(
    cells,
    {
        "own-line": (),
        "own-line-64": (),
        "all-add": (dict(world_size=3),),
        "take-away": (dict(world_size=3),),
        "same-set": (),
        "looked-at": (),
        "packed": ("shared-line",),
        "half-line": ("shared-line",),
        "packed-64": ("shared-line",),
        "set-and-add": ("lost-update",),
        "two-sets": ("lost-update",),
        "reset": ("lost-update", "deadlock", dict(world_size=3)),
        "unwaited": ("unwaited-signal",),
    },
)


@triton.jit
def dekker_kernel(sig, board, ctx, V: tl.constexpr):
    """Each of two ranks says that it comes, and enters unless the other has said so: a store before a load."""
    me = dl.rank(ctx)
    mine, theirs = dl.symm_at(dl.signal_at(sig, me), 0, ctx), dl.symm_at(dl.signal_at(sig, 1 - me), 0, ctx)
    dl.fence(ctx)
    if V == "exchange":
        dl.atomic_xchg(dl.signal_at(sig, me), 1, 0, ctx)
        there = dl.atomic_add(dl.signal_at(sig, 1 - me), 0, 0, ctx)
    else:
        tl.store(mine, 1)
        if V == "quiet":
            dl.quiet(ctx)
        elif V == "fence":
            dl.fence(ctx)
        there = tl.load(theirs, volatile=True)
    dl.remote_store(board + me, 1 - there, 0, ctx)


def dekker(V):
    sig, board = shmem.create_signals(2), shmem.aclshmem_create_tensor((2,), torch.int32)
    board.zero_()
    shmem.barrier_all()
    dekker_kernel[(1,)](sig, board, shmem.context(), V)
    shmem.barrier_all()
    assert shmem.my_pe() or int(board.sum()) <= 1, "both have entered"


# A fence orders stores before stores and loads before loads, but no store before a load. No data is read without an order, so
# only the result of a schedule with weak memory shows it.
cases(dekker, {"quiet": (), "exchange": (), "fence": ("wrong-result",)})


@triton.jit
def relay_kernel(x, inbox, out, sig, ctx, V: tl.constexpr, N: tl.constexpr):
    """Rank 0 writes to rank 2 and tells rank 1, which tells rank 2."""
    me = dl.rank(ctx)
    i = tl.arange(0, N)
    if me == 0:
        dl.put(inbox, x, N, 2, ctx)
        if V == "chain" or V == "relaxed-chain":
            dl.notify(sig, 2, ctx, 1, "add")
        else:
            dl.notify(sig, 1, ctx, 1)
    elif me == 1:
        if V == "not-waited":
            dl.notify(sig, 2, ctx, 1)
            _ = dl.wait(sig, 1, ctx)
        elif V == "relaxed":
            _ = dl.wait(sig, 1, ctx)
            tl.atomic_xchg(dl.symm_at(sig, 2, ctx), 1, sem="relaxed", scope="sys")
        elif V == "gpu":
            while tl.atomic_add(sig, 0, sem="acquire", scope="gpu") < 1:
                pass
            dl.notify(sig, 2, ctx, 1)
        elif V == "chain":  # an addition to what rank 0 has published publishes it on
            dl.notify(sig, 2, ctx, 1, "add")
        elif V == "relaxed-chain":
            tl.atomic_add(dl.symm_at(sig, 2, ctx), 1, sem="relaxed", scope="sys")
        else:
            _ = dl.wait(sig, 1, ctx)
            dl.notify(sig, 2, ctx, 1)
    else:
        _ = dl.wait(sig, 2 if V == "chain" or V == "relaxed-chain" else 1, ctx)
        tl.store(out + i, tl.load(inbox + i))


def relay(V):
    x, out = torch.arange(N, dtype=torch.float32), torch.zeros(N)
    inbox, sig = shmem.aclshmem_create_tensor((N,), torch.float32), shmem.create_signals(1)
    relay_kernel[(1,)](x, inbox, out, sig, shmem.context(), V, N)
    if shmem.my_pe() == 2:
        assert torch.equal(out, x)


cases(
    relay,
    {
        "waited": (dict(world_size=3),),
        "chain": (dict(world_size=3),),
        "relaxed-chain": (dict(world_size=3),),
        "not-waited": ("data-race", "wrong-result", dict(world_size=3)),
        "relaxed": ("missing-release", dict(world_size=3)),
        "gpu": ("narrow-scope", dict(world_size=3)),
    },
)
