"""What all operators' contexts share: creation that fails on all ranks alike, teams of any shape, memory that comes back,
operands that are refused by name, calls that are compared on request."""

import os

import pytest

import triton_dist  # before triton
from triton_dist import kernels, shmem
from triton_dist.errors import CollectiveMismatchError, DeadlockError, ShmemError
from triton_dist.kernels.all_reduce import METHODS as ALL_REDUCE_METHODS
from triton_dist.kernels.allgather_gemm import METHODS as ALLGATHER_GEMM_METHODS
from triton_dist.kernels.gemm_allreduce import METHODS as GEMM_ALLREDUCE_METHODS
from triton_dist.kernels.gemm_reduce_scatter import METHODS as GEMM_REDUCE_SCATTER_METHODS
from triton_dist.kernels.moe_dispatch import METHODS as MOE_DISPATCH_METHODS
from triton_dist.shmem import world

import numpy as np
import torch

pytestmark = pytest.mark.dist

fp32, fp16 = torch.float32, torch.float16

CREATE = {
    "all_gather": lambda dtype, team, **k: kernels.create_all_gather_context(8, dtype, team=team, **k),
    "all_reduce": lambda dtype, team, **k: kernels.create_all_reduce_context(8, dtype, team=team, **k),
    "broadcast": lambda dtype, team, **k: kernels.create_broadcast_context(8, dtype, team=team, **k),
    "reduce_scatter": lambda dtype, team, **k: kernels.create_reduce_scatter_context(8, dtype, team=team, **k),
    "all_to_all": lambda dtype, team, **k: kernels.create_all_to_all_context(8, 4, dtype, team=team, **k),
    "sequence_all_to_all": lambda dtype, team, **k: kernels.create_sequence_all_to_all_context(3, 2, 4, dtype, team=team, **k),
    "qkv_all_to_all": lambda dtype, team, **k: kernels.create_qkv_all_to_all_context(3, 4, 2, 4, dtype, team=team, **k),
    "allgather_gemm": lambda dtype, team, **k: kernels.create_allgather_gemm_context(16, 16, dtype, team=team, **k),
    "gemm_reduce_scatter": lambda dtype, team, **k: kernels.create_gemm_reduce_scatter_context(16, 16, dtype, team=team, **k),
    "gemm_allreduce": lambda dtype, team, **k: kernels.create_gemm_allreduce_context(16, 16, dtype, team=team, **k),
    "moe_dispatch": lambda dtype, team, **k: kernels.create_moe_dispatch_context(4, 16, 2, 4, dtype, team=team, **k),
}
METHODS = {
    "all_reduce": ALL_REDUCE_METHODS,
    "allgather_gemm": ALLGATHER_GEMM_METHODS,
    "gemm_reduce_scatter": GEMM_REDUCE_SCATTER_METHODS,
    "gemm_allreduce": GEMM_ALLREDUCE_METHODS,
    "moe_dispatch": MOE_DISPATCH_METHODS,
}


def wrong_on_one_rank():
    me = shmem.my_pe()
    for name, create in CREATE.items():
        with pytest.raises(ValueError, match="rank 1: create_[a-z_]*_context: dtype is float32: give") as raised:
            create(fp32 if me == 0 else "float32", 0)
        assert name in str(raised.value) and f"rank {me}: " in str(raised.value)
    with pytest.raises(CollectiveMismatchError, match="max_elements=8.*\n.*max_elements=9"):
        kernels.create_all_gather_context(8 + me, fp32)
    for create in CREATE.values():
        with pytest.raises(CollectiveMismatchError, match="(?s)float32.*float16|float16.*float32"):
            create((fp32, fp16)[me], 0)
    for create in CREATE.values():  # all ranks are still in step
        create(fp32, 0).free()


def test_what_one_rank_finds_wrong_all_ranks_raise(ranks):
    ranks(2).run(wrong_on_one_rank, timeout=60)


