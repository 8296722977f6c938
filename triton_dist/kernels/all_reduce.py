"""All-reduce: every rank gets the sum (maximum, minimum, product) of the tensors of all ranks, the same bits everywhere.

    ctx = create_all_reduce_context(1 << 20, torch.float16, "two_shot")   # once: symmetric memory, signals, epochs
    y = all_reduce(x, ctx, "sum")                                # any number of calls, of up to 2**20 elements
    ctx.free()

| method | how | a rank sends | symmetric memory | order |
|---|---|---|---|---|
| mesh | everybody puts all of it to everybody and reduces all of it | (W - 1) n | 2 W n | ranks 0, 1, .. |
| two_shot | a reduce-scatter, whose results go to everybody | 2 (W - 1) n / W | 2 n | ranks 0, 1, .. |
| ring | the same in 2 (W - 1) steps, each to the right neighbour | 2 (W - 1) n / W | 2 n, 3 n for 16-bit types | see below |
| flagged | as mesh; each word carries the number of its call (all_reduce_flagged.py) | 2 (W - 1) n | 4 W n | ranks 0, 1, .. |
| sentinel | as mesh; each word shows by itself that it has come (all_reduce_sentinel.py) | (W - 1) n | 2 W n | ranks 0, 1, .. |
| pipelined | as mesh; half of the programs put, half reduce (all_reduce_pipelined.py) | (W - 1) n | 2 W n | ranks 0, 1, .. |

mesh has the least latency: one trip. two_shot has two, ring 2 (W - 1). In two_shot and ring rank s is the one that reduces
share s (of W equal ones, but for the end), rounds it once and hands it out. The ring reduces share s in the order of ranks
s + 1, s + 2, .. round to s. 16-bit types are summed and multiplied in fp32; the ring's partial sums travel in fp32 too (so it
sends 1.5 times as much for them). Integers wrap around, as in torch. Each program does all of it for its own blocks
(channels.py).

Why nothing is overwritten before it is read, for any number of ranks. Every method ends, for each rank, after it has heard
of every rank; so no rank is more than one call ahead of any other.
- mesh: two buffers take turns. A rank writes buffer e % 2 again in call e + 2, after it finished e + 1, so after every
  rank had put its part of e + 1, which a rank does after it has reduced what call e brought.
- two_shot: one buffer for parts, one for results. A rank puts parts of call e + 1 after it finished e, so after every rank
  had handed out its result of e, having read its parts of e. It hands out its result of e + 1 after the parts of e + 1 of
  every rank have come, which a rank puts after it has copied all results of e.
- ring: a slot for each step, and only the left neighbour writes it. A rank puts partial sums of call e + 1 after it finished
  e. Its last step of e brought the result that its right neighbour had handed out, round the ring, after reading all its
  partial sums of e. It hands on results of e + 1 after its last partial sum of e + 1, which has come round from its right
  neighbour, which began it after it finished e and had read all results of e. Each step is a release and an acquire, and
  those carry all that was before them.

In place: a program reads each element of x before anything writes the same place of out, which it alone does.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import shmem
from triton_dist.tuning import crossover, measured

from . import torch_ops
from .all_reduce_flagged import AllReduceFlagged
from .all_reduce_pipelined import AllReducePipelined
from .all_reduce_sentinel import AllReduceSentinel
from .arguments import name_of, need, of_first_ranks, platform_problem
from .channels import ChannelContext, end_epoch, next_epoch, round_up
from .operator_context import begin, operands_of, passed_before
from .reduce_scatter import OPS, accumulator, combine, fold, need_number, reduce_message, reduce_slots, widen

METHODS = ("mesh", "two_shot", "ring", "flagged", "sentinel", "pipelined")
FLAGGED_BYTES = 512 << 10  # that a rank sends, up to which `flagged` is the fastest on NVLink; for integers
SENTINEL_BYTES = 8 << 20  # the same for `sentinel`, which takes no integers
KERNELS = METHODS[:3]  # of this file
PIPELINED_RANKS = 2  # up to which sending everything to everybody costs no more than two shots


@triton.jit
def mesh_kernel(
    x, out, staging, ready, epochs, n, slot, ctx,
    OP: tl.constexpr, CHANNELS: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    me, channel = dl.rank(ctx), tl.program_id(0)
    epoch = next_epoch(epochs)
    buffer = staging + tl.cast(epoch % 2 * WORLD, tl.int64) * slot
    mine = buffer + tl.cast(me, tl.int64) * slot
    for i in range(0, WORLD):
        dl.put(mine, x, n, dl.owner_first(i + 1, me, WORLD), ctx, channel, CHANNELS, BLOCK)
    dl.notify_all(dl.signal_at(ready, channel * WORLD + me), ctx, epoch)
    token = dl.wait(dl.signal_at(ready, channel * WORLD), epoch, ctx, "ge", WORLD)
    reduce_message(out, dl.consume_token(buffer, token), slot, n, OP, CHANNELS, WORLD, BLOCK)
    end_epoch(epochs, epoch)


@triton.jit
def _elements(s, share, n):
    """Elements in share s of a message of n: `share`, fewer or none at its end."""
    return tl.maximum(tl.minimum(n - tl.cast(s, tl.int64) * share, share), 0)


@triton.jit
def _reduce_and_hand_out(
    results, parts, slot, start, count, me, ctx, WORLD: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count
    acc = reduce_slots(parts + start + lanes, slot, inside, WORLD, OP)
    y = acc.to(results.dtype.element_ty)
    for i in range(0, WORLD):
        dl.remote_store(results + start + lanes, y, dl.owner_first(i + 1, me, WORLD), ctx, mask=inside)


@triton.jit
def two_shot_kernel(
    x, out, parts, results, ready, handed, epochs, n, share, slot, ctx,
    OP: tl.constexpr, CHANNELS: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    me, channel = dl.rank(ctx), tl.program_id(0)
    epoch = next_epoch(epochs)
    mine = tl.cast(me, tl.int64) * slot
    for i in range(0, WORLD):
        peer = dl.owner_first(i + 1, me, WORLD)
        part = x + tl.cast(peer, tl.int64) * share
        dl.put(parts + mine, part, _elements(peer, share, n), peer, ctx, channel, CHANNELS, BLOCK)
    dl.notify_all(dl.signal_at(ready, channel * WORLD + me), ctx, epoch)

    token = dl.wait(dl.signal_at(ready, channel * WORLD), epoch, ctx, "ge", WORLD)
    here = dl.consume_token(parts, token)
    count = _elements(me, share, n)
    for block in range(channel, tl.cdiv(count, BLOCK), CHANNELS):
        start = tl.cast(block, tl.int64) * BLOCK
        if start + BLOCK <= count:
            _reduce_and_hand_out(results + mine, here, slot, start, BLOCK, me, ctx, WORLD, OP, BLOCK)
        else:
            _reduce_and_hand_out(results + mine, here, slot, start, count - start, me, ctx, WORLD, OP, BLOCK)
    dl.notify_all(dl.signal_at(handed, channel * WORLD + me), ctx, epoch)

    all_handed = dl.wait(dl.signal_at(handed, channel * WORLD), epoch, ctx, "ge", WORLD)
    done = dl.consume_token(results, all_handed)
    for s in range(0, WORLD):
        at = tl.cast(s, tl.int64)
        dl.get(out + at * share, done + at * slot, _elements(s, share, n), me, ctx, channel, CHANNELS, BLOCK)
    end_epoch(epochs, epoch)


@triton.jit
def _add_block(
    x, sums, sums_on, result, out, start, count, right, ctx,
    FIRST: tl.constexpr, LAST: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a reducing step: what has come in `sums` and `x`, sent on, or, in the last step, the result."""
    lanes = start + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < count
    acc = widen(tl.load(x + lanes, mask=inside))
    if not FIRST:
        acc = combine(tl.load(sums + lanes, mask=inside), acc, OP)
    if LAST:
        y = acc.to(out.dtype.element_ty)
        tl.store(out + lanes, y, mask=inside)
        dl.remote_store(result + lanes, y, right, ctx, mask=inside)
    else:
        dl.remote_store(sums_on + lanes, acc, right, ctx, mask=inside)


