"""Relaxed stores: words that tell by themselves that they have come, and words that are taken for more than they tell."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import triton
import triton.language as tl
from registry import cases

N = 8


@triton.jit
def numbered_kernel(x, inbox, out, number, ctx, V: tl.constexpr, N: tl.constexpr):
    """32-bit words beside the number of the call, in 64-bit words; two buffers take turns."""
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    i = tl.arange(0, N)
    buffer = inbox + number % 2 * N + i
    word = (tl.cast(number, tl.int64) << 32) | tl.load(x + i)
    if V == "plain-store":
        dl.remote_store(buffer, word, right, ctx)
    elif V == "two-accesses":  # the two halves apart: no word of the reader's
        halves = (inbox + number % 2 * N).to(tl.pointer_type(tl.int32), bitcast=True)
        dl.remote_store(halves + 2 * i, tl.load(x + i), right, ctx, sem="relaxed")
        dl.remote_store(halves + 2 * i + 1, number, right, ctx, sem="relaxed")
    elif V == "masked":
        dl.remote_store(buffer, word, right, ctx, mask=i < 3, sem="relaxed")
        dl.remote_store(buffer, word, right, ctx, mask=i >= 3, sem="relaxed")
    elif V == "scalars":
        for k in range(0, N):
            here = inbox + number % 2 * N + k
            dl.remote_store(here, (tl.cast(number, tl.int64) << 32) | tl.load(x + k), right, ctx, sem="relaxed")
    else:
        dl.remote_store(buffer, word, right, ctx, sem="relaxed")
    if V == "plain-load":
        while tl.min(tl.load(buffer) >> 32, 0) < number:
            pass
        seen = tl.load(buffer)
    elif V == "atomic-load":
        while tl.min(tl.atomic_add(buffer, tl.zeros((N,), tl.int64), sem="relaxed", scope="sys") >> 32, 0) < number:
            pass
        seen = tl.load(buffer, volatile=True)
    elif V == "narrow-load":
        while tl.min(tl.atomic_add(buffer, tl.zeros((N,), tl.int64), sem="relaxed", scope="gpu") >> 32, 0) < number:
            pass
        seen = tl.load(buffer, volatile=True)
    elif V == "first-alone":  # the first word tells nothing of the others
        while tl.load(inbox + number % 2 * N, volatile=True) >> 32 < number:
            pass
        seen = tl.load(buffer, volatile=True)
    else:
        seen = tl.load(buffer, volatile=True)
        while tl.min(seen >> 32, 0) < number:
            seen = tl.load(buffer, volatile=True)
    tl.store(out + i, (seen & 0xFFFFFFFF).to(tl.int32))


def numbered(V):
    me, world = shmem.my_pe(), shmem.pe_count()
    inbox = shmem.aclshmem_create_tensor((2 * N,), torch.int64)
    inbox.zero_()
    shmem.barrier_all()
    for call in range(1, 4):
        x = torch.arange(N, dtype=torch.int32) + 100 * call + 1000 * me
        out = torch.full((N,), -1, dtype=torch.int32)
        numbered_kernel[(1,)](x, inbox, out, call, shmem.context(), V, N)
        left = torch.arange(N, dtype=torch.int32) + 100 * call + 1000 * ((me - 1) % world)
        assert torch.equal(out, left), call


cases(
    numbered,
    {
        "relaxed": (),
        "masked": (),
        "scalars": (),
        "atomic-load": (),
        "plain-store": ("data-race", "missing-release"),
        "plain-load": ("data-race", "missing-acquire"),
        "two-accesses": ("data-race",),
        "narrow-load": ("narrow-scope", "data-race"),
        "first-alone": ("wrong-result", dict(weak=True)),
    },
)

EMPTY = tl.constexpr(-1)


@triton.jit
def cleared_kernel(x, inbox, out, call, ctx, V: tl.constexpr, N: tl.constexpr):
    """A word that has not come holds EMPTY; its reader puts that back."""
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    i = tl.arange(0, N)
    buffer = inbox + call % 2 * N + i
    dl.remote_store(buffer, tl.load(x + i), right, ctx, sem="relaxed")
    seen = tl.load(buffer, volatile=True)
    while tl.min(seen, 0) == EMPTY:
        seen = tl.load(buffer, volatile=True)
    tl.store(out + i, seen)
    if V == "relaxed":
        dl.remote_store(buffer, tl.full((N,), EMPTY, tl.int32), dl.rank(ctx), ctx, sem="relaxed")
    elif V == "plain":
        tl.store(buffer, tl.full((N,), EMPTY, tl.int32))


def cleared(V):
    me, world = shmem.my_pe(), shmem.pe_count()
    inbox = shmem.aclshmem_create_tensor((2 * N,), torch.int32)
    inbox.fill_(-1)
    shmem.barrier_all()
    for call in range(4):
        x = torch.arange(N, dtype=torch.int32) + 100 * call + 1000 * me
        out = torch.full((N,), -2, dtype=torch.int32)
        cleared_kernel[(1,)](x, inbox, out, call, shmem.context(), V, N)
        assert torch.equal(out, torch.arange(N, dtype=torch.int32) + 100 * call + 1000 * ((me - 1) % world)), call


cases(
    cleared,
    {
        "relaxed": (),
        "plain": ("data-race", "missing-release"),
        "never": ("wrong-result",),
    },
)


@triton.jit
def flag_kernel(x, inbox, out, flag, ctx, V: tl.constexpr, N: tl.constexpr):
    """A payload of plain words, then a relaxed word that says so."""
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    i = tl.arange(0, N)
    dl.put(inbox, x, N, right, ctx)
    if V == "fences" or V == "fence-wait" or V == "first-fence" or V == "quiet":
        if V == "quiet":
            dl.quiet(ctx)
        else:
            dl.fence(ctx)
    dl.remote_store(flag, 1, right, ctx, sem="relaxed")
    if V == "fence-wait" or V == "wait":
        _ = dl.wait(flag, 1, ctx)
    else:
        while tl.load(flag, volatile=True) < 1:
            pass
    if V == "fences" or V == "second-fence" or V == "quiet":
        dl.fence(ctx)
    tl.store(out + i, tl.load(inbox + i))


def flag(V):
    me, world = shmem.my_pe(), shmem.pe_count()
    inbox, word = shmem.aclshmem_create_tensor((N,), torch.float32), shmem.create_signals(1)
    x, out = torch.arange(N, dtype=torch.float32) + 100 * me, torch.full((N,), -1.0)
    flag_kernel[(1,)](x, inbox, out, word, shmem.context(), V, N)
    assert torch.equal(out, torch.arange(N) + 100.0 * ((me - 1) % world))


cases(
    flag,
    {
        "fences": (),
        "quiet": (),
        "fence-wait": (),
        "no-fence": ("missing-release", "missing-acquire"),
        "wait": ("missing-release",),
        "first-fence": ("missing-acquire",),
        "second-fence": ("missing-release",),
    },
)


@triton.jit
def meeting_kernel(word, ctx, V: tl.constexpr):
    """Ranks 0 and 1 write one word at rank 2."""
    me = dl.rank(ctx)
    there = dl.symm_at(word, 2, ctx)
    if me == 0:
        dl.remote_store(word, 7, 2, ctx, sem="relaxed")
    elif me == 1:
        if V == "relaxed":
            dl.remote_store(word, 7, 2, ctx, sem="relaxed")
        elif V == "plain":
            dl.remote_store(word, 7, 2, ctx)
        elif V == "put":
            dl.put(word, word, 1, 2, ctx)
        elif V == "exchange":
            tl.atomic_xchg(there, 7, sem="relaxed", scope="sys")
        elif V == "addition":
            tl.atomic_add(there, 7, sem="relaxed", scope="sys")
        elif V == "narrow":
            tl.atomic_xchg(there, 7, sem="relaxed", scope="gpu")
        elif V == "half":
            dl.remote_store(word.to(tl.pointer_type(tl.int32), bitcast=True), 7, 2, ctx, sem="relaxed")


def meeting(V):
    word = shmem.aclshmem_create_tensor((1,), torch.int64)
    word.fill_(7 if V == "put" else 0)
    shmem.barrier_all()
    meeting_kernel[(1,)](word, shmem.context(), V)
    shmem.barrier_all()
    assert shmem.my_pe() != 2 or word.item() in (7, 14)


cases(
    meeting,
    {
        "relaxed": (dict(world_size=3),),
        "exchange": (dict(world_size=3),),
        "plain": ("data-race", dict(world_size=3)),
        "put": ("data-race", dict(world_size=3)),
        "half": ("data-race", dict(world_size=3)),
        "narrow": ("narrow-scope", "data-race", dict(world_size=3)),
        "addition": ("lost-update", dict(world_size=3)),
    },
)
