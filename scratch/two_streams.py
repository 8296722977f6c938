"""Two operators at once on two streams, launched in opposite orders by the two ranks. torchrun --nproc-per-node=2; limits waits."""
import os, sys, time, itertools
import triton_dist
from triton_dist import shmem, kernels
from triton_dist.errors import WaitTimeoutError
import torch
rank = int(os.environ["RANK"])
BF = torch.bfloat16
calls = int(sys.argv[1]) if len(sys.argv) > 1 else 200
def rnd(*s): return (torch.randn(s, device=shmem.device())/4).to(BF)
def ar(method):
    def make(share):
        p = {} if share is None else dict(programs=share)
        c = kernels.create_all_reduce_context(1 << 22, BF, method, **p)
        x, o = rnd(1 << 22), rnd(1 << 22)
        return c, o, lambda: kernels.all_reduce(x, c, "sum", o)
    return make
def ag(share):
    M, N, K = 2048, 2048, 2048
    c = kernels.create_allgather_gemm_context(M, K, BF, programs=share or 132)
    a, b, o = rnd(M, K), rnd(K, N), rnd(2*M, N)
    return c, o, lambda: kernels.allgather_gemm(a, b, c, o)
def rs(method):
    def make(share):
        M, N, K = 4096, 2048, 2048
        c = kernels.create_gemm_reduce_scatter_context(M, N, BF, method=method, **({} if method != "kernel" else dict(programs=share or 132)))
        a, b, o = rnd(M, K), rnd(K, N), rnd(M//2, N)
        return c, o, lambda: kernels.gemm_reduce_scatter(a, b, c, o)
    return make
def ga(method):
    def make(share):
        M, N, K = 4096, 2048, 2048
        kw = {} if method == "tma" else dict(programs=share or 132)
        c = kernels.create_gemm_allreduce_context(M, N, BF, method, **kw)
        a, b, o = rnd(M, K), rnd(K, N), rnd(M, N)
        return c, o, lambda: kernels.gemm_allreduce(a, b, c, o)
    return make
OPS = {"ar mesh": ar("mesh"), "ar two_shot": ar("two_shot"), "ar pipelined": ar("pipelined"), "ag kernel": ag, "rs kernel": rs("kernel"), "rs tma": rs("tma"), "ga two_shot": ga("two_shot"), "ga tma": ga("tma")}
PAIRS = [("ar mesh","ar two_shot"),("ag kernel","ar mesh"),("ag kernel","rs kernel"),("rs tma","ga tma"),("rs tma","ar pipelined"),("ga two_shot","ag kernel")]
def attempt(pair, share, same):
    assert shmem.aclshmem_init(shmem.InitAttr(rank, 2, "", 1 << 30)) == 0, shmem.last_error()
    torch.manual_seed(rank)
    made = [OPS[n](share) for n in pair]
    expected = []
    for c, o, call in made:
        call(); torch.cuda.synchronize(); expected.append(o.clone())
    shmem.barrier_all()
    streams = [torch.cuda.Stream() for _ in made]
    order = [0, 1] if rank == 0 or same else [1, 0]
    wrong = done = 0
    start = time.monotonic()
    try:
        for i in range(calls):
            for c, o, call in made: o.fill_(float("nan"))
            torch.cuda.synchronize()
            for k in order:
                with torch.cuda.stream(streams[k]): made[k][2]()
            torch.cuda.synchronize()
            shmem.check_waits()
            wrong += not all(torch.equal(m[1], e) for m, e in zip(made, expected))
            done += 1
        shmem.barrier_all()
        said = "ok" if not wrong else f"{wrong} WRONG"
    except WaitTimeoutError as error:
        said = f"HANG after {done} calls"
        if os.environ.get("SHOW"): print(error, flush=True)
    s = time.monotonic() - start
    if rank == 0: print(f"{pair[0]:12} {pair[1]:12} programs {share or 'default':8} {'same order' if same else 'opposite'}: {said} ({s:.1f} s)", flush=True)
    shmem.aclshmem_finalize()
for share, same in ((66, False), (None, False), (None, True)):
    for pair in PAIRS: attempt(pair, share, same)
