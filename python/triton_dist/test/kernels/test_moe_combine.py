"""moe_combine after moe_dispatch against a sum over slots in torch."""

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.errors import CollectiveMismatchError
from triton_dist.kernels.moe_combine import create_moe_combine_context, moe_combine, reference
from triton_dist.kernels.moe_dispatch import create_moe_dispatch_context, moe_dispatch

import torch

pytestmark = pytest.mark.dist

PIPELINED = dict(BLOCK_T=2, CHUNK=4, BLOCK_H=64)
DISPATCH = {
    "gather": dict(method="gather", config=dict(BLOCK_T=4, BLOCK_H=64), programs=3),
    "pipelined": dict(method="pipelined", config=dict(PIPELINED, BLOCK_P=4, BLOCK_C=4), programs=4),
}
COMBINE = {
    "gather": dict(config=dict(BLOCK_T=4, BLOCK_H=64), programs=3),
    "pipelined": dict(config=dict(PIPELINED, BLOCK_S=4), programs=3),
}
methods = pytest.mark.parametrize("method", list(COMBINE))
DISPATCH |= {f"{name} tokens": dict(options, layout="tokens") for name, options in DISPATCH.items()}
COMBINE |= {f"{name} tokens": options for name, options in COMBINE.items()}
layouts = pytest.mark.parametrize("method", list(DISPATCH))
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def routing(T, H, k, E, dtype, seed, dropped=0.2):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=g).to(dtype)
    ids = torch.randint(0, E, (T, k), generator=g)
    ids = torch.where(torch.rand(T, k, generator=g) < dropped, -1, ids)
    weights = torch.where(ids < 0, float("nan"), torch.rand(T, k, generator=g))  # those of dropped slots are not read
    return x, ids, weights


def expert(e, rows):
    return rows * (e + 1) - 0.5


def all_experts(tokens, counts, handle):
    """`expert`, applied to the rows of a dispatch; what lies behind the last row is poisoned."""
    context, at = handle.context, 0
    y = torch.full((context.max_rows, context.H), float("nan"), dtype=tokens.dtype, device=tokens.device)
    mine = [e for e, owner in enumerate(context.owners) if owner == context.rank]
    for e, n in zip(mine, counts.tolist()):
        rows = slice(at, at + n)
        y[rows] = expert(e, tokens[rows] if handle.index is None else tokens[handle.index[rows].long()])
        at += n
    return y


def check(out, x, ids, weights, E):
    """Sums in fp32 in the same order, but a device may contract a product and a sum: k 2^-23 of the terms; one rounding."""
    expected = reference(x, ids, weights, expert, E).float()
    size = reference(x.abs(), ids, weights, lambda e, rows: rows * (e + 1) + 0.5, E).float()
    bound = torch.finfo(x.dtype).eps * expected.abs() + 2 * ids.shape[1] * 2.0**-23 * size
    if triton_dist.backend == "cpu":
        bound.zero_()
    assert out.shape == x.shape and out.dtype == x.dtype
    assert ((out.cpu().float() - expected).abs() <= bound).all(), (out.cpu().float() - expected).abs().max().item()


def run_case(method, tokens, H, k, E, dtype, seed, placement=None, dropped=0.2, calls=2, team=0):
    rank, device = shmem.team_my_pe(team), shmem.device()
    dispatch = create_moe_dispatch_context(max(tokens), H, k, E, dtype, placement, team=team, **DISPATCH[method])
    context = create_moe_combine_context(dispatch, **COMBINE[method])
    for call in range(calls):
        T = tokens[(rank + call) % len(tokens)]
        x, ids, weights = routing(T, H, k, E, dtype, seed + 100 * rank + call, dropped)
        tokens_here, counts, handle = moe_dispatch(x.to(device), ids.to(device), dispatch)
        y = all_experts(tokens_here, counts, handle)
        out = torch.full((T, H), 7.0, dtype=dtype, device=device)
        assert moe_combine(y, weights.to(device), handle, context, out) is out
        check(out, x, ids, weights, E)
    dispatch.free()
    context.free()


def all_sorts(method):
    world = shmem.pe_count()
    ragged = [9, 4, 0, 7, 1, 12, 3, 5][:world]
    for dtype in DTYPES if world == 2 else [torch.bfloat16]:
        run_case(method, ragged, 80, 3, 7, dtype, 1)
    run_case(method, ragged, 64, 3, 6, torch.float32, 3, placement=[world - 1] * 6)
    run_case(method, ragged, 1, 1, 1, torch.float32, 4, calls=1)
    run_case(method, ragged, 16, 4, 9, torch.bfloat16, 5, dropped=1.0, calls=1)
    run_case(method, [0] * world, 16, 4, 9, torch.bfloat16, 6, calls=1)


@methods
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_ragged_tokens_uneven_experts_and_nothing_at_all(world, method, ranks):
    ranks(world).run(all_sorts, method, timeout=240)


def cases(method, lots):
    for seed, (tokens, H, k, placement, dropped) in enumerate(lots):
        run_case(method, tokens, H, k, len(placement), torch.bfloat16, seed, placement, dropped)


def lots(world):
    return st.lists(
        st.tuples(
            st.lists(st.integers(0, 14), min_size=world, max_size=world),
            st.integers(1, 200),
            st.integers(1, 5),
            st.lists(st.integers(0, world - 1), min_size=1, max_size=9).map(sorted),
            st.sampled_from([0.0, 0.3, 0.9]),
        ),
        min_size=1,
        max_size=3,
    )


