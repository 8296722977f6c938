"""Cost of limited waits: run with and without TRITON_DIST_WAIT_TIMEOUT. Medians in us."""
import os, sys
sys.path.insert(0, "benchmarks")
import measure
import triton_dist, triton_dist.language as dl
from triton_dist import shmem, kernels
import torch, triton, triton.language as tl
@triton.jit
def ping(sig, out, rounds, first, ctx):
    peer = 1 - dl.rank(ctx)
    t = tl.full((), 0, tl.int32)
    for i in range(first + 1, first + rounds + 1):
        if dl.rank(ctx) == 0:
            dl.notify(sig, peer, ctx, i); t = dl.wait(sig, i, ctx)
        else:
            t = dl.wait(sig, i, ctx); dl.notify(sig, peer, ctx, i)
    tl.store(out, t)
rank, world, dev = measure.start(1 << 30)
BF = torch.bfloat16
def rnd(*s): return (torch.randn(s, device=dev)/4).to(BF)
sig, out, ctx = shmem.create_signals(1), torch.zeros(1, dtype=torch.int32, device=dev), shmem.context()
count = 0
def pp():
    global count
    ping[(1,)](sig, out, 2000, count, ctx, num_warps=4); count += 2000
res = {}
def t(name, f, div=1, **kw):
    res[name] = measure.microseconds([f], **kw)[0] / div
t("notify->wait one way", pp, 4000, samples=7)
for m, n in (("flagged", 4096), ("pipelined", 1 << 19), ("mesh", 1 << 19)):
    c = kernels.create_all_reduce_context(n, BF, m); x, o = rnd(n), rnd(n)
    t(f"all_reduce {m} {n*2} B, graph", lambda c=c, x=x, o=o: kernels.all_reduce(x, c, "sum", o), samples=15, calls=20, graph=True)
M, N, K = 8192, 4096, 2048
a, b = rnd(M, K), rnd(K, N)
for name, create, f, o in (("gemm_reduce_scatter", kernels.create_gemm_reduce_scatter_context, kernels.gemm_reduce_scatter, rnd(M//2, N)),
                   ("gemm_allreduce", kernels.create_gemm_allreduce_context, kernels.gemm_allreduce, rnd(M, N))):
    c = create(M, N, BF, method="tma")
    t(f"{name} tma", lambda c=c, f=f, o=o: f(a, b, c, o), samples=9, calls=5)
shmem.check_waits()
if rank == 0:
    for k, v in res.items(): print(f"{'on ' if 'TRITON_DIST_WAIT_TIMEOUT' in os.environ else 'off'} {k:36} {v:9.2f}", flush=True)
measure.finish()