def uneven_teams():
    me, device = shmem.my_pe(), shmem.device()
    pair = shmem.team_split_strided(0, 0, 1, 2)
    alone = shmem.team_split_strided(0, 2, 1, 1)
    team, members = (pair, [0, 1]) if me < 2 else (alone, [2])
    everything = shmem.aclshmem_create_tensor((1 << 20,), torch.int8).data_ptr()
    for create in CREATE.values():
        create(fp32, team).free()
    gather = kernels.create_all_gather_context(40 if me < 2 else 7, fp32, team=team)  # other sizes in other teams, too
    reduce = kernels.create_all_reduce_context(5, fp32 if me < 2 else fp16, "two_shot", team=team)
    for call in range(3):
        x = torch.full((5,), float(10 * call + me), device=device)
        expected = [float(10 * call + r) for r in members]
        assert kernels.all_gather(x, gather).tolist() == [v for v in expected for _ in range(5)]
        assert kernels.all_reduce(x.to(reduce.dtype), reduce).tolist() == [sum(expected)] * 5
    gather.free()
    reduce.free()
    return everything


def test_teams_of_different_sizes_and_arguments(ranks):
    ranks(3).run(uneven_teams, timeout=120)


def creation_without_room():
    half = shmem.aclshmem_create_tensor((9 << 18,), fp32)  # 9 of 16 MiB
    for _ in range(3):
        with pytest.raises(ShmemError, match="(?s)no room.*create_all_reduce_context has given back"):
            kernels.create_all_reduce_context(950_000, fp32, "two_shot")  # the second of its buffers does not fit
    rest = shmem.aclshmem_create_tensor((6 << 18,), fp32)  # nothing was kept
    for tensor in (half, rest):
        shmem.aclshmem_free_tensor(tensor)


def test_a_creation_that_fails_keeps_no_memory(ranks):
    ranks(2).run(creation_without_room, heap_bytes=16 << 20)


def every_method():
    """(what, function that makes the context) for each operator and method."""
    for name, create in CREATE.items():
        for method in METHODS.get(name, (None,)):
            given = {} if method is None else dict(method=method)
            yield f"{name} {method or ''}", lambda create=create, given=given: create(fp16, 0, **given)
    for method in MOE_DISPATCH_METHODS:
        dispatch = CREATE["moe_dispatch"](fp16, 0, method=method)
        yield f"moe_combine {method}", lambda dispatch=dispatch: kernels.create_moe_combine_context(dispatch)
    yield "barrier", kernels.create_barrier_context


def creation_and_freeing():
    heap = world.current("test").allocator
    for what, create in every_method():
        before = heap.free_bytes
        context = create()
        assert heap.free_bytes < before, what
        context.free()
        assert heap.free_bytes == before, what


def test_freeing_gives_all_memory_back(ranks):
    ranks(2).run(creation_and_freeing, timeout=60)


def freed_and_foreign():
    contexts = {name: create(fp32, 0) for name, create in CREATE.items()}
    contexts["moe_combine"] = kernels.create_moe_combine_context(contexts["moe_dispatch"])
    contexts["barrier"] = kernels.create_barrier_context()
    with pytest.raises(ValueError, match="context is a BarrierContext, it must be a AllGatherContext"):
        kernels.all_gather(torch.zeros(4), contexts["barrier"])
    handle = contexts["moe_dispatch"].empty()[2]
    y, weights = torch.zeros(contexts["moe_dispatch"].max_rows, 16), torch.zeros(0, 2)
    with pytest.raises(ValueError, match="the handle is empty: no moe_dispatch has written it"):
        kernels.moe_combine(y, weights, handle, contexts["moe_combine"])
    x = torch.zeros(16, 16)
    ids = torch.zeros(4, 2, dtype=torch.int32)
    use = {
        "all_gather": lambda context: kernels.all_gather(x, context),
        "all_reduce": lambda context: kernels.all_reduce(x, context),
        "broadcast": lambda context: kernels.broadcast(x, 0, context),
        "reduce_scatter": lambda context: kernels.reduce_scatter(x, context),
        "all_to_all": lambda context: kernels.all_to_all(x, context),
        "sequence_all_to_all": lambda context: kernels.transpose_all_to_all(x, context),
        "qkv_all_to_all": lambda context: kernels.qkv_all_to_all(x, x, x, context),
        "allgather_gemm": lambda context: kernels.allgather_gemm(x, x, context),
        "gemm_reduce_scatter": lambda context: kernels.gemm_reduce_scatter(x, x, context),
        "gemm_allreduce": lambda context: kernels.gemm_allreduce(x, x, context),
        "moe_dispatch": lambda context: kernels.moe_dispatch(x[:4], ids, context),
        "moe_combine": lambda context: kernels.moe_combine(y, weights, handle, context),
        "barrier": kernels.barrier,
    }
    assert use.keys() == contexts.keys()
    for name, context in contexts.items():
        context.free()
        for call in (use[name], type(context).free):
            with pytest.raises(ValueError, match=f"rank {shmem.my_pe()}: [a-z_]+: the context was freed"):
                call(context)


