"""Host code that touches symmetric memory: torch operations, copies and signals of shmem."""

import copy
import io
import pickle

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
def send_kernel(inbox, x, sig, value, ctx, N: tl.constexpr):
    right = (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    dl.put_signal(inbox, x, N, sig, right, ctx, value)


@triton.jit
def receive_kernel(out, inbox, sig, value, ctx, N: tl.constexpr):
    _ = dl.wait(sig, value, ctx)
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(inbox + i))


READS = {
    "sum": torch.sum,
    "tolist": torch.Tensor.tolist,
    "item": lambda t: t[0].item(),
    "view": lambda t: t.view(-1),
    "str": str,
    "print": print,
    "format": "{}".format,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}


def tensors(V):
    """A peer's kernel writes what the host clears or reads by torch."""
    me, world = shmem.my_pe(), shmem.pe_count()
    x, out = torch.arange(N, dtype=torch.float32) + 100 * me, torch.zeros(N)
    inbox, sig = shmem.aclshmem_create_tensor((N,), torch.float32), shmem.create_signals(1)
    ctx = shmem.context()
    if V == "fill":
        inbox.fill_(-1)
    elif V == "fill-barrier":
        inbox.fill_(-1)
        shmem.barrier_all()
    elif V == "clear-signal":
        sig.zero_()
    elif V == "clear-signal-barrier":
        sig.zero_()
        shmem.barrier_all()
    elif V == "copy":
        inbox.copy_(x)
    elif V == "slice":
        inbox[3:5] = 0
    elif V == "other-slice":
        spare = shmem.aclshmem_create_tensor((N,), torch.float32)
        spare[3:5] = 0
    send_kernel[(1,)](inbox, x, sig, 1, ctx, N)
    if V.endswith("-early"):
        READS[V.removesuffix("-early")](inbox)
    receive_kernel[(1,)](out, inbox, sig, 1, ctx, N)
    if V in READS:
        READS[V](inbox)
    assert torch.equal(out, torch.arange(N) + 100.0 * ((me - 1) % world))


cases(
    tensors,
    {
        "plain": (),
        "fill-barrier": (),
        "clear-signal-barrier": (),
        "other-slice": (),
        "sum": (),
        "tolist": (),
        "item": (),
        "view": (),
        "str": (),
        "save": (),
        "deepcopy": (),
        "fill": ("data-race", "wrong-result"),
        "copy": ("data-race", "wrong-result"),
        "slice": ("data-race", "wrong-result"),
        "clear-signal": ("data-race", "missing-release", "deadlock", "wrong-result"),
        "sum-early": ("data-race",),
        "tolist-early": ("data-race",),
        "item-early": ("data-race",),
        "str-early": ("data-race",),
        "print-early": ("data-race",),
        "format-early": ("data-race",),
        "save-early": ("data-race",),
        "pickle-early": ("data-race",),
        "deepcopy-early": ("data-race",),
    },
)


@triton.jit
def accumulate_kernel(total, ctx, N: tl.constexpr):
    i = tl.arange(0, N)
    for peer in range(dl.num_ranks(ctx)):
        tl.atomic_add(dl.symm_at(total, peer, ctx) + i, 1.0, sem="relaxed", scope="sys")


def accumulator(V):
    """All ranks add to all; each host clears a part of its own sum before the next call."""
    world, total = shmem.pe_count(), shmem.aclshmem_create_tensor((N,), torch.float32)
    total.zero_()
    shmem.barrier_all()
    for _ in range(2):
        accumulate_kernel[(1,)](total, shmem.context(), N)
        shmem.barrier_all()
        assert (total == world).all() or V == "cleared"
        total.zero_() if V == "cleared-barrier" else total[3:9].zero_()
        if V == "cleared-barrier":
            shmem.barrier_all()


cases(accumulator, {"cleared-barrier": (), "cleared": ("data-race", "buffer-reuse", "wrong-result", dict(world_size=3))})


