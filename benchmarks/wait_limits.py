"""What limits on waits in kernels (TRITON_DIST_WAIT_TIMEOUT) cost on NVIDIA GPUs.

    python benchmarks/wait_limits.py [--rounds 2]

Two ranks on two GPUs, started anew with and without the limit in turn, since kernels are compiled for the one or the other.
Prints medians over the rounds, in microseconds, and with / without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

WORKER = "TRITON_DIST_BENCHMARK_WORKER"
SECONDS = 120  # of one start


def once(limit):
    """{what: microseconds}"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_DIST_WAIT_TIMEOUT"}
    environment.update({WORKER: "1"} | ({"TRITON_DIST_WAIT_TIMEOUT": "60"} if limit else {}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    if "LOCAL_RANK" in os.environ:
        parser.error("start it by python, without torchrun: it starts its ranks itself")
    rounds = [(once(False), once(True)) for _ in range(parser.parse_args().rounds)]
    print(f"{'':40} {'without':>9} {'with':>9}")
    for what in rounds[0][0]:
        without, limited = (statistics.median(one[i][what] for one in rounds) for i in range(2))
        print(f"{what:40} {without:9.2f} {limited:9.2f} {limited / without:7.3f}x")


if WORKER not in os.environ and __name__ == "__main__":
    sys.exit(main())

import triton_dist  # noqa: E402
from measure import finish, microseconds, say, start  # noqa: E402
from triton_dist import kernels, shmem  # noqa: E402
from words import ping_pong  # noqa: E402

import torch  # noqa: E402

BF16 = torch.bfloat16


def worker():
    on_cpu = triton_dist.backend == "cpu"
    _, world, device = start((64 << 20) if on_cpu else (1 << 30))
    found = {}

    def random(*shape):
        return (torch.randn(shape, device=device) / 4).to(BF16)

    sig, turns, past = shmem.create_signals(1), 20 if on_cpu else 5000, iter(range(0, 1 << 30, 20 if on_cpu else 5000))
    (us,) = microseconds([lambda: ping_pong[(1,)](sig, next(past), turns, shmem.context(), num_warps=4)], samples=7)
    found["notify to wait, one way"] = us / turns / 2
    for method, n in (("flagged", 4096), ("pipelined", 1 << 19), ("mesh", 1 << 19)):
        n = 1000 if on_cpu else n
        context, x, out = kernels.create_all_reduce_context(n, BF16, method), random(n), random(n)
        call = lambda: kernels.all_reduce(x, context, "sum", out)  # noqa: B023, E731
        found[f"all_reduce {method}, {2 * n} bytes, graph"] = microseconds([call], 15, 2 if on_cpu else 20, True)[0]
    if not on_cpu:
        M, N, K = 8192, 4096, 2048
        a, b = random(M, K), random(K, N)
        for name in ("gemm_reduce_scatter", "gemm_allreduce"):
            context = getattr(kernels, f"create_{name}_context")(M, N, BF16, method="tma")
            run, out = getattr(kernels, name), random(M // world if "scatter" in name else M, N)
            found[f"{name} tma, {M}, {N}, {K}"] = microseconds([lambda: run(a, b, context, out)], 11, 5)[0]  # noqa: B023
    shmem.check_waits()
    say(json.dumps(found))
    finish()


if __name__ == "__main__":
    worker()