def test_contexts_that_were_freed_or_are_another_operators(ranks):
    ranks(1).run(freed_and_foreign, timeout=60)


def refused_operands():
    world, device = shmem.pe_count(), shmem.device()
    reduce = kernels.create_all_reduce_context(np.int64(64), fp32)
    gemm = kernels.create_gemm_allreduce_context(16, 16, fp32)
    gather = kernels.create_allgather_gemm_context(16, 16, fp32)
    turn = kernels.create_sequence_all_to_all_context(4, 2, 8, fp32)
    sent = kernels.create_broadcast_context(8, fp32)
    x = torch.randn(16, 16, device=device)
    with pytest.raises(ValueError, match="x is a lazy negative or conjugate view"):
        kernels.all_reduce(torch._neg_view(x[:4, :4].contiguous()), reduce)
    with pytest.raises(ValueError, match="a is a lazy negative"):
        kernels.gemm_allreduce(torch._neg_view(x), x, gemm)
    with pytest.raises(ValueError, match="x is a list, it must be a tensor"):
        kernels.all_reduce([1.0], reduce)
    with pytest.raises(ValueError, match="out and a overlap"):
        kernels.gemm_allreduce(x, x.clone(), gemm, out=x)
    with pytest.raises(ValueError, match=r"out has strides \(0, 1\): several of its elements are one place"):
        kernels.gemm_allreduce(x, x, gemm, out=torch.empty(1, 16, device=device).expand(16, 16))
    with pytest.raises(ValueError, match="b is"):
        kernels.allgather_gemm(x, x[0, 0], gather)
    y = torch.randn(4, 2 * world, 8, device=device)
    with pytest.raises(ValueError, match="out and x overlap"):
        kernels.transpose_all_to_all(y, turn, out=y.view(4 * world, 2, 8))
    with pytest.raises(ValueError, match="root is True: give an integer"):
        kernels.broadcast(x[0, :8], True, sent)
    kernels.broadcast(x[0, :8], np.int64(0), sent)
    both = torch.randn(16, 32, device=device)  # columns side by side do not overlap, though their rows interleave
    out = kernels.gemm_allreduce(both[:, :16], x, gemm, out=both[:, 16:])
    assert out.data_ptr() == both[:, 16:].data_ptr()


def test_operands_that_cannot_be_right_are_refused_by_name(ranks):
    ranks(2).run(refused_operands, timeout=60)


def scales_that_do_not_fit():
    context = kernels.create_moe_dispatch_context(4, 256, 2, 4, torch.bfloat16, fp8=True)
    x = torch.randn(4, 256, device=shmem.device()).bfloat16()
    ids = torch.zeros(4, 2, dtype=torch.int32, device=shmem.device())
    (payload, scales), counts, handle = context.empty()
    wide = torch.empty(scales.shape[0], 4, device=scales.device)
    for bad in (scales[:1], scales.half(), wide[:, :2], scales.double()):
        with pytest.raises(ValueError, match="out does not fit: make it with empty"):
            kernels.moe_dispatch(x, ids, context, out=((payload, bad), counts, handle))
    with pytest.raises(ValueError, match="out does not fit"):
        kernels.moe_dispatch(x, ids, context, out=(payload, counts, handle))
    kernels.moe_dispatch(x, ids, context, out=((payload, scales), counts, handle))


