"""Whole exchanges as users write them: tensor descriptors, blocks that are fetched, teams, ragged sizes, acknowledgements."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import triton
import triton.language as tl
from registry import cases

N = 16


@triton.jit
def descriptors_kernel(inbox, x, out, sig, ctx, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    peer = 1 - dl.rank(ctx)
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [M, N])
    there = tl.make_tensor_descriptor(dl.symm_at(inbox, peer, ctx), [M, N], [N, 1], [M, N])
    here = tl.make_tensor_descriptor(inbox, [M, N], [N, 1], [M, N])
    result = tl.make_tensor_descriptor(out, [M, N], [N, 1], [M, N])
    if V == "early":
        dl.notify(sig, peer, ctx, 1)
    there.store([0, 0], source.load([0, 0]))
    if V != "early":
        dl.notify(sig, peer, ctx, 1)
    if V != "no-wait":
        _ = dl.wait(sig, 1, ctx)
    result.store([0, 0], here.load([0, 0]))


def descriptors(V):
    me = shmem.my_pe()
    x, out = torch.full((4, N), 1.0 + me), torch.zeros(4, N)
    inbox, sig = shmem.aclshmem_create_tensor((4, N), torch.float32), shmem.create_signals(1)
    descriptors_kernel[(1,)](inbox, x, out, sig, shmem.context(), V, 4, N)
    assert V != "right" or (out == 2 - me).all()


cases(
    descriptors,
    {"right": (), "no-wait": ("data-race", "unwaited-signal"), "early": ("data-race", "wrong-result")},
)


@triton.jit
def fetched_kernel(source, out, sig, rounds, ctx, V: tl.constexpr, N: tl.constexpr):
    """Rank 0 offers a block in every round, the others get it: it may not be the next one before all have."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    i = tl.arange(0, N)
    for r in range(0, rounds):
        if me == 0:
            if V == "right":
                _ = dl.wait(dl.signal_at(sig, 1), r * (world - 1), ctx)
            elif V == "one-short":
                _ = dl.wait(dl.signal_at(sig, 1), r * (world - 1) - 1, ctx)
            tl.store(source + i, i + 100 * r)
            dl.notify_all(sig, ctx, r + 1)
        else:
            _ = dl.wait(sig, r + 1, ctx)
            if V == "early":
                dl.notify(dl.signal_at(sig, 1), 0, ctx, 1, "add")
            dl.get(out + r * N, source, N, 0, ctx)
            if V != "early":
                dl.notify(dl.signal_at(sig, 1), 0, ctx, 1, "add")


def fetched(V):
    rounds = 3
    source, sig = shmem.aclshmem_create_tensor((N,), torch.int32), shmem.create_signals(2)
    out = torch.zeros(rounds, N, dtype=torch.int32)
    fetched_kernel[(1,)](source, out, sig, rounds, shmem.context(), V.removesuffix("-2"), N)
    if V.startswith("right") and shmem.my_pe():
        assert torch.equal(out, torch.arange(N, dtype=torch.int32) + 100 * torch.arange(rounds, dtype=torch.int32)[:, None])


REUSED = "buffer-reuse", "data-race", "wrong-result"
cases(
    fetched,
    {
        "right": (dict(world_size=3),),
        "right-2": (),
        "none": (*REUSED, "unwaited-signal"),
        "one-short": (*REUSED, dict(world_size=3)),
        "early": REUSED,
    },
)


def teams(V):
    """A barrier of two ranks orders no other two; a context of a team reaches its ranks."""
    me = shmem.my_pe()
    x = shmem.aclshmem_create_tensor((N,), torch.int32)
    pairs = [shmem.team_split_strided(0, first, 1, 2) for first in (0, 2)]
    x.fill_(me)
    shmem.barrier_all() if V == "world" else shmem.barrier_all(pairs[me // 2])
    peer = me ^ 1 if V == "within" else (me + 2) % 4
    assert (shmem.peer_tensor(x, peer) == peer).all()


cases(
    teams,
    {
        "world": (dict(world_size=4),),
        "within": (dict(world_size=4),),
        "across": ("data-race", "wrong-result", dict(world_size=4)),
    },
)


@triton.jit
def ragged_kernel(x, starts, counts, inbox, received, sig, ctx, V: tl.constexpr, MOST: tl.constexpr):
    """Every rank sends each its rows, whose number only the sender knows, and the number."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    for peer in range(0, world):
        n = tl.load(counts + peer)
        if V == "count-late":
            dl.put_signal(inbox + me * MOST, x + tl.load(starts + peer), n, dl.signal_at(sig, me), peer, ctx)
            dl.remote_store(received + me, n, peer, ctx)
        else:
            dl.put(inbox + me * MOST, x + tl.load(starts + peer), n, peer, ctx)
            dl.remote_store(received + me, n, peer, ctx)
            if (V != "none-for-zero") | (n > 0):
                dl.notify(dl.signal_at(sig, me), peer, ctx, 1)
    for source in range(0, world):
        _ = dl.wait(dl.signal_at(sig, source), 1, ctx)


def ragged(V):
    me, world, most = shmem.my_pe(), shmem.pe_count(), 8
    counts = torch.tensor([me * peer % 5 for peer in range(world)], dtype=torch.int32)
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    inbox = shmem.aclshmem_create_tensor((world, most), torch.float32)
    received, sig = shmem.aclshmem_create_tensor((world,), torch.int32), shmem.create_signals(world)
    received.fill_(-1)
    shmem.barrier_all()
    ragged_kernel[(1,)](torch.arange(40.0), starts, counts, inbox, received, sig, shmem.context(), V, most)
    assert received.tolist() == [source * me % 5 for source in range(world)]


cases(
    ragged,
    {
        "right": (dict(world_size=3),),
        "count-late": ("data-race", "wrong-result", dict(world_size=3)),
        "none-for-zero": ("deadlock", dict(world_size=3)),
    },
)

OPERATIONS = {
    "out": lambda x: torch.add(torch.ones(N), 1, out=x),
    "cat": lambda x: torch.cat([torch.ones(N // 2), torch.ones(N // 2)], out=x),
    "index_put": lambda x: x.__setitem__(torch.tensor([1, 3]), 5.0),
    "slice": lambda x: x[::2].fill_(5),
}


def written(V):
    """All ways in which torch writes; the peer reads every fourth element."""
    x = shmem.aclshmem_create_tensor((N,), torch.float32)
    name, _, how = V.partition("-")
    OPERATIONS[name](x)
    if how != "early":
        shmem.barrier_all()
    shmem.peer_tensor(x, 1 - shmem.my_pe())[3::4].max() if name == "index_put" else (
        shmem.peer_tensor(x, 1 - shmem.my_pe())[::4].view(2, 2) @ torch.ones(2, 2)
    )


cases(
    written,
    {
        "out": (),
        "cat": (),
        "index_put": (),
        "slice": (),
        "out-early": ("data-race",),
        "cat-early": ("data-race",),
        "index_put-early": ("data-race",),
        "slice-early": ("data-race",),
    },
)
