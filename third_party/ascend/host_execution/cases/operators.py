"""The operators of `triton_dist.kernels`, host code and all, at small sizes: several calls on one context, ragged shapes."""

import torch

from triton_dist import kernels, shmem
from triton_dist.kernels.all_reduce import in_order_of
from triton_dist.kernels.moe_combine import reference as combined
from triton_dist.kernels.moe_quantization import quantize
from triton_dist.kernels.moe_routing import grouped
from triton_dist.kernels.reduce_scatter import fold

from .data import poisoned, values, who

CASES = {}
CHANNELS = dict(programs=2, block=64)
TILES = dict(config=dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=2), programs=2)
REGION = dict(config=dict(BLOCK_M=4, BLOCK_N=32), programs=2)


def case(name):
    def register(fn):
        CASES[name] = fn
        return fn

    return register


def of_all(seed, world, shape, dtype):
    return [values(seed, r, shape, dtype) for r in range(world)]


# -- collectives


@case("all_gather")
def all_gather(seed):
    me, world, *_ = who()
    found = []
    for dtype in (torch.float16, torch.int8):
        context = kernels.create_all_gather_context(500, dtype, **CHANNELS)
        for n in (500, 37, 192):
            xs = of_all(seed + n, world, n, dtype)
            out = kernels.all_gather(xs[me], context, poisoned(world * n, dtype))
            found.append((f"{n} x {dtype}", out, torch.cat(xs), 0))
        context.free()
    return found


def reduce_scatter(op, dtype):
    def run(seed):
        me, world, *_ = who()
        context, found = kernels.create_reduce_scatter_context(300, dtype, **CHANNELS), []
        for n in (300, 37):
            xs = of_all(seed + n, world, (world * n,), dtype)
            out = kernels.reduce_scatter(xs[me], context, op, poisoned(n, dtype))
            found.append((f"{n} x {dtype}", out, fold([x[me * n : (me + 1) * n] for x in xs], op), 0))
        context.free()
        return found

    return run


def all_reduce(method, op, dtype):
    def run(seed):
        me, world, *_ = who()
        context, found = kernels.create_all_reduce_context(500, dtype, method, **CHANNELS), []
        for n in (500, 37):
            xs = of_all(seed + n, world, (n,), dtype)
            out = kernels.all_reduce(xs[me], context, op, poisoned(n, dtype))
            found.append((f"{n} x {dtype}", out, in_order_of(method, xs, op), 0))
        context.free()
        return found

    return run


for op, dtype in (("sum", torch.float16), ("max", torch.float32), ("min", torch.int32), ("prod", torch.bfloat16)):
    case(f"reduce_scatter {op}")(reduce_scatter(op, dtype))
for method, op, dtype in (
    ("mesh", "sum", torch.float16),
    ("mesh", "min", torch.int64),
    ("two_shot", "sum", torch.bfloat16),
    ("two_shot", "max", torch.int32),
    ("ring", "sum", torch.float16),
    ("ring", "prod", torch.float32),
):
    case(f"all_reduce {method} {op}")(all_reduce(method, op, dtype))


@case("broadcast")
def broadcast(seed):
    me, world, *_ = who()
    context, found = kernels.create_broadcast_context(300, torch.float32, **CHANNELS), []
    for call, root in enumerate((0, world - 1, world - 1, 1)):
        n = (300, 41)[call % 2]
        xs = of_all(seed + call, world, n, torch.float32)
        out = kernels.broadcast(xs[me], root, context, poisoned(n, torch.float32))
        found.append((f"call {call} of root {root}", out, xs[root], 0))
    context.free()
    return found


@case("barrier")
def barrier(seed):
    me, world, *_ = who()
    context, found = kernels.create_barrier_context(), []
    cells = poisoned(world, torch.int32, symmetric=True)
    shmem.barrier_all()
    for call in range(3):
        for r in range(world):
            shmem.peer_tensor(cells, r)[me] = 10 * call + me
        kernels.barrier(context)
        found.append((f"call {call}", cells.clone(), torch.arange(world, dtype=torch.int32) + 10 * call, 0))
        kernels.barrier(context)
    context.free()
    return found


# -- all-to-all


@case("all_to_all")
def all_to_all(seed):
    me, world, *_ = who()
    context, found = kernels.create_all_to_all_context(8 * world, (5,), torch.float16, config=dict(BLOCK=32), programs=2), []
    for rows in (8, 3, 1):
        xs = of_all(seed + rows, world, (rows * world, 5), torch.float16)
        out = kernels.all_to_all(xs[me], context, poisoned((rows * world, 5), torch.float16))
        found.append((f"{rows} rows", out, torch.cat([x[me * rows : (me + 1) * rows] for x in xs]), 0))
    context.verify()
    context.free()
    return found


