"""Operators captured in CUDA graphs, and two of them on two streams. Skipped where there are fewer than two NVIDIA GPUs."""

import importlib

import pytest
import torch

from triton_dist import backend, kernels, shmem
from triton_dist.backends.nvidia_graph import uncollected
from triton_dist.errors import WaitTimeoutError
from triton_dist.testing import Ranks, RanksFailed, run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(backend != "nvidia" or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

BF16 = torch.bfloat16
METHODS = {
    name: importlib.import_module(f"triton_dist.kernels.{name}").METHODS
    for name in ("all_reduce", "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
}
REPLAYS, CHECKED = 1000, 50  # every 50th result is compared


def random(*shape, dtype=BF16):
    return torch.randn(shape, device=shmem.device()).to(dtype)


def all_reduce(method):
    def make():
        context = kernels.create_all_reduce_context(70000, BF16, method)
        x, out = random(70000), random(70000)
        return context, [x], [out], lambda: kernels.all_reduce(x, context, "sum", out)

    return make


def all_gather():
    context = kernels.create_all_gather_context(5000, BF16)
    x, out = random(5000), random(2 * 5000)
    return context, [x], [out], lambda: kernels.all_gather(x, context, out)


def reduce_scatter():
    context = kernels.create_reduce_scatter_context(5000, BF16)
    x, out = random(2 * 5000), random(5000)
    return context, [x], [out], lambda: kernels.reduce_scatter(x, context, "sum", out)


def allgather_gemm(method):
    def make():
        M, N, K = 640, 384, 256
        context = kernels.create_allgather_gemm_context(M, K, BF16, method=method)
        a, b, out = random(M, K), random(K, N), random(2 * M, N)
        return context, [a, b], [out], lambda: kernels.allgather_gemm(a, b, context, out)

    return make


def gemm_reduce_scatter(method):
    def make():
        M, N, K = 640, 384, 256
        context = kernels.create_gemm_reduce_scatter_context(M, N, BF16, method=method)
        a, b, out = random(M, K), random(K, N), random(M // 2, N)
        return context, [a, b], [out], lambda: kernels.gemm_reduce_scatter(a, b, context, out)

    return make


def gemm_allreduce(method):
    def make():
        M, N, K = 640, 384, 256
        context = kernels.create_gemm_allreduce_context(M, N, BF16, method)
        a, b, out = random(M, K), random(K, N), random(M, N)
        return context, [a, b], [out], lambda: kernels.gemm_allreduce(a, b, context, out)

    return make


def moe(layout="rows"):
    T, H, k, E = 64, 256, 4, 16
    dispatch = kernels.create_moe_dispatch_context(T, H, k, E, BF16, layout=layout)
    combine = kernels.create_moe_combine_context(dispatch)
    x, weights, out = random(T, H), random(T, k, dtype=torch.float32), random(T, H)
    ids = torch.rand(T, E, device=x.device).topk(k).indices.to(torch.int32)
    tokens, _, handle = result = dispatch.empty()
    y = tokens.zero_() if layout == "rows" else x.new_zeros(dispatch.max_rows, H)
    if layout == "tokens":
        handle.index.zero_()

    def call():
        kernels.moe_dispatch(x, ids, dispatch, result, check=False)
        if layout == "tokens":
            torch.index_select(tokens, 0, handle.index, out=y)
        kernels.moe_combine(y, weights, handle, combine, out)

    class Both:
        def free(self):
            combine.free()
            dispatch.free()

    return Both(), [x, weights], [out], call


OPERATORS = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "moe dispatch and combine": moe,
    "moe dispatch and combine, tokens in place": lambda: moe("tokens"),
    **{f"all_reduce {method}": all_reduce(method) for method in (None, *METHODS["all_reduce"])},
    **{f"allgather_gemm {method}": allgather_gemm(method) for method in METHODS["allgather_gemm"]},
    **{f"gemm_reduce_scatter {method}": gemm_reduce_scatter(method) for method in METHODS["gemm_reduce_scatter"]},
    **{f"gemm_allreduce {method}": gemm_allreduce(method) for method in METHODS["gemm_allreduce"]},
}


def replayed(name):
    torch.manual_seed(shmem.my_pe())
    context, inputs, outputs, call = OPERATORS[name]()
    call()  # compiles
    torch.cuda.synchronize()
    shmem.barrier_all()
    graph = torch.cuda.CUDAGraph()
    with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    for i in range(1, REPLAYS + 1):
        for x in inputs:
            x.normal_()
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        if i % CHECKED == 0 or i == 1:
            found = [out.clone() for out in outputs]
            for out in outputs:
                out.fill_(float("nan"))
            call()  # the same bits every time: so the eager call is the reference
            assert all(torch.equal(x, y) for x, y in zip(found, outputs)), (name, i)
    torch.cuda.synchronize()
    shmem.barrier_all()
    context.free()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_captured_operator_replays_right(name, ranks):
    ranks(2).run(replayed, name, timeout=120)


def called_again(name):
    """Three sets of operands in turn, so that a context records, replays and makes calls side by side."""
    torch.manual_seed(shmem.my_pe())
    context, inputs, outputs, call = OPERATORS[name]()
    sets = [(inputs, outputs)] + [([x.clone() for x in inputs], [out.clone() for out in outputs]) for _ in range(2)]
    run = dict(allgather_gemm=kernels.allgather_gemm, gemm_reduce_scatter=kernels.gemm_reduce_scatter)
    run = run.get(name.split()[0], kernels.gemm_allreduce)
    for i in range(REPLAYS // 2):
        (a, b), (out,) = sets[i % 3] if i < REPLAYS // 3 else sets[i // 7 % 3]
        a.normal_()
        b.normal_()
        out.fill_(float("nan"))
        run(a, b, context, out)
        if i % CHECKED == 0 or i < 9:
            found = out.clone()
            out.fill_(float("nan"))
            context.run(a, b, out)  # as the first call was made
            assert torch.equal(found, out), (name, i)
    assert sum(replay is not None for replay in context.replays.replays.values()) == 3
    torch.cuda.synchronize()
    shmem.barrier_all()
    context.free()


@pytest.mark.parametrize("name", [name for name in OPERATORS if "gemm" in name])
def test_calls_with_operands_seen_before_are_replayed_right(name, ranks):
    ranks(2).run(called_again, name, timeout=120)


# Kernels that wait, on two streams at once. Sizes at which a grid takes all of the device that it may.


def large(method):
    def make():
        context = kernels.create_all_reduce_context(1 << 22, BF16, method)
        x, out = random(1 << 22), random(1 << 22)
        return context, [x], [out], lambda: kernels.all_reduce(x, context, "sum", out)

    return make


def product(create, call, rows, *arguments, **options):
    def make():
        M, N, K = 4096, 2048, 1024
        context = create(M, K if call is kernels.allgather_gemm else N, BF16, *arguments, **options)
        a, b, out = random(M, K), random(K, N), random(rows(M), N)
        return context, [a, b], [out], lambda: call(a, b, context, out)

    return make


ag, rs, ar = kernels.allgather_gemm, kernels.gemm_reduce_scatter, kernels.gemm_allreduce
WAITING = {
    **{f"all_reduce {method}": large(method) for method in ("mesh", "two_shot", "ring", "pipelined")},
    "all_reduce flagged": all_reduce("flagged"),
    "all_gather": all_gather,
    "moe": moe,
    "allgather_gemm kernel": product(kernels.create_allgather_gemm_context, ag, lambda M: 2 * M, method="kernel"),
    **{
        f"gemm_reduce_scatter {method}": product(
            kernels.create_gemm_reduce_scatter_context, rs, lambda M: M // 2, method=method
        )
        for method in ("kernel", "tma")
    },
    **{
        f"gemm_allreduce {method}": product(kernels.create_gemm_allreduce_context, ar, lambda M: M, method)
        for method in ("two_shot", "tma", "columns")
    },
}


def at_once(names, calls, concurrent):
    """How many calls of the two came through, in opposite orders on the two ranks."""
    torch.manual_seed(shmem.my_pe())
    with kernels.concurrent(2 if concurrent else 1):
        made = [WAITING[name]() for name in names]
    streams = [torch.cuda.Stream() for _ in made]
    expected = []
    for _, _, outputs, call in made:
        call()
        torch.cuda.synchronize()
        expected.append([out.clone() for out in outputs])
    shmem.barrier_all()
    order = [0, 1] if shmem.my_pe() == 0 else [1, 0]
    for _ in range(calls):
        for _, _, outputs, _ in made:
            for out in outputs:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        for i in order:
            with torch.cuda.stream(streams[i]):
                made[i][-1]()
        torch.cuda.synchronize()
        shmem.check_waits()
        for (_, _, outputs, _), wanted in zip(made, expected):
            assert all(torch.equal(out, right) for out, right in zip(outputs, wanted)), names
    shmem.barrier_all()
    for context, *_ in made:
        context.free()


def every_pair(calls):
    names = list(WAITING)
    for i, one in enumerate(names):
        for other in names[i:]:
            at_once((one, other), calls, True)


@pytest.fixture(scope="module")
def limited():
    """Two ranks whose waits are limited: a pair that does not fit together is named within seconds."""
    with Ranks(2, env={"TRITON_DIST_WAIT_TIMEOUT": "5"}) as ranks:
        yield ranks


def test_every_pair_of_waiting_operators_at_once_on_two_streams(limited):
    limited.run(every_pair, 5, timeout=180, heap_bytes=1 << 30)


def test_two_operators_on_two_streams_200_times(limited):
    pair = "allgather_gemm kernel", "gemm_reduce_scatter kernel"
    limited.run(at_once, pair, 200, True, timeout=60, heap_bytes=1 << 30)


def too_large():
    """Each fills the device: unless their order happens to be the same, the ranks wait for one another in a circle."""
    try:
        at_once(("allgather_gemm kernel", "gemm_reduce_scatter kernel"), 5, False)
    except WaitTimeoutError as error:
        return str(error)


def test_operators_that_do_not_fit_together_are_named_instead_of_hanging():
    with pytest.raises(RanksFailed) as info:  # finalize, too, says that results are wrong
        run_ranks(too_large, 2, env={"TRITON_DIST_WAIT_TIMEOUT": "1"}, timeout=60, heap_bytes=1 << 30)
    assert "allgather_gemm_kernel" in str(info.value) and "gemm_reduce_scatter_kernel" in str(info.value)
