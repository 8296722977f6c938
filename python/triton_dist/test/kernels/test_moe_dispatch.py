"""moe_dispatch against a loop over experts and tokens in torch."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.moe_dispatch import create_moe_dispatch_context, moe_dispatch
from triton_dist.kernels.moe_quantization import quantize
from triton_dist.kernels.moe_routing import grouped

import torch

pytestmark = pytest.mark.dist

SMALL = {
    "gather": dict(method="gather", config=dict(BLOCK_T=4, BLOCK_H=64), programs=3),
    "pipelined": dict(method="pipelined", config=dict(BLOCK_P=4, BLOCK_T=2, CHUNK=4, BLOCK_C=4, BLOCK_H=64), programs=4),
}
SMALL |= {f"{name} tokens": dict(small, layout="tokens") for name, small in SMALL.items()}
methods = pytest.mark.parametrize("method", SMALL)
# Several shares, of more tokens than are numbered at a time.
SHARED = {
    "pipelined, several shares": dict(
        method="pipelined", config=dict(BLOCK_P=4, BLOCK_T=4, CHUNK=4, BLOCK_C=1, BLOCK_H=64), programs=7
    )
}
SHARED |= {f"{name} tokens": dict(shared, layout="tokens") for name, shared in SHARED.items()}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def routing(tokens, H, k, E, dtype, seed, dropped=0.2, ids_dtype=torch.int64):
    """What all ranks have, alike on every rank: [x], [ids]. A token may name an expert twice."""
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(T, H, generator=g).to(dtype) for T in tokens]
    ids = [torch.randint(0, E, (T, k), generator=g) for T in tokens]
    ids = [torch.where(torch.rand(i.shape, generator=g) < dropped, -1, i).to(ids_dtype) for i in ids]
    return xs, ids


def poisoned(context):
    out = context.empty()
    if context.layout == "tokens":
        out[2].index.fill_(-7)
    return out


def rows_of(result, n, context):
    """The first n rows of a result, or of each part of an fp8 one."""
    tokens, _, handle = result
    if context.layout == "rows":
        assert handle.index is None
        return [part[:n].cpu() for part in (tokens if context.fp8 else [tokens])]
    assert handle.index.dtype == torch.int32 and handle.index.shape == (context.max_rows,)
    return [part[handle.index[:n].long()].cpu() for part in (tokens if context.fp8 else [tokens])]


def check(result, xs, ids, context, rank):
    _, counts, handle = result
    rows, expected, origin = grouped(xs, ids, context.owners, rank)
    n = len(rows)
    assert torch.equal(counts.cpu(), expected), (counts, expected)
    assert handle.rows.item() == n
    flat = (origin[:, 0] * context.max_tokens + origin[:, 1]) * context.topk + origin[:, 2]
    assert torch.equal(handle.origin[:n].cpu().long(), flat)
    assert torch.equal(handle.number[: len(ids[rank])].cpu() >= 0, ids[rank] >= 0)
    payload, *scales = rows_of(result, n, context)
    if not scales:
        assert torch.equal(payload, rows)
        return
    scales = scales[0]
    if triton_dist.backend == "cpu":
        right, right_scales = quantize(rows)
        assert torch.equal(payload.view(torch.uint8), right.view(torch.uint8)) and torch.equal(scales, right_scales)
    wide = payload.float() * scales.repeat_interleave(128, 1)[:, : context.H]
    # e4m3 has 3 mantissa bits, and 2^-9 is its smallest number
    bound = 2.0**-4 * rows.float().abs() + 2.0**-10 * scales.repeat_interleave(128, 1)[:, : context.H]
    assert ((wide - rows.float()).abs() <= bound * (1 + 1e-5)).all()


def run_case(
    method, tokens, H, k, E, dtype, seed, placement=None, fp8=False, calls=2, dropped=0.2, ids_dtype=torch.int64
):  # fmt: skip
    rank, device = shmem.my_pe(), shmem.device()
    context = create_moe_dispatch_context(max(tokens), H, k, E, dtype, placement, fp8=fp8, **{**SMALL, **SHARED}[method])
    for call in range(calls):
        turn = [tokens[(r + call) % len(tokens)] for r in range(len(tokens))]
        xs, ids = routing(turn, H, k, E, dtype, seed + call, dropped, ids_dtype)
        out = poisoned(context)
        result = moe_dispatch(xs[rank].to(device), ids[rank].to(device), context, out)
        check(result, xs, ids, context, rank)
        assert context.layout == "rows" or (out[2].index[int(out[1].sum()) :] == -7).all()
    context.free()


def all_sorts(method):
    world = shmem.pe_count()
    ragged = [9, 4, 0, 7, 1, 12, 3, 5][:world]
    for dtype in DTYPES if world == 2 else [torch.bfloat16]:
        run_case(method, ragged, 80, 3, 7, dtype, 1)
        run_case(method, ragged, 130, 2, 5, dtype, 2, fp8=True, calls=1)
    run_case(method, ragged, 64, 3, 6, torch.float32, 3, placement=[world - 1] * 6, ids_dtype=torch.int32)
    run_case(method, ragged, 1, 1, 1, torch.float32, 4, calls=1)
    run_case(method, ragged, 16, 4, 9, torch.bfloat16, 5, dropped=1.0, calls=1)
    run_case(method, [0] * world, 16, 4, 9, torch.bfloat16, 6, calls=1)


# The combine's test of the same name dispatches rows by every method on any number of ranks.
EVERY = [(2, method) for method in (*SMALL, *SHARED)]
EVERY += [(1, "gather"), (3, "gather tokens"), (4, "gather")]
EVERY += [(1, "pipelined tokens"), (3, "pipelined"), (4, "pipelined tokens")]


@pytest.mark.parametrize("world, method", EVERY)
def test_every_dtype_ragged_tokens_uneven_experts_and_nothing_at_all(world, method, ranks):
    ranks(world).run(all_sorts, method, timeout=240)


def cases(method, lots):
    for seed, (tokens, H, k, placement, dropped, fp8) in enumerate(lots):
        run_case(method, tokens, H, k, len(placement), torch.bfloat16, seed, placement, fp8, 2, dropped)


def lots(world):
    rank = st.integers(0, world - 1)
    return st.lists(
        st.tuples(
            st.lists(st.integers(0, 14), min_size=world, max_size=world),
            st.integers(1, 200),
            st.integers(1, 5),
            st.lists(rank, min_size=1, max_size=9).map(sorted),
            st.sampled_from([0.0, 0.3, 0.9]),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    )


@methods
@settings(max_examples=3, deadline=None, database=None)
@given(data=st.data())
def test_any_routing(method, data, ranks):
    world = data.draw(st.sampled_from([2, 3]))
    ranks(world).run(cases, method, data.draw(lots(world)), timeout=240)


def overflow(method):
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    T, H, k, E = 8, 32, 2, 4
    kinds = {"max_received": (11, 99), "max_rows": (99, 11)}
    for name, (received, rows) in kinds.items():
        context = create_moe_dispatch_context(T, H, k, E, torch.float32, None, received, rows, **SMALL[method])
        xs, ids = routing([T] * world, H, k, E, torch.float32, 3, 0.0)
        crowded = torch.full_like(ids[rank], E - 1).to(device)  # all on the last rank: 16 tokens, 32 rows
        what = f"rank {world - 1} would get {'16 tokens' if name == 'max_received' else '32 rows'}, the context holds 11"
        x = xs[rank].to(device)
        for _ in range(2):
            with pytest.raises(OverflowError, match=f"{what}.*raise {name}"):
                moe_dispatch(x, crowded, context)
            _, counts, handle = moe_dispatch(x, crowded, context, poisoned(context), check=False)
            assert handle.rows.item() == -1 and not counts.any()
            assert handle.index is None or (handle.index == -7).all()
            ids[rank][4:] = -1
        fits = [torch.tensor([[0, 3]] * 2 + [[-1, 1]] * 3 + [[2, -1]] * 3)] * world
        check(moe_dispatch(x, fits[0].to(device), context), xs, fits, context, rank)
        unknown = fits[0].clone()
        unknown[0, 0] = 2**40 if rank else 1
        with pytest.raises(ValueError, match="1 entries of the ranks' topk_ids name no expert: they go from 0 to 3"):
            moe_dispatch(x, unknown.to(device), context)
        check(moe_dispatch(x, fits[0].to(device), context), xs, fits, context, rank)
        context.free()


@methods
def test_overflow_anywhere_is_the_same_error_everywhere_and_the_next_call_works(method, ranks):
    ranks(2).run(overflow, method)


def delayed_calls(method, calls):
    """Ranks drift apart at random; tokens, routing and sizes differ from call to call, so that anything stale shows. With the
    layout tokens they are also read late, when peers may have gone on to their next calls."""
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    H, k, E, most = 16, 2, 5, 6
    context = create_moe_dispatch_context(most, H, k, E, torch.float32, **SMALL[method])
    rng = random.Random(rank)
    lots = [routing([(3 * i + 5 * r) % (most + 1) for r in range(world)], H, k, E, torch.float32, i) for i in range(12)]
    out = context.empty()
    for call in range(calls):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        xs, ids = lots[call % len(lots)]
        xs = [x + call for x in xs]
        result = moe_dispatch(xs[rank].to(device), ids[rank].to(device), context, out)
        if context.layout == "tokens" and rng.random() < 0.2:
            time.sleep(rng.random() * 0.01)
        check(result, xs, ids, context, rank)
    return True


@methods
def test_many_calls_with_ranks_delayed_at_random(method, ranks, many):
    assert all(ranks(3).run(delayed_calls, method, many(30), timeout=600))


def in_a_team(method):
    me, device = shmem.my_pe(), shmem.device()
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    team, rank = teams[me % 2], me // 2
    context = create_moe_dispatch_context(9, 40, 2, 6, torch.float32, team=team, **SMALL[method])
    xs, ids = routing([9, 4], 40, 2, 6, torch.float32, me % 2)
    check(moe_dispatch(xs[rank].to(device), ids[rank].to(device), context), xs, ids, context, rank)


@methods
def test_disjoint_teams_work_side_by_side(method, ranks):
    ranks(4).run(in_a_team, method, timeout=120)


def strided_operands(method):
    rank, world, device = shmem.my_pe(), shmem.pe_count(), shmem.device()
    context = create_moe_dispatch_context(8, 40, 3, 6, torch.float16, **SMALL[method])
    xs, ids = routing([8] * world, 40, 3, 6, torch.float16, 1)
    wide = torch.full((16, 50), 9.0, dtype=torch.float16, device=device)
    wide[::2, 4:44] = xs[rank].to(device)
    turned = ids[rank].T.contiguous().T.to(device)
    check(moe_dispatch(wide[::2, 4:44], turned, context), xs, ids, context, rank)
    context.free()
    # More experts of a token than the default blocks have room for.
    where = dict(method=SMALL[method]["method"], layout=context.layout)
    context = create_moe_dispatch_context(8, 40, 20, 6, torch.float16, **where)
    xs, ids = routing([8] * world, 40, 20, 6, torch.float16, 1)
    check(moe_dispatch(xs[rank].to(device), ids[rank].to(device), context), xs, ids, context, rank)
    context.free()


@methods
def test_strided_tokens_transposed_ids_and_twenty_experts_a_token_work(method, ranks):
    ranks(2).run(strided_operands, method)


def wrong_operands(method):
    rank, device = shmem.my_pe(), shmem.device()
    create = dict(max_tokens=8, hidden=16, topk=2, num_experts=4, dtype=torch.float32, **SMALL[method])
    context = create_moe_dispatch_context(**create)
    x, ids = torch.zeros(8, 16, device=device), torch.zeros(8, 2, dtype=torch.int64, device=device)
    other = create_moe_dispatch_context(**create)
    tokens, counts, handle = context.empty()
    wrong = {
        "x has 9 tokens": (torch.zeros(9, 16, device=device), ids, None),
        "x is .*8, 15": (x[:, :15], ids, None),
        "x is torch.float16": (x.half(), ids, None),
        "x has strides": (torch.zeros(16, 8, device=device).T, ids, None),
        "topk_ids is .*8, 1.*, it must be .*8, 2": (x, ids[:, :1], None),
        "topk_ids is torch.int16": (x, ids.short(), None),
        "topk_ids is torch.sparse_coo, it must be dense": (x, ids.to_sparse(), None),
        "out does not fit": (x, ids, other.empty()),
        "out does not fit: make it with empty": (x, ids, (tokens[1:], counts, handle)),
    }
    if context.layout == "tokens":
        wrong |= {
            "out does not fit: make it with .*, whose tokens are the context's": (x, ids, (tokens.clone(), counts, handle)),
            "x lies in the context's own memory": (tokens[3:6], ids[:3], None),
        }
    else:
        wrong["out and x overlap"] = (tokens[3:6], ids[:3], (tokens, counts, handle))
    pipelined = dict(method="pipelined", layout=context.layout)
    block = "BLOCK_T" if context.layout == "rows" else "BLOCK_P"
    for text, (a, b, out) in wrong.items():
        with pytest.raises(ValueError, match=f"rank {rank}: moe_dispatch: {text}"):
            moe_dispatch(a, b, context, out)
    moe_dispatch(x, ids, context)  # still usable
    context.free()
    with pytest.raises(ValueError, match="was freed"):
        moe_dispatch(x, ids, context)
    for text, change in {
        "hidden is 0": dict(hidden=0),
        "dtype is torch.int8": dict(dtype=torch.int8),
        "placement is .*not decreasing": dict(placement=[0, 1, 0, 1]),
        "give the rank of each of the 4 experts, 0 to 1": dict(placement=[0, 0, 1]),
        "max_rows is -1": dict(max_rows=-1),
        "BLOCK_Q": dict(config={"BLOCK_Q": 1}),
        "method is 'fast': give one of gather, pipelined": dict(method="fast"),
        "layout is 'columns': give one of rows, tokens": dict(layout="columns"),
        "layout is .'rows'.: give one of rows, tokens": dict(layout=["rows"]),
        "topk is 1025: give an integer of at most 1024": dict(topk=1025),
        "BLOCK_T is 64, topk 20: give a BLOCK_T of at most 32": dict(method="gather", topk=20, config=dict(BLOCK_T=64)),
        "BLOCK_C is 1024, topk 2: give a BLOCK_C of at most 512": dict(pipelined, config=dict(BLOCK_C=1024)),
        "PUTTERS is 3 of 4 programs": dict(pipelined, config={"PUTTERS": 3}, programs=4),
        f"CHUNK is 6: give a power of two from {block}, 4, to 64": dict(pipelined, config={"CHUNK": 6, block: 4}),
        "STREAM_ROWS is 3: give an integer from 0 to 2": dict(method="pipelined", layout="rows", config={"STREAM_ROWS": 3}),
        "STREAM_TOKENS is -1": dict(method="pipelined", layout="rows", config={"STREAM_TOKENS": -1}),
        r"config has \['STREAM_ROWS'\]": dict(method="pipelined", layout="tokens", config={"STREAM_ROWS": 1}),
        "programs is 2": dict(pipelined, config=None, programs=2),
        "do not fit 31 bits": dict(max_tokens=2**30),
    }.items():
        with pytest.raises(ValueError, match=text):
            create_moe_dispatch_context(**{**create, **change})
    with pytest.raises(CollectiveMismatchError, match="placement"):
        create_moe_dispatch_context(**create, placement=[0, 0, rank, 1])


@methods
def test_what_does_not_fit_is_refused_by_name_on_every_rank(method, ranks):
    ranks(2).run(wrong_operands, method)