def loop(V):
    """Many calls with one signal: epochs, or a signal cleared by the host in between."""
    me, world = shmem.my_pe(), shmem.pe_count()
    x, out = torch.arange(N, dtype=torch.float32) + 100 * me, torch.zeros(N)
    inbox, sig = shmem.aclshmem_create_tensor((N,), torch.float32), shmem.create_signals(1)
    for call in range(3):
        value = call + 1 if V == "epochs" else 1
        send_kernel[(1,)](inbox, x, sig, value, shmem.context(), N)
        receive_kernel[(1,)](out, inbox, sig, value, shmem.context(), N)
        if V == "cleared":
            shmem.barrier_all()
            sig.zero_()
        if V != "constant-no-barrier":
            shmem.barrier_all()
        assert torch.equal(out, torch.arange(N) + 100.0 * ((me - 1) % world))
        x += 0


cases(
    loop,
    {
        "epochs": (),
        "cleared": (),
        "constant": ("data-race", "buffer-reuse"),
        "constant-no-barrier": ("data-race", "buffer-reuse"),
    },
)


def rma(V):
    """Copies and signals that the host itself makes."""
    me, world = shmem.my_pe(), shmem.pe_count()
    right = (me + 1) % world
    x, got = torch.arange(N, dtype=torch.float32) + 100 * me, torch.zeros(N)
    inbox, sig = shmem.aclshmem_create_tensor((N,), torch.float32), shmem.create_signals(1)
    here, signal = inbox.data_ptr(), sig.data_ptr()
    if V in ("putmem_signal", "signal-unwaited"):
        shmem.aclshmemx_putmem_signal(here, x.data_ptr(), N * 4, signal, 1, shmem.SignalOp.SIGNAL_SET, right)
    elif V in ("getmem", "getmem-early"):
        inbox.copy_(x)
    elif V == "peer_tensor" or V == "peer_tensor-early":
        shmem.peer_tensor(inbox, right).copy_(x)
    else:
        shmem.aclshmem_putmem(here, x.data_ptr(), N * 4, right)
    if V == "putmem_signal":
        shmem.aclshmem_signal_wait_until(signal, shmem.CmpOp.CMP_GE, 1)
    elif not V.endswith("early") and V != "signal-unwaited":
        shmem.barrier_all()
    if V.startswith("getmem"):
        shmem.aclshmem_getmem(got.data_ptr(), here, N * 4, (me - 1) % world)
    else:
        got.copy_(inbox)
    if V != "signal-unwaited":
        assert torch.equal(got, torch.arange(N) + 100.0 * ((me - 1) % world))


cases(
    rma,
    {
        "putmem": (dict(world_size=3),),
        "putmem_signal": (dict(world_size=3),),
        "getmem": (),
        "peer_tensor": (),
        "putmem-early": ("data-race", "wrong-result"),
        "getmem-early": ("data-race", "wrong-result"),
        "peer_tensor-early": ("data-race", "wrong-result"),
        "signal-unwaited": ("unwaited-signal", "data-race"),
    },
)


@triton.jit
def double_kernel(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 2 * tl.load(x + i))


