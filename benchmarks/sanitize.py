"""Every word of the device language once, under NVIDIA's compute-sanitizer: which of them does it find fault with?

    python benchmarks/sanitize.py [--tool memcheck|racecheck|synccheck] [--words put,wait,...]

Two ranks on two GPUs. Prints a table, a word a row: `wrong`, what the kernel's own check counted, and `errors`, the reports of
the tool that name its kernel; exits with 1 when there are any, and when the tool did not say at its end how many there are:
then it has watched nothing. memcheck finds accesses outside of memory and misaligned ones, racecheck hazards in the shared
memory of a program, synccheck barriers that a part of its threads misses.

The kernels are compiled in a first run without the tool, which slows everything else down a hundredfold. Errors of API calls
are left out: torch probes what the driver can do. The tool waits without a limit for the ranks to use a device: by default it
would go on without watching after 60 s. Options and reports are those of the Compute Sanitizer of CUDA 12 and 13.
"""

import argparse
import collections
import contextlib
import faulthandler
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

WORKER = "TRITON_DIST_SANITIZE_PROGRESS"  # the file to which the ranks write what they have done
WORDS, LIMIT = "TRITON_DIST_SANITIZE_WORDS", "TRITON_DIST_SANITIZE_SECONDS"
GRACE_S = 20.0  # by which the whole may outlast the ranks' limit: they write their stacks, the tool its reports


def sanitizer():
    places = ["/usr/local/cuda*/bin/compute-sanitizer", "/usr/local/cuda*/compute-sanitizer/compute-sanitizer"]
    places += ["/opt/nvidia/*/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer"]
    found = shutil.which("compute-sanitizer") or next((p for place in places for p in sorted(glob.glob(place))), None)
    if not found:
        raise SystemExit("compute-sanitizer is not on PATH, nor in /usr/local/cuda: it comes with the CUDA toolkit")
    return found


def run(tool, words, folder, seconds):
    """({word: wrong}, {kernel: errors}, [reports that name no kernel], errors by the tool's own count, how it ended) of one run
    on two ranks."""
    prefix = [sanitizer(), "--tool", tool, "--target-processes", "all", "--report-api-errors", "no"] if tool else []
    prefix += ["--launch-timeout", "0"] if tool else []
    log, progress = os.path.join(folder, "log"), os.path.join(folder, "progress")
    open(progress, "w").close()
    with open(log, "w") as file:
        group = subprocess.Popen(
            [*prefix, sys.executable, __file__], stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, WORKER: progress, WORDS: words, LIMIT: str(seconds)},
        )  # fmt: skip
        try:
            ended = f"status {group.wait(seconds + GRACE_S)}"
        except subprocess.TimeoutExpired:
            ended = f"not within {seconds:g} s"
        except BaseException:
            end(group)
            raise
        end(group)
    with open(log, errors="replace") as file:
        errors, unnamed, told = reports(file.read())
    if tool and told is None and ended == "status 0":
        ended = "status 0, but the tool gave no count at its end: it watched nothing"
    with open(progress) as file:
        wrong = {word: int(count) for word, count in (line.split() for line in file)}
    return wrong, errors, unnamed, told or 0, ended


