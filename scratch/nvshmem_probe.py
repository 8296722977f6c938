import faulthandler, os, sys, time
faulthandler.dump_traceback_later(12, repeat=True)
t=time.monotonic()
def p(*a): print(f"{time.monotonic()-t:6.1f}", os.environ.get("RANK"), *a, flush=True)
import triton_dist
from triton_dist import shmem
import torch
rank, n = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
p("imported")
for i in range(3):
    p("init", hex(shmem.aclshmemx_get_heap_base()) if i > 9 else "", shmem.aclshmem_init(shmem.InitAttr(rank, n, os.environ.get("G_IP_PORT", ""), (1 << 20) << i % 2)), shmem.last_error())
    x = shmem.aclshmem_create_tensor((100,), torch.float32)
    x.fill_(rank); p(hex(shmem.aclshmemx_get_heap_base()))
    shmem.barrier_all()
    p([float(shmem.peer_tensor(x, q)[7]) for q in range(n)])
    p("finalize", shmem.aclshmem_finalize())
