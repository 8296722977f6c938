"""Every operator of the library and every tutorial under the checker; as a command, a table of them.

    python python/triton_dist/test/check/operators.py [--world 2,3,4] [--schedules 20] [--only TEXT] [--weak] [--overhead]

An operator is called several times on one context, so that its buffers and signals are used again, and each result is
compared with the operator's own reference. A tutorial is run as it is, by its main(), at a small size."""

import argparse
import functools
import os
import sys
import time
from unittest import mock

import triton_dist  # noqa: F401  before triton
from triton_dist import check, kernels, shmem
from triton_dist.check.scripts import script
from triton_dist.testing import Ranks
import torch
import torch.distributed as dist

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 4))
TUTORIALS = os.path.join(ROOT, "tutorials", "ascend")
CALLS = 3
GEMM = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)


def module(name):
    return sys.modules[f"triton_dist.kernels.{name}"]


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + shmem.my_pe())
    return torch.randn(*shape, generator=generator).to(dtype)


def poisoned(shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def compare(calls, results, references, same=torch.equal):
    """Only after all calls: a collective of the reference in between would order what the operator has to order itself."""
    for call, result, operands in zip(range(len(results)), results, calls):
        expected = references(*operands)
        result, expected = (x if isinstance(x, (tuple, list)) else (x,) for x in (result, expected))
        for one, other in zip(result, expected):
            assert one.shape == other.shape and same(one, other), f"call {call}: {one} instead of {other}"


def near(one, other):
    return torch.allclose(one.float(), other.float(), rtol=2e-3, atol=2e-3)


def run_allgather_gemm(method="kernel", at_once=False):
    """at_once: the method streams multiplies what has come at once, as it does with few rows; between two ranks some of the
    own ones before."""
    dist.init_process_group("gloo")
    M, N, K, dtype = 20, 12, 8, torch.float16
    tuned = dict(config={**GEMM, "CHUNK_M": 8}, programs=2) if method == "kernel" else {}
    context = kernels.create_allgather_gemm_context(M, K, dtype, method=method, **tuned)
    if at_once:
        context.run.first_rows = lambda N: 7 if shmem.pe_count() == 2 else 0
        context.run.hurry = lambda first, N: False
    calls = [(random(M, K, dtype=dtype, seed=call), random(K, N, dtype=dtype, seed=9)) for call in range(2)]
    outs = [poisoned((M * shmem.pe_count(), N), dtype) for _ in calls]
    results = [kernels.allgather_gemm(a, b, context, out) for (a, b), out in zip(calls, outs)]
    compare(calls, results, module("allgather_gemm").reference, near)
    context.free()


def products(name, method, M=37, N=20, K=8):
    """`name`: gemm_reduce_scatter or gemm_allreduce."""
    dist.init_process_group("gloo")
    tuned = dict(config={**GEMM, "GROUP_M": 2}, programs=2) if method in ("kernel", "one_shot", "two_shot") else {}
    dtype = torch.float16 if method == "tma" else torch.float32
    M = M if tuned else 12 * shmem.pe_count()
    context = getattr(kernels, f"create_{name}_context")(M, N, dtype, method=method, **tuned)
    calls = [(random(M, K, dtype=dtype, seed=call), random(K, N, dtype=dtype, seed=call + 50)) for call in range(CALLS)]
    if dtype == torch.float16:  # partial sums travel in it: whole numbers keep them exact
        calls = [(a.round(), b.round()) for a, b in calls]
    compare(calls, [getattr(kernels, name)(a, b, context) for a, b in calls], module(name).reference, near)
    context.free()


def collective(create, function, reference, sizes):
    """`sizes`: elements of each call."""
    dist.init_process_group("gloo")
    context = create(max(sizes), torch.float32, programs=2, block=16)
    calls = [(random(n, seed=call),) for call, n in enumerate(sizes)]
    compare(calls, [function(x, context) for (x,) in calls], reference)
    context.free()


def all_reduce_by(method):
    def run():
        create = functools.partial(kernels.create_all_reduce_context, method=method)
        reference = functools.partial(module("all_reduce").reference, method=method)
        collective(create, kernels.all_reduce, reference, (80, 33, 70, 16))

    return run


def run_all_gather():
    collective(kernels.create_all_gather_context, kernels.all_gather, module("all_gather").reference, (48, 20, 40, 48))


def run_reduce_scatter():
    sizes = [n * shmem.pe_count() for n in (40, 17, 48, 48)]
    create = kernels.create_reduce_scatter_context
    collective(create, kernels.reduce_scatter, module("reduce_scatter").reference, sizes)


def run_broadcast():
    dist.init_process_group("gloo")
    context = kernels.create_broadcast_context(48, torch.float32, programs=2, block=16)
    calls = [(random(40, seed=call), call // 2 % shmem.pe_count()) for call in range(6)]
    compare(calls, [kernels.broadcast(x, root, context) for x, root in calls], module("broadcast").reference)
    context.free()


def run_barrier():
    context, shared = kernels.create_barrier_context(), shmem.aclshmem_create_tensor((1,), torch.int32)
    for call in range(CALLS):
        shared.fill_(call)
        kernels.barrier(context)
        for peer in range(shmem.pe_count()):
            assert shmem.peer_tensor(shared, peer).item() == call
        kernels.barrier(context)
    context.free()


def run_all_to_all():
    dist.init_process_group("gloo")
    world, me = shmem.pe_count(), shmem.my_pe()
    context = kernels.create_all_to_all_context(12 * world, (5,), torch.float32, config={"BLOCK": 16}, programs=2)
    tables = [[(me + 2 * peer + call) % 5 for peer in range(world)] for call in range(2)]
    counts = [torch.tensor(table, dtype=torch.int32) for table in tables]
    equal = [(random(4 * world, 5, seed=call),) for call in range(2)]
    ragged = [(random(sum(table), 5, seed=call + 10), one) for call, (table, one) in enumerate(zip(tables, counts))]
    results, ragged_results = [], []
    for call in range(2):
        results.append(kernels.all_to_all(*equal[call], context))
        ragged_results.append(kernels.all_to_all_v(*ragged[call], context))
    reference = module("all_to_all").reference
    compare(equal, results, lambda x: reference(x)[0])
    for call, (out, received) in enumerate(ragged_results):
        rows, came = reference(*ragged[call])
        assert received.tolist() == came and torch.equal(out[: len(rows)], rows), f"call {call}"
    context.free()


def run_sequence_all_to_all():
    world, S, H, D = shmem.pe_count(), 9, 2, 5
    config = dict(BLOCK_M=16, BLOCK_N=32)
    context = kernels.create_sequence_all_to_all_context(S, H, D, torch.float32, config=config, programs=2)
    for call in range(CALLS):
        x = random(S, H * world, D, seed=call)
        assert torch.equal(kernels.reverse_all_to_all(kernels.transpose_all_to_all(x, context), context), x), f"call {call}"
    context.free()


def run_qkv_all_to_all():
    dist.init_process_group("gloo")
    world, S, D = shmem.pe_count(), 5, 4
    heads = 2 * world, world
    config = dict(BLOCK_M=16, BLOCK_N=32)
    context = kernels.create_qkv_all_to_all_context(S, *heads, D, torch.float32, config=config, programs=2)
    calls = [[random(S, n, D, seed=10 * call + i) for i, n in enumerate((*heads, heads[1]))] for call in range(2)]
    results, backs = [], []
    for call in calls:
        results.append(kernels.qkv_all_to_all(*call, context))
        backs.append(kernels.attention_output_all_to_all(results[-1][0], context))
    compare(calls, results, module("qkv_all_to_all").reference)
    for (q, _, _), back in zip(calls, backs):
        assert torch.equal(back, q)
    context.free()


def run_moe(method, tiles, of_dispatch, programs, layout="rows"):
    """Two dispatches in a row, which no combine orders, then combines in a row, of other values each; then one of each."""
    T, H, topk, experts = 5, 16, 2, 2 * shmem.pe_count() + 1
    config = dict(BLOCK_H=16, **tiles)
    options = dict(config={**config, **of_dispatch}, programs=programs)
    options["layout"] = layout
    options["max_rows"] = 4 * shmem.pe_count() * T * topk  # room for the rows that counts give which a planted bug made wrong
    dispatch = kernels.create_moe_dispatch_context(T, H, topk, experts, torch.float32, method=method, **options)
    combine = kernels.create_moe_combine_context(dispatch, config=config, programs=programs)
    for calls in (2, 1):
        sent = []
        for call in range(calls):
            x = random(T, H, seed=call)
            generator = torch.Generator().manual_seed(shmem.my_pe() + 10 * call)
            ids = torch.rand(T, experts, generator=generator).topk(topk).indices
            ids[0, 0] = -1
            weights = torch.rand(T, topk, generator=generator)
            out = dispatch.empty()
            out[2].number.zero_()  # what a planted bug reads too early should be no wild row
            rows, counts, handle = kernels.moe_dispatch(x, ids, dispatch, out)
            if layout == "tokens":  # read before the next dispatch, in whose time peers write there
                n = int(counts.sum())
                y = poisoned((dispatch.max_rows, H), torch.float32)
                y[:n], rows = rows[handle.index[:n].long()], y
            sent.append((x * (weights * (ids >= 0)).sum(1, keepdim=True), rows, weights, handle))
        for factor in range(1, calls + 1):
            for call, (expected, rows, weights, handle) in enumerate(sent):
                out = kernels.moe_combine(rows * factor, weights, handle, combine)
                assert near(out, expected * factor), f"dispatch {call} of {calls}, times {factor}"
    combine.free()
    dispatch.free()


PROGRAMS = {
    "allgather_gemm": run_allgather_gemm,
    "allgather_gemm streams": functools.partial(run_allgather_gemm, "streams"),
    "allgather_gemm streams, the rest at once": functools.partial(run_allgather_gemm, "streams", at_once=True),
    "allgather_gemm sequence": functools.partial(run_allgather_gemm, "sequence"),
    "gemm_reduce_scatter": functools.partial(products, "gemm_reduce_scatter", "kernel"),
    "gemm_reduce_scatter tma": functools.partial(products, "gemm_reduce_scatter", "tma"),
    "gemm_reduce_scatter columns": functools.partial(products, "gemm_reduce_scatter", "columns"),
    "gemm_reduce_scatter sequence": functools.partial(products, "gemm_reduce_scatter", "sequence"),
    "gemm_allreduce one_shot": functools.partial(products, "gemm_allreduce", "one_shot"),
    "gemm_allreduce two_shot": functools.partial(products, "gemm_allreduce", "two_shot"),
    "gemm_allreduce tma": functools.partial(products, "gemm_allreduce", "tma"),
    "gemm_allreduce columns": functools.partial(products, "gemm_allreduce", "columns", N=36),
    "gemm_allreduce sequence": functools.partial(products, "gemm_allreduce", "sequence"),
    "all_reduce mesh": all_reduce_by("mesh"),
    "all_reduce two_shot": all_reduce_by("two_shot"),
    "all_reduce ring": all_reduce_by("ring"),
    "all_reduce flagged": all_reduce_by("flagged"),
    "all_reduce sentinel": all_reduce_by("sentinel"),
    "all_reduce pipelined": all_reduce_by("pipelined"),
    "all_gather": run_all_gather,
    "reduce_scatter": run_reduce_scatter,
    "broadcast": run_broadcast,
    "barrier": run_barrier,
    "all_to_all": run_all_to_all,
    "sequence_all_to_all": run_sequence_all_to_all,
    "qkv_all_to_all": run_qkv_all_to_all,
    "moe gather": functools.partial(run_moe, "gather", dict(BLOCK_T=4), {}, 2),
    "moe pipelined": functools.partial(run_moe, "pipelined", dict(BLOCK_T=2, CHUNK=2), dict(BLOCK_C=2), 4),
    "moe gather tokens": functools.partial(run_moe, "gather", dict(BLOCK_T=4), {}, 2, "tokens"),
    "moe pipelined tokens": functools.partial(
        run_moe, "pipelined", dict(BLOCK_T=2, CHUNK=2), dict(BLOCK_C=2, BLOCK_P=2), 4, "tokens"
    ),
}

PRODUCT = ["--M", "40", "--N", "24", "--K", "16", "--warmup", "2"]
EXCHANGE = ["--S", "40", "--H", "2", "--D", "8", "--warmup", "2"]
MOE = ["--tokens", "9", "--hidden", "16", "--topk", "2", "--experts", "9", "--drop", "0.2", "--warmup", "2"]
OPTIONS = {"01": PRODUCT, "02": PRODUCT, "03": PRODUCT, "04": EXCHANGE, "05": EXCHANGE, "06": PRODUCT, "08": EXCHANGE}
OPTIONS |= {"09": MOE, "10": MOE, "07": ["--S", "20", "--Hq", "{heads}", "--Hkv", "{world}", "--D", "8", "--warmup", "2"]}


def tutorial(number, world):
    """The script of a tutorial as a program for `explore(..., init=False)`."""
    name = next(one for one in sorted(os.listdir(TUTORIALS)) if one.startswith(number))
    options = [option.format(world=world, heads=2 * world) for option in OPTIONS[number]]
    return script(os.path.join(TUTORIALS, name), options)


def explore(name, world, schedules, **options):
    """The Report of an operator, or of a tutorial by its number."""
    if name in PROGRAMS:
        costs = module("stream_costs")  # several parts of small operands, and all kinds of blocks of columns
        small = dict(PART_BYTES=256, BLOCK_BYTES=256, TILE_M=6, TILE_N=4, MULTIPROCESSORS=4 + costs.SPARE)
        with mock.patch.multiple(costs, **small):
            return check.explore(PROGRAMS[name], world_size=world, schedules=schedules, **options)
    return check.explore(tutorial(name, world), world_size=world, schedules=schedules, init=False, **options)


NAMES = [*PROGRAMS, *OPTIONS]


def run_alone(name):
    """The operator as an ordinary run does it; processor seconds of this rank."""
    began = time.process_time()
    PROGRAMS[name]()
    dist.destroy_process_group() if dist.is_initialized() else None
    return time.process_time() - began


def overhead(only, world=2, times=3):
    """Processor time of a schedule against that of all ranks of an ordinary run, both at their best of a few."""
    print(f"| program, {world} ranks | ordinary run, CPU ms | one schedule, CPU ms | ratio |\n|---|---|---|---|", flush=True)
    with Ranks(world, env={"OMP_NUM_THREADS": "1"}) as ranks:
        for name in sorted(PROGRAMS):
            if only not in name:
                continue
            plain = min(sum(ranks.run(run_alone, name)) for _ in range(times))
            checked = []
            for _ in range(times):
                began = time.process_time()
                explore(name, world, 1)
                checked.append(time.process_time() - began)
            ratio = min(checked) / plain
            print(f"| {name} | {plain * 1e3:.0f} | {min(checked) * 1e3:.0f} | {ratio:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="2,3,4", help="world sizes (default 2,3,4)")
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--only", default="", help="only names that have this in them")
    parser.add_argument("--weak", action="store_true", help="weak memory in every seeded schedule (default: in every fourth)")
    parser.add_argument("--overhead", action="store_true", help="instead, compare the time with that of an ordinary run")
    args = parser.parse_args()
    if args.overhead:
        return overhead(args.only)
    print("| program | ranks | schedules | accesses | findings | s |\n|---|---|---|---|---|---|", flush=True)
    bad = 0
    for name in sorted(NAMES):
        for world in map(int, args.world.split(",")):
            if args.only not in name:
                continue
            began = time.perf_counter()
            report = explore(name, world, args.schedules, weak=args.weak or None)
            shown = f"tutorial {name}" if name in OPTIONS else name
            seconds = time.perf_counter() - began
            found = len(report.findings)
            print(f"| {shown} | {world} | {report.schedules} | {report.steps} | {found} | {seconds:.1f} |", flush=True)
            if not report.ok:
                bad += 1
                print(report, file=sys.stderr, flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