@layouts
@settings(max_examples=3, deadline=None, database=None)
@given(data=st.data())
def test_any_routing(method, data, ranks):
    world = data.draw(st.sampled_from([2, 3]))
    ranks(world).run(cases, method, data.draw(lots(world)), timeout=240)


def delayed_calls(method, calls):
    """Ranks drift apart at random; several combines follow one dispatch, so none is held back by the next dispatch."""
    rank, device = shmem.my_pe(), shmem.device()
    H, k, E, T = 16, 2, 5, 6
    dispatch = create_moe_dispatch_context(T, H, k, E, torch.float32, **DISPATCH[method])
    context = create_moe_combine_context(dispatch, **COMBINE[method])
    rng = random.Random(rank)
    out = torch.empty(T, H, device=device)
    for call in range(calls):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        if call % 5 == 0:
            x, ids, weights = routing(T, H, k, E, torch.float32, 1000 * rank + call)
            tokens, counts, handle = moe_dispatch(x.to(device), ids.to(device), dispatch)
            y = all_experts(tokens, counts, handle)
            expected = reference(x, ids, weights, expert, E)
        moe_combine(y * (call + 1), weights.to(device), handle, context, out)
        assert torch.allclose(out.cpu(), expected * (call + 1), rtol=1e-5, atol=1e-5 * (call + 1)), call
    return True


@methods
def test_many_calls_with_ranks_delayed_at_random(method, ranks, many):
    assert all(ranks(3).run(delayed_calls, method, many(80), timeout=600))


def in_a_team(method):
    teams = [shmem.team_split_strided(0, start, 2, 2) for start in (0, 1)]
    run_case(method, [9, 4], 40, 2, 6, torch.float32, 5, team=teams[shmem.my_pe() % 2])


@methods
def test_disjoint_teams_work_side_by_side(method, ranks):
    ranks(4).run(in_a_team, method, timeout=120)


def strided_and_failed(method):
    device = shmem.device()
    T, H, k, E = 8, 40, 3, 6
    dispatch = create_moe_dispatch_context(T, H, k, E, torch.float16, max_received=12, **DISPATCH[method])
    context = create_moe_combine_context(dispatch, **COMBINE[method])
    crowded = torch.zeros(T, k, dtype=torch.int32, device=device)
    x = torch.randn(T, H).half().to(device)
    _, _, handle = moe_dispatch(x, crowded, dispatch, check=False)
    weights = torch.ones(T, k, device=device)
    y = torch.zeros(dispatch.max_rows, H, dtype=torch.float16, device=device)
    assert moe_combine(y, weights, handle, context).isnan().all()

    x, ids, weights = routing(5, H, k, E, torch.float16, shmem.my_pe())
    tokens, counts, handle = moe_dispatch(x.to(device), ids.to(device), dispatch)
    wide = torch.full((dispatch.max_rows, H + 3), float("nan"), dtype=torch.float16, device=device)
    wide[:, 2 : 2 + H] = all_experts(tokens, counts, handle)
    out = torch.full((5, H + 8), -7.0, dtype=torch.float16, device=device)
    turned = weights.T.contiguous().T.to(device)
    moe_combine(wide[:, 2 : 2 + H], turned, handle, context, out[:, 4 : 4 + H])
    check(out[:, 4 : 4 + H].contiguous(), x, ids, weights, E)
    assert (out[:, :4] == -7).all() and (out[:, 4 + H :] == -7).all()


@layouts
def test_a_failed_dispatch_gives_nan_and_strided_operands_work(method, ranks):
    ranks(2).run(strided_and_failed, method)


def wrong_operands(method):
    rank, device = shmem.my_pe(), shmem.device()
    create = dict(max_tokens=8, hidden=16, topk=2, num_experts=4, dtype=torch.float32, **DISPATCH[method])
    dispatch, other = (create_moe_dispatch_context(**create) for _ in range(2))
    context = create_moe_combine_context(dispatch, **COMBINE[method])
    x, ids = torch.zeros(8, 16, device=device), torch.zeros(8, 2, dtype=torch.int64, device=device)
    y, _, handle = moe_dispatch(x, ids, dispatch)
    weights = torch.ones(8, 2, device=device)
    wrong = {
        "y is": (y[:5], weights, handle, None),
        "y is torch.float16": (y.half(), weights, handle, None),
        "y has strides": (y.T.contiguous().T, weights, handle, None),
        "weights is .*8, 1.*, it must be .*8, 2": (y, weights[:, :1], handle, None),
        "weights is torch.float16": (y, weights.half(), handle, None),
        "the handle is of another": (y, weights, moe_dispatch(x, ids, other)[2], None),
        "handle is a tuple, it must be the third": (y, weights, (y, None, handle), None),
        "out is .*7, 16": (y, weights, handle, torch.empty(7, 16, device=device)),
    }
    for text, (a, b, h, out) in wrong.items():
        with pytest.raises(ValueError, match=f"rank {rank}: moe_combine: {text}"):
            moe_combine(a, b, h, context, out)
    moe_combine(y, weights, handle, context)  # still usable
    context.free()
    with pytest.raises(ValueError, match="was freed"):
        moe_combine(y, weights, handle, context)
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        create_moe_combine_context(dispatch, torch.int8)
    with pytest.raises(ValueError, match="BLOCK_Q"):
        create_moe_combine_context(dispatch, config={"BLOCK_Q": 1})
    with pytest.raises(CollectiveMismatchError, match="programs=2"):
        create_moe_combine_context(dispatch, programs=2 + rank)


@methods
def test_what_does_not_fit_is_refused_by_name_on_every_rank(method, ranks):
    ranks(2).run(wrong_operands, method)