def under_way(V):
    """Copies that do not block: until the next collective call the source must stay and the target is not there."""
    me, world = shmem.my_pe(), shmem.pe_count()
    right, left = (me + 1) % world, (me - 1) % world
    mine = torch.arange(N, dtype=torch.float32) + 100 * me
    inbox, heap = (shmem.aclshmem_create_tensor((N,), torch.float32) for _ in range(2))
    inbox.fill_(-1), heap.copy_(mine)
    sig, got = shmem.create_signals(1), torch.full((2 * N,), -1.0)
    here, x = inbox.data_ptr(), heap if V.startswith("heap") else mine.clone()
    expected = torch.arange(N) + 100.0 * left
    if V.startswith("get"):
        shmem.barrier_all()
        shmem.aclshmem_getmem_nbi(got[N:].data_ptr(), heap.data_ptr(), N * 4, left)
        if V == "get-late":
            shmem.barrier_all()
        elif V == "get-other":
            assert (got[:N] == -1).all()
        read = got[N:] + 0 if V != "get-other" else expected
        shmem.barrier_all()
        assert torch.equal(read, expected)
        return
    shmem.barrier_all()
    if "signal" in V:
        shmem.aclshmemx_putmem_signal_nbi(here, x.data_ptr(), N * 4, sig.data_ptr(), 1, shmem.SignalOp.SIGNAL_SET, right)
        if V == "signal-clear":
            x.zero_()
        shmem.aclshmem_signal_wait_until(sig.data_ptr(), shmem.CmpOp.CMP_GE, 1)
        assert torch.equal(inbox, expected)
    else:
        shmem.aclshmem_putmem_nbi(here, x.data_ptr(), N * 4, right)
    if V == "read":
        assert (x + 0).sum() == mine.sum()
    elif V == "twice":
        shmem.aclshmem_putmem_nbi(here, heap.data_ptr(), N * 4, right)
    elif V == "clear" or V == "heap-clear":
        x.zero_()
    elif V.endswith("slice"):
        x[3:5] = 0
    elif V == "kernel":
        double_kernel[(1,)](x, N)
    elif V == "kernel-reads":
        receive_kernel[(1,)](got, x, sig, 0, shmem.context(), N)
    elif V == "peer":
        assert torch.equal(shmem.peer_tensor(inbox, right) + 0, mine)
    elif V == "blocking":
        shmem.aclshmem_putmem(here, x.data_ptr(), N * 4, right)
    shmem.barrier_all()
    if V.startswith("after"):
        x.zero_()
    assert torch.equal(inbox, expected)


cases(
    under_way,
    {
        "after": (dict(world_size=3),),
        "signal": (),
        "read": (),
        "kernel-reads": (),
        "get-late": (),
        "get-other": (),
        "get-early": ("data-race",),
        "clear": ("data-race",),
        "heap-clear": ("data-race",),
        "heap-slice": ("data-race",),
        "signal-clear": ("data-race",),
        "kernel": ("data-race",),
        "twice": ("data-race",),
        "blocking": ("data-race",),
        "peer": ("data-race",),
    },
)


def messages(V):
    """torch.distributed orders exactly those ranks that hear of each other."""
    me = shmem.my_pe()
    dist.init_process_group("gloo")
    inbox = shmem.aclshmem_create_tensor((N,), torch.float32)
    inbox.fill_(me)
    token = torch.zeros(1)
    if V == "send":
        dist.send(token, 1) if me == 0 else dist.recv(token, 0)
    elif V == "broadcast":
        dist.broadcast(token, 0)
    elif V == "backwards":
        dist.send(token, 0) if me == 1 else dist.recv(token, 1)
    elif V == "group":
        dist.barrier(group=dist.new_group([0, 1]))
    if me == 1:
        assert (shmem.peer_tensor(inbox, 0) == 0).all()


cases(
    messages,
    {
        "send": (),
        "broadcast": (),
        "group": (),
        "backwards": ("data-race", "wrong-result"),
        "nothing": ("data-race", "wrong-result"),
    },
)


def handoffs(V):
    """Buffers that change hands in the order of streams; without `claim` a writer comes back before the reader is done."""
    me, world = shmem.my_pe(), shmem.pe_count()
    right, left = (me + 1) % world, (me - 1) % world
    inbox, hands = shmem.aclshmem_create_tensor((world, N), torch.float32), shmem.Handoffs(1)
    there = shmem.peer_tensor(inbox, right)[me]
    for call in range(3):
        x = torch.arange(N, dtype=torch.float32) + 100 * me + call
        new = torch.empty_like(inbox)  # reads nothing of what comes
        if V != "no-claim":
            hands.claim(right)
        if V == "early":
            hands.publish(right, 0)
        there.copy_(x)
        if V != "early":
            hands.publish(right, 0)
        if V != "unheard":
            hands.receive(left, 0)
        new.copy_(inbox)
        hands.release(left)
        if V == "unheard":
            hands.receive(left, 0)
        assert torch.equal(new[left], torch.arange(N) + 100.0 * left + call)
    hands.free()


cases(
    handoffs,
    {
        "right": (dict(world_size=3),),
        "early": ("data-race", dict(world_size=3)),
        "unheard": ("data-race", dict(world_size=3)),
        "no-claim": ("data-race", "buffer-reuse", "lost-update", dict(world_size=3)),
    },
)
