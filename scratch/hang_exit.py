import os, time, sys
import triton_dist, triton_dist.language as dl
from triton_dist import shmem
import torch, triton
@triton.jit
def hang(sig, ctx): dl.wait(sig, 1, ctx)
rank = int(os.environ["RANK"])
assert shmem.aclshmem_init(shmem.InitAttr(rank, 2, "", 1 << 20, shmem.OptionalAttr(control_operation_timeout=2))) == 0
s = shmem.create_signals(1)
hang[(1,)](s, shmem.context())
t = time.monotonic()
try: shmem.barrier_all()
except Exception as e: print(type(e).__name__, str(e)[:1500], f"{time.monotonic()-t:.1f} s", flush=True)
t = time.monotonic()
if sys.argv[1:] != ["nofinalize"]: print("finalize", shmem.aclshmem_finalize(), f"{time.monotonic()-t:.1f} s", flush=True)
