"""Buffers that are written again and again, and signals that count."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import triton
import triton.language as tl
from registry import cases

N = 16
ROUNDS = 4


@triton.jit
def stream_kernel(x, inbox, out, ready, done, first, rounds, ctx, V: tl.constexpr, BUFFERS: tl.constexpr, N: tl.constexpr):
    """Rank 0 streams blocks to rank 1 through BUFFERS buffers."""
    me = dl.rank(ctx)
    i = tl.arange(0, N)
    if me == 0:
        r = first
        while r < first + rounds:
            slot = r % BUFFERS
            uses = r // BUFFERS
            if V == "one-behind":
                _ = dl.wait(dl.signal_at(done, slot), uses - 1, ctx)
            elif V != "no-ack" and V != "stale":
                _ = dl.wait(dl.signal_at(done, slot), uses, ctx)
            dl.put(inbox + slot * N, x + (r - first) * N, N, 1, ctx)
            if V == "add":
                dl.notify(dl.signal_at(ready, slot), 1, ctx, 1, "add")
            elif V == "stale":
                dl.notify(dl.signal_at(ready, slot), 1, ctx, 1)
                _ = dl.wait(dl.signal_at(done, slot), 1, ctx)
            else:
                dl.notify(dl.signal_at(ready, slot), 1, ctx, uses + 1)
            r += 1
    else:
        r = first
        while r < first + rounds:
            slot = r % BUFFERS
            uses = r // BUFFERS
            if V == "stale":
                _ = dl.wait(dl.signal_at(ready, slot), 1, ctx)
            elif V == "exact":
                _ = dl.wait(dl.signal_at(ready, slot), uses + 1, ctx, "eq")
            else:
                _ = dl.wait(dl.signal_at(ready, slot), uses + 1, ctx)
            if V == "early-ack":
                dl.notify(dl.signal_at(done, slot), 0, ctx, uses + 1)
            tl.store(out + (r - first) * N + i, tl.load(inbox + slot * N + i))
            if V == "stale":
                dl.notify(dl.signal_at(done, slot), 0, ctx, 1)
            elif V == "add":
                dl.notify(dl.signal_at(done, slot), 0, ctx, 1, "add")
            elif V != "early-ack" and V != "no-ack":
                dl.notify(dl.signal_at(done, slot), 0, ctx, uses + 1)
            r += 1


def stream(V):
    buffers = 1 if V == "one" else 2
    x = torch.arange(ROUNDS * N, dtype=torch.float32).view(ROUNDS, N)
    inbox = shmem.aclshmem_create_tensor((buffers, N), torch.float32)
    ready, done, out = shmem.create_signals(buffers), shmem.create_signals(buffers), torch.zeros(ROUNDS, N)
    first = 0
    for _ in range(2 if V == "two-calls" else 1):
        stream_kernel[(1,)](x, inbox, out, ready, done, first, ROUNDS, shmem.context(), V, buffers, N)
        first += ROUNDS
    if shmem.my_pe() == 1:
        assert torch.equal(out, x)


cases(
    stream,
    {
        "set": (),
        "add": (),
        "one": (),
        "exact": (),
        "two-calls": (),
        "no-ack": ("buffer-reuse", "data-race", "wrong-result"),
        "early-ack": ("buffer-reuse", "wrong-result"),
        "one-behind": ("buffer-reuse", "wrong-result"),
        "stale": ("data-race", "wrong-result", "buffer-reuse"),
    },
)


@triton.jit
def shift_kernel(x, inbox, out, sig, rounds, ctx, V: tl.constexpr, BUFFERS: tl.constexpr, N: tl.constexpr):
    """Both ranks swap blocks in every round: what a peer sent in round r says that it is through with round r - 1."""
    peer = 1 - dl.rank(ctx)
    i = tl.arange(0, N)
    for r in range(0, rounds):
        slot = r % BUFFERS
        dl.put(inbox + slot * N, x + r * N, N, peer, ctx)
        dl.notify(sig, peer, ctx, r + 1)
        if V == "constant":
            _ = dl.wait(sig, 1, ctx)
        elif V == "equal":
            _ = dl.wait(sig, r + 1, ctx, "eq")
        else:
            _ = dl.wait(sig, r + 1, ctx)
        tl.store(out + r * N + i, tl.load(inbox + slot * N + i))


def shift(V):
    buffers = 1 if V == "one-buffer" else 2
    me = shmem.my_pe()
    x = torch.arange(ROUNDS * N, dtype=torch.float32).view(ROUNDS, N) + 1000 * me
    inbox, sig = shmem.aclshmem_create_tensor((buffers, N), torch.float32), shmem.create_signals(1)
    out = torch.zeros(ROUNDS, N)
    shift_kernel[(1,)](x, inbox, out, sig, ROUNDS, shmem.context(), V, buffers, N)
    assert torch.equal(out, x - 1000 * me + 1000 * (1 - me))


cases(
    shift,
    {
        "two-buffers": (),
        "one-buffer": ("buffer-reuse", "wrong-result"),
        "constant": ("data-race", "buffer-reuse", "wrong-result"),
        "equal": ("deadlock", "buffer-reuse", "wrong-result"),
    },
)


@triton.jit
def count_kernel(x, inbox, out, sig, rounds, ctx, V: tl.constexpr, N: tl.constexpr):
    """All programs of rank 0 send their part of every round; one counter for all rounds lets a fast one pay for a slow one."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, N)
    if dl.rank(ctx) == 0:
        for r in range(0, rounds):
            dl.put(inbox + (r * programs + pid) * N, x + (r * programs + pid) * N, N, 1, ctx)
            cell = sig if V == "one-counter" else dl.signal_at(sig, r)
            dl.notify(cell, 1, ctx, 1, "add")
    elif pid == 0:
        for r in range(0, rounds):
            if V == "one-counter":
                _ = dl.wait(sig, (r + 1) * programs, ctx)
            elif V == "too-few":
                _ = dl.wait(dl.signal_at(sig, r), programs - 1, ctx)
            else:
                _ = dl.wait(dl.signal_at(sig, r), programs, ctx)
            for p in range(0, programs):
                at = (r * programs + p) * N
                tl.store(out + at + i, tl.load(inbox + at + i))


def count(V):
    programs = 2
    x = torch.arange(ROUNDS * programs * N, dtype=torch.float32)
    inbox, sig = shmem.aclshmem_create_tensor((x.numel(),), torch.float32), shmem.create_signals(ROUNDS)
    out = torch.zeros_like(x)
    count_kernel[(programs,)](x, inbox, out, sig, ROUNDS, shmem.context(), V, N)
    if shmem.my_pe() == 1:
        assert torch.equal(out, x)


cases(
    count,
    {
        "per-round": (),
        "one-counter": ("data-race", "wrong-result"),
        "too-few": ("data-race", "wrong-result"),
    },
)