@case("all_to_all_v")
def all_to_all_v(seed):
    me, world, *_ = who()
    context = kernels.create_all_to_all_context(9 * world, (5,), torch.float32, config=dict(BLOCK=32), programs=2)
    found = []
    for call in range(3):
        counts = [[int(n) for n in values(seed + call, r, world, torch.int32).abs() % 9] for r in range(world)]
        xs = [values(seed + call, r + 50, (sum(counts[r]), 5), torch.float32) for r in range(world)]
        out, received = poisoned((9 * world, 5), torch.float32), poisoned(world, torch.int32)
        kernels.all_to_all_v(xs[me], torch.tensor(counts[me], dtype=torch.int32), context, out, received)
        pieces = [torch.split(x, c)[me] for x, c in zip(xs, counts)]
        found.append((f"call {call}: counts", received, torch.tensor([c[me] for c in counts], dtype=torch.int32), 0))
        expected = torch.cat(pieces)
        found.append((f"call {call}: rows", out[: len(expected)].clone(), expected, 0))
    context.verify()
    context.free()
    return found


def both_ways(lengths):
    def run(seed):
        me, world, *_ = who()
        S, H, D, found = lengths[:world], 2, 5, []
        context = kernels.create_sequence_all_to_all_context(S, H, D, torch.bfloat16, **REGION)
        for call in range(2):
            xs = [values(seed + call, r, (S[r], H * world, D), torch.bfloat16) for r in range(world)]
            y = kernels.transpose_all_to_all(xs[me], context, poisoned((sum(S), H, D), torch.bfloat16))
            found.append((f"call {call}: transpose", y, torch.cat([x[:, me * H : (me + 1) * H] for x in xs]), 0))
            back = kernels.reverse_all_to_all(y, context, poisoned((S[me], H * world, D), torch.bfloat16))
            found.append((f"call {call}: reverse", back, xs[me], 0))
        context.free()
        return found

    return run


case("transpose_all_to_all, reverse_all_to_all")(both_ways([5, 5, 5, 5]))
case("transpose_all_to_all, reverse_all_to_all, ragged")(both_ways([7, 0, 3, 4]))


@case("qkv_all_to_all, attention_output_all_to_all")
def qkv(seed):
    me, world, *_ = who()
    S, Hq, Hkv, D, found = [4, 7, 1, 3][:world], 2 * world, 2, 6, []
    context = kernels.create_qkv_all_to_all_context(S, Hq, Hkv, D, torch.float16, **REGION)
    own = Hkv // world or 1
    for call in range(2):
        q, k, v = (
            [values(seed + 10 * i + call, r, (S[r], heads, D), torch.float16) for r in range(world)]
            for i, heads in enumerate((Hq, Hkv, Hkv))
        )
        out = tuple(poisoned((sum(S), heads, D), torch.float16) for heads in (2, own, own))
        kernels.qkv_all_to_all(q[me], k[me], v[me], context, out)
        first = me * Hkv // world
        for name, got, parts, at, n in zip("qkv", out, (q, k, v), (2 * me, first, first), (2, own, own)):
            found.append((f"call {call}: {name}", got, torch.cat([part[:, at : at + n] for part in parts]), 0))
        o = kernels.attention_output_all_to_all(out[0], context, poisoned((S[me], Hq, D), torch.float16))
        found.append((f"call {call}: output", o, q[me], 0))
    context.free()
    return found


# -- GEMMs


def product_bound(a, b, dtype, parts=1):
    """By how much sums of products in fp32, in any order, and one rounding to `dtype` can differ from the exact result."""
    depth = a.shape[-1] + parts
    inexact = a.double().abs() @ b.double().abs() * (depth * 2.0**-24)
    info = torch.finfo(dtype)
    half_a_subnormal = info.smallest_normal * info.eps / 2
    return inexact + ((a.double() @ b.double()).abs() + inexact) * info.eps / 2 + half_a_subnormal


def allgather_gemm(dtype):
    def run(seed):
        me, world, *_ = who()
        M, K, N, found = 37, 40, 21, []
        config = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=2, CHUNK_M=16, NUM_BUFFERS=2, COPY_BLOCK=64)
        context = kernels.create_allgather_gemm_context(M, K, dtype, config=config, programs=2)
        for call in range(2):
            a, b = of_all(seed + call, world, (M, K), dtype), values(seed + 99 + call, 0, (K, N), dtype)
            c = kernels.allgather_gemm(a[me], b, context, poisoned((world * M, N), dtype))
            whole = torch.cat(a)
            found.append((f"call {call}", c.double(), whole.double() @ b.double(), product_bound(whole, b, dtype)))
        context.free()
        return found

    return run


