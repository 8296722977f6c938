"""How the benchmarks measure: medians of times that all ranks took, of several things in turn, on the device or on the host.

Things to compare are run one after the other in every sample, so that clocks, heat and neighbours are the same for all.
"""

import os
import sys

import triton_dist
from triton_dist import shmem
from triton_dist.tuning import timing

import torch
import torch.distributed as dist

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def start(heap_bytes):
    """(rank, world, device): process group and symmetric heap. Says how the script is started, when it was not."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"One process a rank:\n    torchrun --nproc-per-node=2 {sys.argv[0]}")
    dist.init_process_group(shmem.process_group_backend())
    rank, world = dist.get_rank(), dist.get_world_size()
    attr = shmem.InitAttr()
    attr.my_rank, attr.n_ranks, attr.local_mem_size = rank, world, heap_bytes
    if shmem.aclshmem_init(attr) != 0:
        raise SystemExit(f"rank {rank}: aclshmem_init failed: {shmem.last_error()}")
    return rank, world, shmem.device()


def finish():
    synchronize()
    shmem.aclshmem_finalize()
    dist.destroy_process_group()


def say(*words):
    if dist.get_rank() == 0:
        print(*words, flush=True)


def synchronize():
    if triton_dist.backend != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()
    if triton_dist.backend != "cpu":
        torch.accelerator.synchronize()


def slowest(values):
    """Each value's maximum over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=shmem.device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def graphed(call, calls):
    """A function that replays a CUDA graph of `calls` calls in a row; on cpu, that makes them."""
    call()
    synchronize()
    return (timing.graphed if triton_dist.backend == "nvidia" else timing.repeated)(call, calls)


def microseconds(things, samples=15, calls=1, graph=False, warm=3):
    """Of one call of each thing: the median over samples, the slowest rank's.

    graph: each sample replays a graph of `calls` calls, which leaves the host's time out. Otherwise all samples are queued
    without waiting for the device, so the host's time shows only where it is the longer one.
    """
    if graph:
        things = [graphed(thing, calls) for thing in things]
    elif calls > 1:
        things = [timing.repeated(thing, calls) for thing in things]
    for _ in range(warm):
        for thing in things:
            thing()
    synchronize()
    rows = []
    for _ in range(samples):
        marks = [timing.mark()]
        for thing in things:
            thing()
            marks.append(timing.mark())
        rows.append(marks)
    synchronize()
    spans = [[timing.span(a, b) / calls for a, b in zip(marks, marks[1:])] for marks in rows]
    return slowest([sorted(row[i] for row in spans)[samples // 2] for i in range(len(things))])


def link_rate(nbytes, samples=10):
    """Bytes a microsecond of one copy into the right neighbour's memory, all ranks at the same time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    symmetric = shmem.aclshmem_create_tensor((nbytes,), torch.uint8)
    source = torch.ones(nbytes, dtype=torch.uint8, device=shmem.device())
    there = shmem.peer_tensor(symmetric, (rank + 1) % world)
    (us,) = microseconds([lambda: there.copy_(source)], samples)
    shmem.aclshmem_free_tensor(symmetric)
    return nbytes / us