@triton.jit
def _add_share(
    x, sums, sums_on, result, out, count, right, ctx,
    FIRST: tl.constexpr, LAST: tl.constexpr, OP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), CHANNELS):
        start = tl.cast(block, tl.int64) * BLOCK
        if start + BLOCK <= count:
            _add_block(x, sums, sums_on, result, out, start, BLOCK, right, ctx, FIRST, LAST, OP, BLOCK)
        else:
            _add_block(x, sums, sums_on, result, out, start, count - start, right, ctx, FIRST, LAST, OP, BLOCK)


@triton.jit
def ring_kernel(
    x, out, sums, results, arrived, epochs, n, share, slot, ctx,
    OP: tl.constexpr, CHANNELS: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # In step t rank r sends on the sum of share r - 1 - t over ranks r - t .. r; the last sum that comes is of its own.
    STEPS: tl.constexpr = WORLD - 1
    me, channel = dl.rank(ctx), tl.program_id(0)
    right = dl.owner_first(1, me, WORLD)
    epoch = next_epoch(epochs)
    mine = dl.signal_at(arrived, channel * 2 * STEPS)  # signal t: step t of the sums has come, STEPS + t: of the results

    s = dl.owner_first(STEPS, me, WORLD)
    part = tl.cast(s, tl.int64) * share
    _add_share(x + part, sums, sums, results, out, _elements(s, share, n), right, ctx, True, False, OP, CHANNELS, BLOCK)
    dl.notify(mine, right, ctx, epoch)
    for t in range(0, STEPS - 1):
        s = dl.owner_first(STEPS - 1 - t, me, WORLD)
        part = tl.cast(s, tl.int64) * share
        token = dl.wait(dl.signal_at(mine, t), epoch, ctx)
        here = dl.consume_token(sums + tl.cast(t, tl.int64) * slot, token)
        _add_share(x + part, here, sums + tl.cast(t + 1, tl.int64) * slot, results, out, _elements(s, share, n), right, ctx,
                   False, False, OP, CHANNELS, BLOCK)  # fmt: skip
        dl.notify(dl.signal_at(mine, t + 1), right, ctx, epoch)
    last = dl.wait(dl.signal_at(mine, STEPS - 1), epoch, ctx)
    whole = dl.consume_token(sums + tl.cast(STEPS - 1, tl.int64) * slot, last)
    own = tl.cast(me, tl.int64) * share
    _add_share(x + own, whole, sums, results, out + own, _elements(me, share, n), right, ctx,
               False, True, OP, CHANNELS, BLOCK)  # fmt: skip
    dl.notify(dl.signal_at(mine, STEPS), right, ctx, epoch)

    for t in range(0, STEPS):
        s = dl.owner_first(STEPS - t, me, WORLD)
        count = _elements(s, share, n)
        result = dl.wait(dl.signal_at(mine, STEPS + t), epoch, ctx)
        came = dl.consume_token(results + tl.cast(t, tl.int64) * slot, result)
        if t + 1 < STEPS:
            dl.put(came + slot, came, count, right, ctx, channel, CHANNELS, BLOCK)
            dl.notify(dl.signal_at(mine, STEPS + t + 1), right, ctx, epoch)
        dl.get(out + tl.cast(s, tl.int64) * share, came, count, me, ctx, channel, CHANNELS, BLOCK)
    end_epoch(epochs, epoch)


def share_of(n, world):
    """Elements of a share of a message of n, but for the last ones, which may have fewer or none."""
    return round_up(-(-n // world))


def reference(x, op="sum", group=None, method="mesh"):
    """The same by torch: an all-gather over `group`, reduced in the order of the method. Shape and dtype of x."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return in_order_of(method, parts, op)


def in_order_of(method, parts, op="sum"):
    """`parts`, the tensors of all ranks, reduced in the order of the method, by torch."""
    world = len(parts)
    if method != "ring":
        return fold(parts, op)
    flat, share = [part.reshape(-1) for part in parts], share_of(parts[0].numel(), world)
    shares = [fold([flat[(s + 1 + i) % world][s * share : (s + 1) * share] for i in range(world)], op) for s in range(world)]
    return torch.cat(shares).view(parts[0].shape)


def short_bytes(team, dtype):
    """Bytes of a message up to which `sentinel`, for integers `flagged`, is the fastest method: as measured (docs/tuning.md),
    else by the bytes that a rank sends. Collective over all ranks of the heap."""
    method, sent = ("sentinel", SENTINEL_BYTES) if dtype.is_floating_point else ("flagged", FLAGGED_BYTES)
    found, world = None, shmem.team_n_pes(team)
    estimated = sent // max(world - 1, 1)
    if shmem.team_my_pe(team) == 0:
        entries = measured("all_reduce", dict(dtype=name_of(dtype)), world)
        other = dict(method="flagged" if method == "sentinel" else "sentinel")  # for short messages, too: no rival
        found = crossover(entries, "bytes", dict(method=method), [other], estimated)
    found = of_first_ranks("create_all_reduce_context: short messages", team, found)
    return estimated if found is None else found


class AllReduceContext(ChannelContext):
    """What `all_reduce` needs besides its operands. Made by `create_all_reduce_context`."""

    def __init__(self, max_elements, dtype, method, team, programs, block):
        known = method is None or method in METHODS
        problem = None if known else f"method is {method!r}: give one of {', '.join(METHODS)}"
        if isinstance(dtype, torch.dtype):
            if method == "flagged" and dtype.itemsize not in (2, 4):
                problem = f"the method flagged takes dtypes of 2 or 4 bytes, not {dtype}"
            if method == "sentinel" and not dtype.is_floating_point:
                problem = f"the method sentinel takes floating-point numbers, not {dtype}"
        problem = problem or platform_problem(method)
        super().__init__("all_reduce", max_elements, dtype, need_number, team, programs, block, f"{method!r}, ", problem)
        max_elements = self.max_elements
        if method is None:
            tuned = programs is not None or block is not None
            method = "mesh" if tuned or triton_dist.backend != "nvidia" else "by size"
        self.method, self.words, self.pipelined = method, None, None
        world = self.num_ranks
        self.short_bytes = 0
        if method == "flagged":
            self.words = AllReduceFlagged(self, max_elements, block)
        elif method == "sentinel":
            self.words = AllReduceSentinel(self, max_elements, block, programs)
        elif method == "pipelined":
            self.pipelined = AllReducePipelined(self, max_elements, programs, block)
        elif method == "by size":
            self.short_bytes = short_bytes(team, dtype)
            most = min(max_elements, self.short_elements())
            if dtype.is_floating_point and most:
                self.words = AllReduceSentinel(self, most)
            elif dtype.itemsize == 4 and most:
                self.words = AllReduceFlagged(self, most)
            # chosen by the largest team, so that all ranks allocate alike
            if max(shmem.gather("create_all_reduce_context: ranks", world)) <= PIPELINED_RANKS:
                self.pipelined = AllReducePipelined(self, max_elements)
            else:
                self.method = "two_shot"
        if self.method == "mesh":
            self.buffers = [self.tensor((2, world, self.slot), dtype), self.signals(self.programs * world)]
            return
        self.slot = share_of(max_elements, world)
        if self.method == "two_shot":
            self.buffers = [self.tensor((world, self.slot), dtype) for _ in range(2)]
            self.buffers += [self.signals(self.programs * world) for _ in range(2)]
        elif self.method == "ring":
            self.buffers = [self.tensor((world - 1, self.slot), kind) for kind in (accumulator(dtype), dtype)]
            self.buffers.append(self.signals(self.programs * 2 * (world - 1)))

    def short_elements(self):
        return self.short_bytes // self.dtype.itemsize

    def special(self, n):
        """The method for a message of n elements that is no kernel of this file, or None. The same on all ranks."""
        if self.words and self.words.takes(n) and (self.method in ("flagged", "sentinel") or n <= self.short_elements()):
            return self.words
        return self.pipelined


def create_all_reduce_context(max_elements, dtype, method=None, team=0, programs=None, block=None):
    """Allocates what the operator needs, once. Collective over all ranks of the heap.

    Args:
        max_elements: most elements of a call, 0 or more.
        dtype: torch.float16, bfloat16, float32, int32 or int64.
        method: "mesh", "two_shot", "ring", "flagged" (whole 32-bit words of 2- and 4-byte dtypes), "sentinel" (the same of
            floating-point dtypes) or "pipelined"; see the top of this file. None: on nvidia, unless programs or block is
            given, sentinel (flagged for integers) for short messages, for long ones pipelined between two ranks and
            two_shot between more; else mesh.
        team, programs, block: see `create_all_gather_context`.

    Symmetric memory: 2 * num_ranks * max_elements elements for mesh; for two_shot twice, for ring at most twice (sums in
    fp32 for 16-bit types) max_elements rounded up to shares of 16; and programs * num_ranks signals, twice that for
    two_shot and ring.
    Errors: as `create_all_gather_context`.
    """
    return torch_ops.register(AllReduceContext(max_elements, dtype, method, team, programs, block))


def all_reduce(x, context, op="sum", out=None):
    """out = the x of all ranks of the context's team, reduced by `op`.

    Args:
        x: contiguous, of at most max_elements elements, the same shape on all ranks. Any memory.
        context: of `create_all_reduce_context`.
        op: "sum", "max", "min" or "prod", the same on all ranks. A NaN makes the result NaN.
        out: as x, contiguous, written; may be x. None: a new tensor.

    Returns: out: the same bits on all ranks, every time. The order is the method's; 16-bit types are reduced in fp32 with
    one rounding.
    Order, capture and calls of 0 elements: as `all_gather`.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    if out is None and torch.compiler.is_compiling():
        return torch_ops.all_reduce(x, context.number, op)
    if op not in OPS or not passed_before(context, operands_of(x, out)):
        begin("all_reduce", AllReduceContext, context, x=x, out=out)
        need("all_reduce", op in OPS, f"op is {op!r}: give one of {', '.join(OPS)}")
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        context.check(x, out, x.shape, x.numel(), op=op)
    n, world = x.numel(), context.num_ranks
    if n == 0:
        return out
    if world == 1:
        return out.copy_(x)
    if special := context.special(n):
        special(x, out, op)
        return out
    need("all_reduce", context.method in KERNELS, f"x has {n} elements, which the method {context.method} does not take")
    if context.method == "mesh":
        context.launch(mesh_kernel, n, (x, out, *context.buffers, context.epochs, n, context.slot, context.table), OP=op)
        return out
    share = share_of(n, world)
    kernel = two_shot_kernel if context.method == "two_shot" else ring_kernel
    arguments = (x, out, *context.buffers, context.epochs, n, share, context.slot, context.table)
    context.launch(kernel, share, arguments, OP=op)
    return out
