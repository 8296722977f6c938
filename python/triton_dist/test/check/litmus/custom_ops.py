"""Host code around kernels that is more than a call: custom ops, autograd, memory that is gone."""

import triton_dist  # noqa: F401  before triton
import triton_dist.language as dl
from triton_dist import shmem

import torch
import triton
import triton.language as tl
from registry import cases

N = 16


@triton.jit
def swap_kernel(inbox, x, out, sig, value, ctx, WAIT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    dl.put_signal(inbox, x, N, sig, 1 - dl.rank(ctx), ctx, value)
    if WAIT:
        _ = dl.wait(sig, value, ctx)
    tl.store(out + i, tl.load(inbox + i))


@torch.library.custom_op("triton_dist_litmus::swap", mutates_args=("inbox", "sig"))
def swap(inbox: torch.Tensor, x: torch.Tensor, sig: torch.Tensor, ctx: torch.Tensor, value: int, wait: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    swap_kernel[(1,)](inbox, x, out, sig, value, ctx, wait, N)
    return out


@torch.library.custom_op("triton_dist_litmus::clear", mutates_args=("inbox",))
def clear(inbox: torch.Tensor) -> None:
    inbox.zero_()


class Swap(torch.autograd.Function):
    """The gradient goes the way back."""

    @staticmethod
    def forward(ctx, x, inbox, sig, table):
        ctx.rest = inbox, sig, table
        return swap(inbox[0], x, sig, table, 1, True)

    @staticmethod
    def backward(ctx, grad):
        inbox, sig, table = ctx.rest
        return swap(inbox[1], grad.contiguous(), sig, table, 2, True), None, None, None


def custom(V):
    me = shmem.my_pe()
    x = torch.full((N,), float(me), requires_grad=V == "autograd")
    inbox, sig = shmem.aclshmem_create_tensor((2, N), torch.float32), shmem.create_signals(1)
    ctx = shmem.context()
    if V == "autograd":
        y = Swap.apply(x, inbox, sig, ctx)
        (y * (me + 1)).sum().backward()
        assert (y == 1 - me).all() and (x.grad == 2 - me).all()
        return
    if V.startswith("cleared"):
        clear(inbox)
    if V == "cleared-barrier":
        shmem.barrier_all()
    out = swap(inbox[0], x, sig, ctx, 1, V != "no-wait")
    assert V == "no-wait" or (out == 1 - me).all()


cases(
    custom,
    {
        "op": (),
        "autograd": (),
        "cleared-barrier": (),
        "cleared": ("data-race", "wrong-result"),
        "no-wait": ("data-race", "unwaited-signal"),
    },
)


def gone(V):
    """The host goes on to use memory that it has freed, or its neighbour's."""
    first, second = (shmem.aclshmem_create_tensor((N,), torch.float32) for _ in range(2))
    if V == "freed":
        shmem.aclshmem_free_tensor(first)
        first.fill_(1)
    elif V == "freed-other":
        shmem.aclshmem_free_tensor(second)
        first.fill_(1)
    elif V == "read":
        shmem.aclshmem_free_tensor(first)
        first.tolist()


cases(gone, {"freed-other": (), "freed": ("bad-access",), "read": ("bad-access",)})
