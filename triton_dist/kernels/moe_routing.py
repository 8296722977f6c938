"""Routing of a mixture of experts: where the experts live, how many tokens go where, and which row each slot gets.

A *slot* is one entry of topk_ids. The device functions number slots by expert and tokens by rank; `moe_dispatch` says what
for.
"""

import torch
import triton
import triton.language as tl

from .arguments import as_int, need

MOST_CHUNK = 64  # tokens of a chunk of the methods `pipelined`
MOST_SLOTS = 1024  # numbered at a time: each is compared with each, and Triton's blocks have at most 2**20 elements
NUMBERED = dict(gather="BLOCK_T", pipelined="BLOCK_C")  # method of the dispatch -> tokens whose slots are numbered at a time


def expert_owners(call, placement, num_experts, world):
    """The rank of every expert, a list of ints: `placement`, or even when it is None, the first ranks having one more.
    ValueError, naming rank and values, unless it is [num_experts], of ranks below `world`, and does not decrease."""
    if placement is None:
        each, more = divmod(num_experts, world)
        return [r for r in range(world) for _ in range(each + (r < more))]
    try:
        owners = [as_int(owner) for owner in placement]
    except TypeError:
        owners = [None]
    fits = len(owners) == num_experts and None not in owners
    fits = fits and owners == sorted(owners) and all(0 <= owner < world for owner in owners)
    text = f"placement is {placement}: give the rank of each of the {num_experts} experts, 0 to {world - 1}, not decreasing"
    need(call, fits, text)
    return owners