def end(group):
    """Ends what is left of a process and its group; the ranks end when the process that started them does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group.pid, signal.SIGKILL)
    group.wait()


def reports(text):
    """({kernel: errors}, [reports that name no kernel], the tool's own count or None) of the tool's output."""
    # A report is a line that begins "========= Invalid", "========= Barrier error" and so on; the kernel is named within the
    # next lines: "at put_kernel+0x50".
    kinds = "Invalid|Error|Warning|WARN|Race|Barrier|Misaligned|Potential|Program hit|Internal|Uninitialized|Malloc|Unable"
    errors, unnamed = collections.Counter(), []
    for report in re.split(rf"\n=+ (?={kinds})", "\n" + text)[1:]:
        named = re.search(r"\b(\w+_kernel)\b", report[:2000])
        if named:
            errors[named[1]] += 1
        elif not report.startswith("Error: process didn't terminate"):  # how it ended is told anyway
            unnamed.append(report[:400])
    counts = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", text, re.MULTILINE)
    return errors, unnamed, sum(map(int, counts)) if counts else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "synccheck", "none"])
    parser.add_argument("--words", default="", help="with commas; default: all")
    parser.add_argument("--folder", help="folder that keeps the output of the run")
    parser.add_argument("--seconds", type=float, default=600, help="limit of the run under the tool")
    args = parser.parse_args()
    if args.tool != "none":
        sanitizer()  # says now that there is none, not after the first run
    with tempfile.TemporaryDirectory() as temporary:
        os.environ.setdefault("TRITON_CACHE_DIR", temporary)
        folder = args.folder or temporary
        os.makedirs(folder, exist_ok=True)
        wrong, errors, unnamed, told, ended = run(None, args.words, folder, args.seconds)
        compiled = len(wrong)
        if args.tool != "none" and ended == "status 0":
            wrong, errors, unnamed, told, ended = run(args.tool, args.words, folder, args.seconds)
        missing = compiled - len(wrong)
        if ended != "status 0" or missing:
            with open(os.path.join(folder, "log"), errors="replace") as file:
                print(file.read()[-6000:])
    print(f"{args.tool}: word                 wrong  errors")
    for word, count in wrong.items():
        print(f"{args.tool}: {word:20} {count:5} {errors[word + '_kernel']:7}")
    strange = {kernel: count for kernel, count in errors.items() if kernel.removesuffix("_kernel") not in wrong}
    print(f"{args.tool}: in all {sum(wrong.values())} wrong, {sum(errors.values())} errors; other kernels: {strange or 'none'}")
    print(f"{args.tool}: {told} errors by the tool's own count")
    print(f"{args.tool}: {len(unnamed)} reports that name no kernel; {len(wrong)} of {compiled} words run; ended: {ended}")
    for report in unnamed[:3]:
        print(report)
    sys.exit(bool(sum(wrong.values()) or errors or unnamed or told or missing or ended != "status 0"))


if WORKER not in os.environ and __name__ == "__main__":
    main()

import triton_dist  # noqa: E402, F401
import triton_dist.language as dl  # noqa: E402
from triton_dist import backends, shmem  # noqa: E402
from triton_dist.testing import Ranks  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

N = 1000  # elements of a message; not a whole number of blocks
# Of the 16 signals the first 5 are those of barrier_grid.


@triton.jit
def put_kernel(x, box, out, sig, n, ctx):
    dl.put(box, x, n, 1 - dl.rank(ctx), ctx, tl.program_id(0), tl.num_programs(0), 256)
    dl.barrier_grid(sig, ctx)


@triton.jit
def get_kernel(x, box, out, sig, n, ctx):
    i = tl.arange(0, 1024)
    tl.store(box + i, tl.load(x + i, mask=i < n), mask=(i < n) & (tl.program_id(0) == 0))
    dl.barrier_grid(sig, ctx)
    dl.get(out, box, n, 1 - dl.rank(ctx), ctx, tl.program_id(0), tl.num_programs(0), 256)


@triton.jit
def put_2d_kernel(x, box, out, sig, n, ctx):
    dl.put_2d(box, x, 25, 40, 40, 40, 1 - dl.rank(ctx), ctx, tl.program_id(0), tl.num_programs(0))
    dl.barrier_grid(sig, ctx)


@triton.jit
def get_2d_kernel(x, box, out, sig, n, ctx):
    i = tl.arange(0, 1024)
    tl.store(box + i, tl.load(x + i, mask=i < n), mask=(i < n) & (tl.program_id(0) == 0))
    dl.barrier_grid(sig, ctx)
    dl.get_2d(out, box, 25, 40, 40, 40, 1 - dl.rank(ctx), ctx, tl.program_id(0), tl.num_programs(0))


@triton.jit
def remote_store_kernel(x, box, out, sig, n, ctx):
    i = tl.program_id(0) * 512 + tl.arange(0, 512)
    dl.remote_store(box + i, tl.load(x + i, mask=i < n), 1 - dl.rank(ctx), ctx, mask=i < n)
    dl.barrier_grid(sig, ctx)


@triton.jit
def relaxed_store_kernel(x, box, out, sig, n, ctx):
    """Blocks that are stored 16 bytes at a time, but for the end, and one that is left to exchanges, in program 1."""
    i, peer = tl.program_id(0) * 512 + tl.arange(0, 512), 1 - dl.rank(ctx)
    dl.remote_store(box + i, tl.load(x + i, mask=i < n), peer, ctx, mask=i < n - 64 * tl.program_id(0), sem="relaxed")
    last = n - 64 + tl.arange(0, 64)
    dl.remote_store(box + last, tl.load(x + last), peer, ctx, mask=(last < n) & (tl.program_id(0) == 1), sem="relaxed")
    dl.barrier_grid(sig, ctx)


@triton.jit
def remote_load_kernel(x, box, out, sig, n, ctx):
    i = tl.program_id(0) * 512 + tl.arange(0, 512)
    tl.store(box + i, tl.load(x + i, mask=i < n), mask=i < n)
    dl.barrier_grid(sig, ctx)
    tl.store(out + i, dl.remote_load(box + i, 1 - dl.rank(ctx), ctx, mask=i < n), mask=i < n)


@triton.jit
def symm_at_kernel(x, box, out, sig, n, ctx):
    """By tensor descriptors, whose loads and stores are TMA's."""
    there = tl.make_tensor_descriptor(dl.symm_at(box, 1 - dl.rank(ctx), ctx), [25, 40], [40, 1], [32, 64])
    here = tl.make_tensor_descriptor(x, [25, 40], [40, 1], [32, 64])
    if tl.program_id(0) == 0:
        there.store([0, 0], here.load([0, 0]))
    dl.barrier_grid(sig, ctx)


@triton.jit
def notify_kernel(x, box, out, sig, n, ctx):
    """Sets and adds, and waits for both, by one signal and by many."""
    peer = 1 - dl.rank(ctx)
    if tl.program_id(0) == 0:
        dl.put(box, x, n, peer, ctx)
        dl.notify(dl.signal_at(sig, 8), peer, ctx, 7)
        dl.notify(dl.signal_at(sig, 9), peer, ctx, 3, "add")
        dl.notify(dl.signal_at(sig, 9), peer, ctx, 4, "add")
        dl.wait(dl.signal_at(sig, 8), 7, ctx, "eq", 2)


@triton.jit
def notify_all_kernel(x, box, out, sig, n, ctx):
    if tl.program_id(0) == 0:
        dl.put(box, x, n, 1 - dl.rank(ctx), ctx)
        dl.notify_all(dl.signal_at(sig, 8 + dl.rank(ctx)), ctx, 2)
        dl.wait(dl.signal_at(sig, 8), 2, ctx, "ge", dl.num_ranks(ctx))


@triton.jit
def put_signal_kernel(x, box, out, sig, n, ctx):
    pid, programs, peer = tl.program_id(0), tl.num_programs(0), 1 - dl.rank(ctx)
    dl.put_signal(box, x, n, dl.signal_at(sig, 8), peer, ctx, 1, "add", pid, programs, 256)
    token = dl.wait(dl.signal_at(sig, 8), programs, ctx)
    dl.consume_token(box, token)


@triton.jit
def wait_kernel(x, box, out, sig, n, ctx):
    """All comparisons."""
    pid, peer = tl.program_id(0), 1 - dl.rank(ctx)
    dl.put(box, x, n, peer, ctx, pid, tl.num_programs(0), 256)
    mine = dl.signal_at(sig, 8 + pid)
    dl.notify(mine, peer, ctx, 5)
    dl.wait(mine, 5, ctx, "ge")
    dl.wait(mine, 4, ctx, "gt")
    dl.wait(mine, 5, ctx, "eq")
    dl.wait(mine, 4, ctx, "ne")
    dl.wait(mine, 5, ctx, "le")
    dl.wait(mine, 6, ctx, "lt")
    dl.barrier_grid(sig, ctx)


@triton.jit
def test_kernel(x, box, out, sig, n, ctx):
    pid, peer = tl.program_id(0), 1 - dl.rank(ctx)
    dl.put(box, x, n, peer, ctx, pid, tl.num_programs(0), 256)
    dl.notify(dl.signal_at(sig, 8 + pid), peer, ctx, 1)
    came = 0
    while came == 0:
        came = dl.test(dl.signal_at(sig, 8 + pid), 1, ctx).to(tl.int32)
    dl.barrier_grid(sig, ctx)


@triton.jit
def fence_kernel(x, box, out, sig, n, ctx):
    i, peer = tl.arange(0, 1024), 1 - dl.rank(ctx)
    if tl.program_id(0) == 0:
        dl.remote_store(box + i, tl.load(x + i, mask=i < n), peer, ctx, mask=i < n)
        dl.fence(ctx)
        dl.remote_store(dl.signal_at(sig, 8), 1, peer, ctx)
        dl.wait(dl.signal_at(sig, 8), 1, ctx)


@triton.jit
def quiet_kernel(x, box, out, sig, n, ctx):
    peer = 1 - dl.rank(ctx)
    dl.put(box, x, n, peer, ctx, tl.program_id(0), tl.num_programs(0), 256)
    dl.quiet(ctx)
    dl.barrier_grid(sig, ctx)


@triton.jit
def barrier_all_kernel(x, box, out, sig, n, ctx):
    if tl.program_id(0) == 0:
        dl.put(box, x, n, 1 - dl.rank(ctx), ctx)
        for _ in range(3):
            dl.barrier_all(dl.signal_at(sig, 8), ctx)


@triton.jit
def barrier_clear_kernel(x, box, out, sig, n, ctx):
    if tl.program_id(0) == 0:
        dl.put(box, x, n, 1 - dl.rank(ctx), ctx)
        for _ in range(3):
            dl.barrier_clear(dl.signal_at(sig, 8), ctx)


@triton.jit
def barrier_grid_kernel(x, box, out, sig, n, ctx):
    dl.put(box, x, n, 1 - dl.rank(ctx), ctx, tl.program_id(0), tl.num_programs(0), 256)
    for _ in range(3):
        dl.barrier_grid(sig, ctx)


@triton.jit
def atomics_kernel(x, box, out, sig, n, ctx):
    """Five atomics turn a block of zeros into the peer's x + 1; and one of each on a scalar."""
    i, peer = tl.arange(0, 1024), 1 - dl.rank(ctx)
    inside = i < n
    value = tl.load(x + i, mask=inside, other=0)
    if tl.program_id(0) == 0:
        dl.atomic_add(box + i, value - 1, peer, ctx, mask=inside)
        dl.atomic_max(box + i, value, peer, ctx, mask=inside)
        dl.atomic_min(box + i, value, peer, ctx, mask=inside)
        dl.atomic_xchg(box + i, value + 1, peer, ctx, mask=inside)
        dl.atomic_cas(box + i * inside, tl.where(inside, value + 1, -1), tl.where(inside, value, 0), peer, ctx)
        cell = dl.signal_at(sig, 8)
        dl.atomic_add(cell, 1, peer, ctx)
        dl.atomic_max(cell, 2, peer, ctx)
        dl.atomic_min(cell, 1, peer, ctx)
        dl.atomic_xchg(cell, 1, peer, ctx)
        dl.atomic_cas(cell, 1, 1, peer, ctx)
    dl.barrier_grid(sig, ctx)


KERNELS = {name.removesuffix("_kernel"): kernel for name, kernel in list(globals().items()) if name.endswith("_kernel")}
INTO_OUT = ("get", "get_2d", "remote_load")


def worker(words):
    """On every rank. torch has as little as possible to do on the device, for the tool works on all of its kernels, too."""
    rank, device = shmem.my_pe(), shmem.device()
    # a descriptor that a kernel makes needs memory from the host
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    here = torch.arange(N, dtype=torch.int32) + 1000 * (rank + 1)
    there = here + 1000 * (1 - 2 * rank)
    x = here.to(device)
    for word in words or KERNELS:
        box, sig = shmem.aclshmem_create_tensor((N,), torch.int32), shmem.create_signals(16)
        out = torch.full((N,), -1, dtype=torch.int32).to(device)
        box.copy_(torch.full((N,), 0 if word == "atomics" else -1, dtype=torch.int32))
        shmem.barrier_all()
        KERNELS[word][(2,)](x, box, out, sig, N, shmem.context())
        shmem.barrier_all()
        wrong = ((out if word in INTO_OUT else box).cpu() != there).sum().item()
        wrong = sum(shmem.gather("wrong", wrong))
        if rank == 0:
            with open(os.environ[WORKER], "a") as file:
                file.write(f"{word} {wrong}\n")
        shmem.aclshmem_free_tensor(box)
        shmem.aclshmem_free_tensor(sig)


def ready():
    """On every rank, before shmem is there: its device's context, which takes long under the tool."""
    torch.zeros(1).to(backends.platform().prepare(int(os.environ["RANK"])))


if __name__ == "__main__":
    began, limit = time.monotonic(), float(os.environ[LIMIT])
    # Ends this process, and with it the ranks, even where the tool has put it into a process group that nobody kills.
    faulthandler.dump_traceback_later(limit + GRACE_S / 2, exit=True)
    with Ranks(2) as ranks:
        # the tool does not hand an empty variable on
        words = [word for word in os.environ.get(WORDS, "").split(",") if word]
        ranks.run(ready, timeout=limit, init=False)
        print(f"the ranks are up after {time.monotonic() - began:.0f} s", flush=True)
        # within the limit of the whole: then a rank that hangs writes where
        ranks.run(worker, words, timeout=max(limit - (time.monotonic() - began), 5), heap_bytes=1 << 20)
        print(f"all done after {time.monotonic() - began:.0f} s", flush=True)