def summed_gemm(operator, dtype, method=None):
    def run(seed):
        me, world, *_ = who()
        M, N, K, found = 37, 40, (24, 19, 16, 30)[:world], []
        create = getattr(kernels, f"create_{operator}_context")
        context = create(M, N, dtype, **({"method": method} if method else {}), **TILES)
        shard = -(-M // world)
        rows = slice(me * shard, (me + 1) * shard) if operator == "gemm_reduce_scatter" else slice(None)
        for call in range(3):
            a = [values(seed + call, r, (M, K[r]), dtype) for r in range(world)]
            b = [values(seed + call, r + 50, (K[r], N), dtype) for r in range(world)]
            wide_a, wide_b = torch.cat(a, 1), torch.cat(b)
            exact, bound = wide_a.double() @ wide_b.double(), product_bound(wide_a, wide_b, dtype, world)
            out = poisoned(exact[rows].shape, dtype)
            getattr(kernels, operator)(a[me], b[me], context, out)
            found.append((f"call {call}", out.double(), exact[rows], bound[rows]))
        context.free()
        return found

    return run


for dtype in (torch.float16, torch.bfloat16, torch.float32):
    name = str(dtype).removeprefix("torch.")
    case(f"allgather_gemm {name}")(allgather_gemm(dtype))
    case(f"gemm_reduce_scatter {name}")(summed_gemm("gemm_reduce_scatter", dtype))
    case(f"gemm_allreduce two_shot {name}")(summed_gemm("gemm_allreduce", dtype, "two_shot"))
case("gemm_allreduce one_shot float16")(summed_gemm("gemm_allreduce", torch.float16, "one_shot"))


# -- mixtures of experts


def routing(seed, rank, T, H, k, E, dtype):
    """Tokens [T, H] and their experts [T, k] of a rank; about one slot in five is dropped (-1)."""
    ids = values(seed, rank + 50, (T, k), torch.int32).abs() % E
    return values(seed, rank, (T, H), dtype), torch.where(values(seed, rank + 90, (T, k), torch.int32) < -60, -1, ids)


def moe(dtype, fp8=False, combine=False, layout="rows"):
    def run(seed):
        me, world, *_ = who()
        T, H, k, E, found = 9, 40, 3, 7, []
        small = dict(config=dict(BLOCK_T=4, BLOCK_H=32), programs=2)
        context = kernels.create_moe_dispatch_context(T, H, k, E, dtype, fp8=fp8, layout=layout, **small)
        back = kernels.create_moe_combine_context(context, **small) if combine else None
        for call in range(2):
            tokens = [(T, 4, 0, 7)[(r + call) % 4] for r in range(world)]
            lots = [routing(seed + call, r, tokens[r], H, k, E, dtype) for r in range(world)]
            xs, ids = [x for x, _ in lots], [i for _, i in lots]
            result, counts, handle = kernels.moe_dispatch(xs[me], ids[me], context)
            rows, expected, _ = grouped(xs, ids, context.owners, me)
            if layout == "tokens":
                result = result[handle.index[: len(rows)].long()]
            found.append((f"call {call}: counts", counts, expected, 0))
            if fp8:
                payload, scales = quantize(rows)
                found.append((f"call {call}: payload", result[0][: len(rows)].float(), payload.float(), 0))
                found.append((f"call {call}: scales", result[1][: len(rows)].clone(), scales, 0))
            else:
                found.append((f"call {call}: rows", result[: len(rows)].clone(), rows, 0))
            if combine:
                y = poisoned((context.max_rows, H), dtype)
                y[: len(rows)] = rows
                weights = values(seed + call, me + 70, (tokens[me], k), torch.float32)
                out = kernels.moe_combine(y, weights, handle, back, poisoned((tokens[me], H), dtype))
                whole = combined(xs[me], ids[me], weights, lambda e, x: x, E)
                found.append((f"call {call}: combined", out, whole, 0))  # in fp32, by slot, one rounding
        if combine:
            back.free()
        context.free()
        return found

    return run


case("moe_dispatch float16")(moe(torch.float16))
case("moe_dispatch bfloat16")(moe(torch.bfloat16))
case("moe_dispatch fp8")(moe(torch.bfloat16, fp8=True))
case("moe_dispatch tokens bfloat16")(moe(torch.bfloat16, layout="tokens"))
case("moe_combine float16")(moe(torch.float16, combine=True))