def fit_putters(defaults, programs):
    """The defaults of a method, with no more than half of the user's programs, if given, as putters."""
    config, default_programs = defaults
    if "PUTTERS" in config and isinstance(programs, int):
        config = {**config, "PUTTERS": max(min(config["PUTTERS"], programs // 2), 1)}
    return config, default_programs


def fit_slots(defaults, topk, method):
    """The defaults of a method of the dispatch, with no more tokens numbered at a time than have MOST_SLOTS slots."""
    config, programs = defaults
    most = max(MOST_SLOTS // triton.next_power_of_2(topk), 1)
    return {**config, NUMBERED[method]: min(config[NUMBERED[method]], most)}, programs


def slots_problem(config, topk, method):
    """What is wrong with a config of a method of the dispatch, or None: it must not number too many slots at a time."""
    tokens, slots = config[NUMBERED[method]], triton.next_power_of_2(topk)
    if tokens * slots > MOST_SLOTS:
        what = f"{NUMBERED[method]} is {tokens}, topk {topk}"
        return f"{what}: give a {NUMBERED[method]} of at most {MOST_SLOTS // slots}, {MOST_SLOTS} slots are numbered at a time"


def pipeline_problem(config, programs, others, block="BLOCK_T"):
    """What is wrong with a config of a method `pipelined`, or None: it must leave `others` programs besides the putters, and
    its chunks must be made of whole blocks of tokens, those of the entry `block`."""
    putters, chunk, tokens = (config[entry] for entry in ("PUTTERS", "CHUNK", block))
    if putters > programs - others:
        return f"PUTTERS is {putters} of {programs} programs: leave {others} for the rest"
    if not (tokens <= chunk <= MOST_CHUNK and chunk & (chunk - 1) == 0):
        return f"CHUNK is {chunk}: give a power of two from {block}, {tokens}, to {MOST_CHUNK}"


def need_pipeline(call, config, programs, others, block="BLOCK_T"):
    """ValueError unless `pipeline_problem` has none."""
    problem = pipeline_problem(config, programs, others, block)
    need(call, problem is None, problem)


def grouped(xs, ids, owners, rank):
    """What rank `rank` gets, by plain torch, of all ranks' xs [[T_r, H]] and ids [[T_r, k]].

    Returns: (rows [n, H], counts [experts of the rank], origins [n, 3]: source rank, token, slot).
    """
    own = [e for e, owner in enumerate(owners) if owner == rank]
    rows, origins, counts = [], [], []
    for e in own:
        found = [(s, *pair) for s in range(len(xs)) for pair in (ids[s] == e).nonzero().tolist()]
        rows += [xs[s][t] for s, t, _ in found]
        origins += found
        counts.append(len(found))
    rows = torch.stack(rows) if rows else xs[0].new_empty(0, xs[0].shape[1])
    return rows, torch.tensor(counts, dtype=torch.int32), torch.tensor(origins, dtype=torch.int64).view(-1, 3)


@triton.jit
def number_slots(keys, valid, cursor, N: tl.constexpr):
    """Numbers the valid ones of N, up to MOST_SLOTS, among equal keys, not negative, from cursor[key] on and in order; moves
    the cursors."""
    i = tl.arange(0, N)
    key = tl.where(valid, keys, -1)
    # One sum for both: how many are equal, in the upper 16 bits, and how many of these come earlier.
    of_one = tl.where(i[None, :] < i[:, None], 65537, 65536)
    found = tl.sum(tl.where(key[:, None] == key[None, :], of_one, 0), 1)
    equal = found // 65536
    earlier = found - equal * 65536
    number = tl.load(cursor + keys, mask=valid, other=0) + earlier
    tl.debug_barrier()  # every thread has read the cursors
    tl.store(cursor + keys, number + 1, mask=valid & (earlier == equal - 1))
    tl.debug_barrier()
    return number


@triton.jit
def expert_of(ids, at, mask, E):
    """Expert of a slot as int32: -1 for a dropped one, E for any that does not exist."""
    return tl.minimum(tl.maximum(tl.load(ids + at, mask=mask, other=-1), -1), E).to(tl.int32)


@triton.jit
def count_slots(
    ids, owners, number, place, cursor, first, end, topk, stride_t, stride_k, E, world,
    BLOCK_T: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Numbers the slots by expert and the tokens by rank; leaves in `cursor` [E + world + 1] how many there are."""
    columns = tl.arange(0, COLUMNS)
    tl.store(cursor + columns, tl.zeros((COLUMNS,), tl.int32), mask=columns < E + world + 1)
    tl.debug_barrier()
    i = tl.arange(0, BLOCK_T * K_PAD)
    j = i - i // K_PAD * K_PAD
    start = first
    while start < end:
        t = start + i // K_PAD
        inside = (t < end) & (j < topk)
        e = expert_of(ids, t.to(tl.int64) * stride_t + j * stride_k, inside, E)
        kept = (e >= 0) & (e < E)
        key = tl.where(e == E, E + world, tl.maximum(e, 0))
        n = number_slots(key, e >= 0, cursor, BLOCK_T * K_PAD)
        owner = tl.load(owners + tl.where(kept, e, 0), mask=kept, other=0)
        twin = (t[:, None] == t[None, :]) & (owner[:, None] == owner[None, :]) & kept[None, :]
        again = tl.sum((twin & (i[None, :] < i[:, None])).to(tl.int32), 1)
        leads = kept & (again == 0)  # the first of the token's slots at this rank
        p = number_slots(E + owner, leads, cursor, BLOCK_T * K_PAD)
        tl.store(number + t * topk + j, tl.where(kept, n, -1), mask=inside)
        tl.store(place + t * topk + j, tl.where(leads, p, -1), mask=inside)
        start += BLOCK_T


@triton.jit
def number_by_expert(
    ids, first_expert, number, cursor, first, end, topk, stride_t, stride_k, E, world,
    BLOCK_T: tl.constexpr, K_PAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `count_slots`, but the tokens that go to each rank are only counted, not numbered. `cursor` has COLUMNS places, of
    which the last are zeros."""
    columns = tl.arange(0, COLUMNS)
    tl.store(cursor + columns, tl.zeros((COLUMNS,), tl.int32))
    tl.debug_barrier()
    going = tl.zeros((COLUMNS,), tl.int32)
    i = tl.arange(0, BLOCK_T * K_PAD)
    j = i - i // K_PAD * K_PAD
    start = first
    while start < end:
        t = start + i // K_PAD
        inside = (t < end) & (j < topk)
        e = expert_of(ids, t.to(tl.int64) * stride_t + j * stride_k, inside, E)
        n = number_slots(tl.where(e == E, E + world, tl.maximum(e, 0)), e >= 0, cursor, BLOCK_T * K_PAD)
        tl.store(number + t * topk + j, tl.where((e >= 0) & (e < E), n, -1), mask=inside)
        by_token = tl.reshape(e, (BLOCK_T, K_PAD))
        for d in range(0, world):
            low, high = tl.load(first_expert + d), tl.load(first_expert + d + 1)
            goes = tl.max(((by_token >= low) & (by_token < high)).to(tl.int32), 1)
            going += tl.where(columns == E + d, tl.sum(goes, 0), 0)
        start += BLOCK_T
    tl.store(cursor + columns, going, mask=(columns >= E) & (columns < E + world))


@triton.jit
def sum_lines(lines, n, columns, width, COLUMNS: tl.constexpr):
    # At a time: their loads are on their way together.
    LINES: tl.constexpr = 8 if COLUMNS >= 2048 else (64 if COLUMNS <= 256 else 16384 // COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    i = tl.arange(0, LINES)
    for start in range(0, n, LINES):
        mask = (start + i < n)[:, None] & (columns < width)[None, :]
        total += tl.sum(tl.load(lines + (start + i)[:, None] * width + columns[None, :], mask=mask, other=0), 0)
    return total


@triton.jit
def rows_from_counts(
    total, begins, matrix, first_expert, totals, out_tokens, tells, c, width, E, me, world, max_received, max_rows
):
    """From the counts of all ranks to the rows of slots, and to whether anything overflows anywhere.

    total: the columns (E experts, then the tokens that go to each rank, then the ids that do not exist) summed over ranks;
    begins: over those before the caller alone. A rank's rows are those of its experts, each expert's one after the other.
    tells: whether this program writes `totals` [world, 3] (tokens received, rows, ids that do not exist) and, unless that is
    None, `out_tokens` [world], from the column E + world + 1 of `matrix` [world, width].
    Returns: (begins of each expert's rows, of the tokens that go to each rank; whether it fails, 0 if not; rows of this rank).
    """
    begins += tl.where(c < E, tl.cumsum(total, 0) - total, 0)
    wrong = tl.sum(tl.where(c == E + world, total, 0), 0)
    failed = (wrong > 0).to(tl.int32)
    rows_here = 0
    for d in range(0, world):
        low, high = tl.load(first_expert + d), tl.load(first_expert + d + 1)
        rows = tl.sum(tl.where((c >= low) & (c < high), total, 0), 0)
        received = tl.sum(tl.where(c == E + d, total, 0), 0)
        begins -= tl.where((c >= low) & (c < high), tl.sum(tl.where(c < low, total, 0), 0), 0)
        failed += (rows > max_rows).to(tl.int32) + (received > max_received).to(tl.int32)
        rows_here = tl.where(d == me, rows, rows_here)
        if tells:
            if out_tokens is not None:
                tl.store(out_tokens + d + tl.arange(0, 1), tl.load(matrix + d * width + E + world + 1 + tl.arange(0, 1)))
            tl.store(totals + d * 3 + tl.arange(0, 1), received)
            tl.store(totals + d * 3 + 1 + tl.arange(0, 1), rows)
            tl.store(totals + d * 3 + 2 + tl.arange(0, 1), wrong)
    return begins, failed, rows_here
