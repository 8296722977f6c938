"""Operators captured in CUDA graphs, and two of them on two streams. Skipped where there are fewer than two NVIDIA GPUs."""

import importlib

import pytest
import torch

from triton_dist import backend, kernels, shmem

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


def moe():
    T, H, k, E = 64, 256, 4, 16
    dispatch = kernels.create_moe_dispatch_context(T, H, k, E, BF16)
    combine = kernels.create_moe_combine_context(dispatch)
    x, weights, out = random(T, H), random(T, k, dtype=torch.float32), random(T, H)
    ids = torch.rand(T, E, device=x.device).topk(k).indices.to(torch.int32)
    result = dispatch.empty()
    result[0].zero_()

    def call():
        kernels.moe_dispatch(x, ids, dispatch, result, check=False)
        kernels.moe_combine(result[0], weights, result[2], combine, out)

    class Both:
        def free(self):
            combine.free()
            dispatch.free()

    return Both(), [x, weights], [out], call


OPERATORS = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "moe dispatch and combine": moe,
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
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
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


def side_by_side():
    """Small grids, so that both operators' programs fit the device at the same time."""
    torch.manual_seed(shmem.my_pe())
    contexts = [kernels.create_all_reduce_context(1 << 16, BF16, method, programs=16) for method in ("mesh", "two_shot")]
    streams = [torch.cuda.Stream() for _ in contexts]
    x = [random(1 << 16) for _ in contexts]
    expected = [kernels.all_reduce(one, context) for one, context in zip(x, contexts)]
    torch.cuda.synchronize()
    order = [0, 1] if shmem.my_pe() == 0 else [1, 0]  # the ranks launch in different orders
    for _ in range(200):
        out = [torch.full_like(one, float("nan")) for one in x]
        torch.cuda.synchronize()
        for i in order:
            with torch.cuda.stream(streams[i]):
                kernels.all_reduce(x[i], contexts[i], "sum", out[i])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(out, expected))
    for context in contexts:
        context.free()


def test_two_operators_on_two_streams(ranks):
    ranks(2).run(side_by_side, timeout=120)