def test_the_scales_of_a_dispatch_are_checked(ranks):
    ranks(2).run(scales_that_do_not_fit, timeout=60)


def compared_calls():
    os.environ["TRITON_DIST_CHECK_CALLS"] = "1"
    try:
        gather = kernels.create_all_gather_context(8, fp32)
        reduce = kernels.create_all_reduce_context(8, fp32)
    finally:
        del os.environ["TRITON_DIST_CHECK_CALLS"]
    me, device = shmem.my_pe(), shmem.device()
    x = torch.ones(4, device=device)
    kernels.all_gather(x, gather)
    with pytest.raises(CollectiveMismatchError, match=r"(?s)all_reduce\(x of \[4\], op='sum'\).*op='max'"):
        kernels.all_reduce(x, reduce, op="max" if me else "sum")
    kernels.all_reduce(x, reduce)
    if me == 0:
        with pytest.raises(ValueError, match="x is torch.float16"):
            kernels.all_gather(x.half(), gather)
    with pytest.raises(CollectiveMismatchError, match=r"(?s)call 3 of this context.*call 2 of this context"):
        kernels.all_gather(x, gather)


def test_calls_are_compared_on_request(ranks):
    ranks(2).run(compared_calls, timeout=60)


def configs_of_another_kind():
    for config in (3, "BLOCK", [("BLOCK", 16)]):
        with pytest.raises(ValueError, match="create_all_to_all_context: config is .*: give a dict of BLOCK"):
            kernels.create_all_to_all_context(8, 4, fp32, config=config)


def test_a_config_that_is_no_dict_is_refused_by_name(ranks):
    ranks(1).run(configs_of_another_kind)


def calls_of_one_rank():
    reduce = kernels.create_all_reduce_context(8, fp32)
    with pytest.raises(DeadlockError, match=r"(?s)in mesh_kernel: waits.*did all ranks make the same calls.*_CHECK_CALLS=1"):
        kernels.all_reduce(torch.ones(4), reduce) if shmem.my_pe() else shmem.barrier_all()


@pytest.mark.skipif(triton_dist.backend != "cpu", reason="a deadlock is proven on cpu alone")
def test_a_deadlock_inside_of_an_operator_says_how_to_compare_calls(ranks):
    ranks(2).run(calls_of_one_rank, timeout=60)


def half_of_the_device():
    programs = {}
    for name, n in (("alone", 1), ("two", 2), ("many", 1000)):
        with kernels.concurrent(n):
            contexts = [kernels.create_all_gather_context(1000, fp32)]
            contexts.append(kernels.create_allgather_gemm_context(16, 16, fp32, method="kernel"))
            contexts.append(kernels.create_all_gather_context(1000, fp32, programs=3))
        programs[name] = [contexts[0].programs, contexts[1].run.programs, contexts[2].programs]
        for context in contexts:
            context.free()
    with kernels.concurrent(2):
        with pytest.raises(ZeroDivisionError), kernels.concurrent(1):
            raise ZeroDivisionError
        context = kernels.create_all_gather_context(1000, fp32)
    programs["nested"] = context.programs
    with pytest.raises(ValueError, match="rank 0: concurrent: operators is 0"), kernels.concurrent(0):
        pass
    return programs


def test_concurrent_operators_share_the_programs_that_the_device_runs_at_a_time(ranks):
    (programs,) = ranks(1).run(half_of_the_device)
    alone = programs["alone"][0]
    assert programs["alone"] == [alone, alone, 3]
    assert programs["two"] == [alone // 2, alone // 2, 3] and programs["nested"] == alone // 2
    assert programs["many"] == [1, 1, 3]
