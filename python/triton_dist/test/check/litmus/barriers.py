"""Barriers of the device and of the host, and what happens without them."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from registry import cases

N = 16


@triton.jit
def phases_kernel(x, inbox, out, sig, rounds, ctx, V: tl.constexpr, N: tl.constexpr):
    """In every round: all put to the right, meet, read, meet."""
    pid = tl.program_id(0)
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right = (me + 1) % world
    i = tl.arange(0, N)
    for r in range(0, rounds):
        dl.put(inbox + pid * N, x + (r * tl.num_programs(0) + pid) * N, N, right, ctx)
        if V == "barrier_all" or V == "no-second":
            dl.barrier_all(sig, ctx)
        elif V == "barrier_clear" or V == "clear-once":
            dl.barrier_clear(sig, ctx)
        elif V == "barrier_grid" or V == "other-program":
            dl.barrier_grid(sig, ctx)
        elif V == "one-program":
            if pid == 0:
                dl.barrier_all(sig, ctx)
        at = pid
        if V == "other-program" or V == "one-program":
            at = (pid + 1) % tl.num_programs(0)
        tl.store(out + (r * tl.num_programs(0) + at) * N + i, tl.load(inbox + at * N + i))
        if V == "barrier_all":
            dl.barrier_all(sig, ctx)
        elif V == "barrier_clear":
            dl.barrier_clear(sig, ctx)
        elif V == "barrier_grid" or V == "other-program":
            dl.barrier_grid(sig, ctx)


def phases(V):
    me, world, rounds = shmem.my_pe(), shmem.pe_count(), 3
    programs = 2 if V in ("barrier_grid", "other-program", "one-program") else 1
    if V == "one-program":
        rounds = 1
    shape = (rounds, programs, N)
    x = torch.arange(rounds * programs * N, dtype=torch.float32).view(shape) + 1000 * me
    inbox, sig = shmem.aclshmem_create_tensor((programs, N), torch.float32), shmem.create_signals(world + 3)
    out = torch.zeros(shape)
    phases_kernel[(programs,)](x, inbox, out, sig, rounds, shmem.context(), V, N)
    assert torch.equal(out, x - 1000 * me + 1000 * ((me - 1) % world))


cases(
    phases,
    {
        "barrier_all": (dict(world_size=3),),
        "barrier_clear": (dict(world_size=3),),
        "barrier_grid": (),
        "other-program": (),
        "none": ("data-race", "buffer-reuse", "wrong-result"),
        "no-second": ("buffer-reuse", "data-race", "wrong-result", dict(world_size=3)),
        "clear-once": ("buffer-reuse", "data-race", "wrong-result"),
        "one-program": ("data-race", "wrong-result"),
    },
)


@triton.jit
def copy_kernel(dst, src, peer, ctx, N: tl.constexpr):
    dl.put(dst, src, N, peer, ctx)


@triton.jit
def read_kernel(dst, src, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(dst + i, tl.load(src + i))


def launches(V):
    """Write in one kernel, read in the next: the two ranks must meet in between."""
    me, world = shmem.my_pe(), shmem.pe_count()
    dist.init_process_group(shmem.process_group_backend())
    x, out = torch.arange(N, dtype=torch.float32) + 100 * me, torch.zeros(N)
    inbox = shmem.aclshmem_create_tensor((N,), torch.float32)
    ctx = shmem.context()
    copy_kernel[(1,)](inbox, x, (me + 1) % world, ctx, N)
    if V == "barrier":
        shmem.barrier_all()
    elif V == "dist-barrier":
        dist.barrier()
    elif V == "all_reduce":
        dist.all_reduce(torch.ones(1))
    elif V == "allocation":
        shmem.create_signals(1)
    elif V == "object":
        dist.all_gather_object([None] * world, me)
    elif V == "broadcast":
        dist.broadcast(torch.zeros(1), 0)
    read_kernel[(1,)](out, inbox, N)
    assert torch.equal(out, torch.arange(N) + 100.0 * ((me - 1) % world))
    dist.destroy_process_group()


cases(
    launches,
    {
        "barrier": (dict(world_size=3),),
        "dist-barrier": (),
        "all_reduce": (),
        "allocation": (),
        "object": (),
        "broadcast": ("data-race", "wrong-result"),
        "nothing": ("data-race", "wrong-result"),
    },
)


def teams(V):
    """Two teams of two ranks: a barrier of one's own team does not order the other team."""
    me = shmem.my_pe()
    rows, columns = shmem.team_split_2d(0, 2)
    x, out = torch.arange(N, dtype=torch.float32) + 100 * me, torch.zeros(N)
    inbox = shmem.aclshmem_create_tensor((N,), torch.float32)
    peer = shmem.team_translate_pe(rows, 1 - shmem.team_my_pe(rows), 0)
    copy_kernel[(1,)](inbox, x, 1 - shmem.team_my_pe(rows), shmem.context(rows), N)
    shmem.barrier_all(rows if V == "own" else columns)
    read_kernel[(1,)](out, inbox, N)
    assert torch.equal(out, torch.arange(N) + 100.0 * peer)


cases(teams, {"own": (dict(world_size=4),), "other": ("data-race", "wrong-result", dict(world_size=4))})
