"""Q, K and V from sharded by tokens to sharded by heads in one kernel, and attention's output back.

    ctx = create_qkv_all_to_all_context(S, Hq, Hkv, D, torch.bfloat16)  # once; S tokens on each rank
    q, k, v = qkv_all_to_all(q, k, v, ctx)                              # (S, heads, D) -> (all tokens, own heads, D)
    o = attention(q, k, v)                                              # of whole heads, on one rank
    o = attention_output_all_to_all(o, ctx)                             # back: (S, Hq, D)
    ctx.free()

Which element goes where, for W ranks of which rank r has the tokens first(r) .. first(r) + S_r - 1:

    q out at rank d  [first(s) + t, h, e]  =  q at rank s  [t, d * Hq / W + h, e]
    k out at rank d  [first(s) + t, h, e]  =  k at rank s  [t, kv(d) + h, e],  kv(d) = d * Hkv / W rounded down;  v likewise

With grouped queries Hkv is less than Hq, and query head h uses key head h // (Hq / Hkv). When Hkv is less than W as well, a
key head is *replicated*: it goes to the W / Hkv ranks whose query heads use it, one head to each. So Hq must be a
multiple of W and of Hkv, and Hkv a multiple of W or W of Hkv; anything else is refused by name. On every rank the
query head h uses the local key head h // (local query heads / local key heads), as attention with grouped queries
expects.

How it works: as `sequence_all_to_all`. What rank s has for a peer, three blocks, lies side by side in one slot of the peer's
staging buffer and is announced by one signal; so one launch, one trip. `ready[buffer][s]` counts the programs of rank s that
have put their part. Two buffers by the parity of the call need no acknowledgement; that module has the argument. The way
back is its `reverse` kernel on the same staging buffer and signals; both directions count as calls.
"""

import itertools

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist import shmem
from triton_dist.language.copy import copy_2d

from .arguments import (
    LAUNCH_OPTIONS,
    WORDS,
    as_words,
    checked_config,
    need,
    need_apart,
    need_int,
    need_words,
)
from .operator_context import OperatorContext, agreement, begin
from .sequence_all_to_all import (
    default_config,
    gather_rows,
    row_stride,
    rows_fit,
    sequence_all_to_all_kernel,
    token_lengths,
)


@triton.jit
def _to(
    x, head, place, staging, rows, cols, x_stride, place_stride, peer, me, ctx, pid, programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One of the three blocks that this rank has for `peer`; its own goes to its place at once."""
    block = x + tl.cast(head, tl.int64)
    if peer == me:
        copy_2d(place, block, rows, cols, place_stride, x_stride, pid, programs, BLOCK_M, BLOCK_N)
    else:
        dl.put_2d(staging, block, rows, cols, cols, x_stride, peer, ctx, pid, programs, BLOCK_M, BLOCK_N)


@triton.jit
def qkv_all_to_all_kernel(
    q, k, v, out_q, out_k, out_v, staging, ready, epochs, offsets, cols_q, cols_kv, copies, longest, slot,
    q_stride, k_stride, v_stride, out_q_stride, out_k_stride, out_v_stride, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """cols_q, cols_kv: elements of a token's heads that one rank gets; copies: ranks that get the same key heads;
    longest: tokens that a slot has room for; slot: its elements."""
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    past = tl.max(tl.load(epochs + pid + tl.arange(0, 1)), 0)  # calls so far
    buffer, uses = past % 2, past // 2
    first = tl.cast(tl.load(offsets + me), tl.int64)
    tokens = tl.load(offsets + me + 1) - tl.load(offsets + me)
    part_k = tl.cast(longest, tl.int64) * cols_q
    part_v = part_k + tl.cast(longest, tl.int64) * cols_kv

    to_q, to_k, to_v = out_q + first * out_q_stride, out_k + first * out_k_stride, out_v + first * out_v_stride
    for i in range(0, world):
        peer = (me + world - i) % world  # itself, then who reads this rank's blocks first
        at = staging + tl.cast(buffer * world + me, tl.int64) * slot
        kv = peer // copies * cols_kv
        _to(q, peer * cols_q, to_q, at, tokens, cols_q, q_stride, out_q_stride,
            peer, me, ctx, pid, programs, BLOCK_M, BLOCK_N)  # fmt: skip
        _to(k, kv, to_k, at + part_k, tokens, cols_kv, k_stride, out_k_stride,
            peer, me, ctx, pid, programs, BLOCK_M, BLOCK_N)  # fmt: skip
        _to(v, kv, to_v, at + part_v, tokens, cols_kv, v_stride, out_v_stride,
            peer, me, ctx, pid, programs, BLOCK_M, BLOCK_N)  # fmt: skip
        if peer != me:
            dl.notify(dl.signal_at(ready, buffer * world + me), peer, ctx, 1, "add")

    for i in range(1, world):
        src = dl.owner_first(i, me, world)
        begin = tl.cast(tl.load(offsets + src), tl.int64)
        rows = tl.load(offsets + src + 1) - tl.load(offsets + src)
        token = dl.wait(dl.signal_at(ready, buffer * world + src), (uses + 1) * programs, ctx)
        at = dl.consume_token(staging + tl.cast(buffer * world + src, tl.int64) * slot, token)
        dl.get_2d(out_q + begin * out_q_stride, at, rows, cols_q, out_q_stride, cols_q,
                  me, ctx, pid, programs, BLOCK_M, BLOCK_N)  # fmt: skip
        dl.get_2d(out_k + begin * out_k_stride, at + part_k, rows, cols_kv, out_k_stride, cols_kv,
                  me, ctx, pid, programs, BLOCK_M, BLOCK_N)  # fmt: skip
        dl.get_2d(out_v + begin * out_v_stride, at + part_v, rows, cols_kv, out_v_stride, cols_kv,
                  me, ctx, pid, programs, BLOCK_M, BLOCK_N)  # fmt: skip
    tl.store(epochs + pid + tl.arange(0, 1), past + 1 + tl.zeros((1,), tl.int32))


def reference(q, k, v, lengths=None, group=None):
    """The same by all-gathers and slices; `lengths`: tokens of each rank, None: all as q."""
    world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    lengths = lengths or [q.shape[0]] * world
    results = []
    for x in (q, k, v):
        heads = x.shape[1]
        first, count = rank * heads // world, max(heads // world, 1)
        shards = gather_rows(x, [(n, *x.shape[1:]) for n in lengths], group)
        results.append(torch.cat([shard[:, first : first + count] for shard in shards]))
    return tuple(results)


class QkvAllToAllContext(OperatorContext):
    """What the operators need besides their operands. Made by `create_qkv_all_to_all_context`."""

    def __init__(self, lengths, Hq, Hkv, D, dtype, team, config, programs):
        super().__init__("qkv_all_to_all", team)
        self.lengths, self.Hq, self.Hkv, self.D, self.dtype = lengths, Hq, Hkv, D, dtype
        self.config, self.programs = config, programs
        world = self.num_ranks
        self.tokens = lengths[self.rank]
        self.local_q, self.local_kv = Hq // world, max(Hkv // world, 1)  # heads of a rank afterwards
        self.copies = max(world // Hkv, 1)  # ranks that get the same key head
        self.longest = max(lengths)
        self.slot = self.longest * (self.local_q + 2 * self.local_kv) * D
        self.staging = self.tensor((2, world, self.slot), WORDS[dtype.itemsize])
        self.ready = self.signals(2 * world)
        self.epochs = self.local(programs)
        self.offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)


def create_qkv_all_to_all_context(S, Hq, Hkv, D, dtype, team=0, config=None, programs=None):
    """Allocates what the operators need, once. Collective over all ranks of the heap.

    Args:
        S: tokens of each rank: an int, or a list with one int for each rank of the team. 0 or more.
        Hq: query heads in all, a multiple of the number of ranks W and of Hkv.
        Hkv: key heads in all (as many value heads); a multiple of W, or a divisor of W: then W / Hkv ranks get the same one.
        D: elements of a head, 0 or more.
        dtype: any torch dtype of 1, 2, 4 or 8 bytes; elements are moved, never computed with.
        team: team id of shmem; its ranks take part (see operator_context about teams).
        config: dict that overrides entries of `default_config(dtype)[0]` of sequence_all_to_all.
        programs: programs in the grid; not more than the device runs at a time.

    All arguments must be equal on all ranks. Symmetric memory: 2 * W * max(S) * D * (Hq / W + 2 * max(Hkv / W, 1)) elements
    and 2 * W signals.
    Errors: ValueError for what this library does not support, CollectiveMismatchError when ranks differ; on all ranks
    alike, before anybody communicates.
    """
    name = "create_qkv_all_to_all_context"
    with agreement(name, team) as agreed:
        world = shmem.team_n_pes(team)
        lengths = token_lengths(name, S, world)
        need_words(name, dtype)
        Hq, Hkv, D = need_int(name, "Hq", Hq, 1), need_int(name, "Hkv", Hkv, 1), need_int(name, "D", D)
        even = Hq % world == 0 and Hq % Hkv == 0
        need(name, even, f"Hq is {Hq}: give a multiple of the {world} ranks and of Hkv = {Hkv}")
        shared = Hkv % world == 0 or world % Hkv == 0
        need(name, shared, f"Hkv is {Hkv}: give a multiple or a divisor of the {world} ranks")
        config, programs = checked_config(name, default_config(dtype), config, programs, LAUNCH_OPTIONS)
        agreed.on = f"S={S}, Hq={Hq}, Hkv={Hkv}, D={D}, {dtype}, config={config}, programs={programs}"
    return QkvAllToAllContext(lengths, Hq, Hkv, D, dtype, team, config, programs)


def qkv_all_to_all(q, k, v, context, out=None):
    """From sharded by tokens to sharded by heads; which element goes where: see the module.

    Args:
        q: [S of this rank, Hq, D]; k, v: [S of this rank, Hkv, D]. The elements of a token are adjacent, tokens may be
            apart, so the three may be views of one tensor [S, (Hq + 2 * Hkv) * D]. Any memory.
        context: of `create_qkv_all_to_all_context`.
        out: (q, k, v) of shape [sum of S, Hq / W, D] and twice [sum of S, max(Hkv / W, 1), D], as the inputs, written, no
            overlap with them; None: new tensors.

    Returns: out, a tuple.
    All ranks of the team must make the same calls (of both directions) in the same order. With `out` given nothing is
    allocated, and there is no host synchronisation: the call can be captured in a CUDA graph. The inputs may be changed
    once the call is complete on this rank's stream.
    Errors: ValueError before anything is launched when an operand does not fit the context.
    """
    call = "qkv_all_to_all"
    begin(call, QkvAllToAllContext, context, q=q, k=k, v=v)
    D, total = context.D, sum(context.lengths)
    heads_in = (context.Hq, context.Hkv, context.Hkv)
    heads_out = (context.local_q, context.local_kv, context.local_kv)
    if out is None:
        out = tuple(torch.empty(total, heads, D, dtype=context.dtype, device=context.device) for heads in heads_out)
    three = isinstance(out, (tuple, list)) and len(out) == 3 and all(isinstance(x, torch.Tensor) for x in out)
    need(call, three, "out is not three tensors, those for q, k and v")
    for name, x, heads in zip("qkv", (q, k, v), heads_in):
        rows_fit(call, name, x, (context.tokens, heads, D), context)
    for name, x, heads in zip("qkv", out, heads_out):
        rows_fit(call, f"the {name} of out", x, (total, heads, D), context)
    others = {f"the {name} of out": x for name, x in zip("qkv", out)}
    for name in list(others):
        x = others.pop(name)  # two that overlap are found when the first of them is looked at
        need_apart(call, x, {"q": q, "k": k, "v": v, **others}, name)
    context.agree(call, "")
    qkv_all_to_all_kernel[(context.programs,)](
        *map(as_words, (q, k, v)), *map(as_words, out), context.staging, context.ready, context.epochs, context.offsets,
        context.local_q * D, context.local_kv * D, context.copies, context.longest, context.slot,
        *map(row_stride, (q, k, v)), *map(row_stride, out), context.table, **context.config,
    )  # fmt: skip
    return tuple(out)


def attention_output_all_to_all(o, context, out=None):
    """Attention's output from sharded by heads back to sharded by tokens: (sum of S, Hq / W, D) -> (S, Hq, D).

    out [t, s * Hq / W + h, e] at rank d = o [first(d) + t, h, e] at rank s.

    Args:
        o: [sum of S, Hq / W, D]; the elements of a token are adjacent, tokens may be apart. Any memory.
        context: of `create_qkv_all_to_all_context`.
        out: [S of this rank, Hq, D], as o, written, no overlap with it; None: a new tensor.

    Returns: out. Calls, capture and errors: as `qkv_all_to_all`.
    """
    call = "attention_output_all_to_all"
    begin(call, QkvAllToAllContext, context, o=o, out=out)
    if out is None:
        out = torch.empty(context.tokens, context.Hq, context.D, dtype=context.dtype, device=context.device)
    rows_fit(call, "o", o, (sum(context.lengths), context.local_q, context.D), context)
    rows_fit(call, "out", out, (context.tokens, context.Hq, context.D), context)
    need_apart(call, out, dict(o=o))
    context.agree(call, "")
    sequence_all_to_all_kernel[(context.programs,)](
        as_words(o), as_words(out), context.staging, context.ready, context.epochs, context.offsets,
        context.local_q * context.D, context.slot, row_stride(o), row_stride(out), context.table,
        REVERSE=True, **context.config,
    )  # fmt: skip
    return out
