"""Every word of the device language in a small kernel, compiled for a GPU that need not be here.

    python words.py nvidia|ascend OUT.json [CASE ...]

writes {case: {"ptx": text} or {"error": text of the exception and its causes}}. Under `ascend` the words of that target
go through stock Triton's front end, which is where its refusals are raised. The tests beside this file read the JSON.
"""

import json
import os
import sys
import tempfile
import warnings

TARGET = sys.argv[1] if __name__ == "__main__" else "nvidia"
os.environ["TRITON_DIST_BACKEND"] = TARGET
CACHE = tempfile.TemporaryDirectory(prefix="triton_dist_lowering_")  # no stale result passes a test; gone at exit
os.environ["TRITON_CACHE_DIR"] = CACHE.name
warnings.simplefilter("ignore")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import triton_dist.language as dl  # noqa: E402

CASES = {}
COPY_DTYPES = ("fp32", "fp16", "bf16", "fp8e5", "fp8e4nv", "i8", "i16", "i32", "i64")
COMPARES = ("ge", "gt", "eq", "ne", "le", "lt")
ATOMICS = ("add", "max", "min", "xchg")


def case(name, signature, arch=90, targets=("nvidia",), aligned=(), debug=False, **constexprs):
    """Registers a kernel; `signature` is "name: type, ...". Pointers and arguments in `aligned` are divisible by 16."""

    def register(fn):
        kinds = dict(item.split(": ") for item in signature.split(", "))
        if TARGET in targets:
            CASES[name] = (fn, kinds, arch, aligned, debug, constexprs)
        return fn

    return register


# -- memory


@triton.jit
def put(dst, src, ctx, peer, n, BLOCK: tl.constexpr):
    dl.put(dst, src, n, peer, ctx, tl.program_id(0), tl.num_programs(0), BLOCK)


@triton.jit
def get(dst, src, ctx, peer, n, BLOCK: tl.constexpr):
    dl.get(dst, src, n, peer, ctx, pid=tl.program_id(0), num_pids=tl.num_programs(0), BLOCK=BLOCK)


for t in COPY_DTYPES:
    block = 2048 if t in ("i8", "fp8e5", "fp8e4nv") else 1024  # 16 bytes for each of 128 threads
    for word in (put, get):
        case(f"{word.__name__} {t}", f"dst: *{t}, src: *{t}, ctx: *i64, peer: i32, n: i32", BLOCK=block)(word)
case("put n of int64", "dst: *fp16, src: *fp16, ctx: *i64, peer: i32, n: i64", BLOCK=1024)(put)
case("put in debug mode", "dst: *fp16, src: *fp16, ctx: *i64, peer: i32, n: i32", debug=True, BLOCK=1024)(put)
case("put bool", "dst: *i1, src: *i1, ctx: *i64, peer: i32, n: i32", BLOCK=1024)(put)


@case("put defaults", "dst: *fp16, src: *fp16, ctx: *i64")
@triton.jit
def put_defaults(dst, src, ctx):
    dl.put(dst, src, 5000, 1, ctx)


REGION = "dst: *fp16, src: *fp16, ctx: *i64, peer: i64, rows: i32, cols: i32, dst_stride: i32, src_stride: i32"


@case("put_2d", REGION, aligned=("dst_stride", "src_stride"))
@case("put_2d unaligned", REGION)
@triton.jit
def put_2d(dst, src, ctx, peer, rows, cols, dst_stride, src_stride):
    dl.put_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, tl.program_id(0), tl.num_programs(0))


@case("get_2d", REGION, aligned=("dst_stride", "src_stride"))
@triton.jit
def get_2d(dst, src, ctx, peer, rows, cols, dst_stride, src_stride):
    dl.get_2d(dst, src, rows, cols, dst_stride, src_stride, peer, ctx, BLOCK_M=8, BLOCK_N=512)


@case("remote_load", "x: *fp16, out: *fp16, ctx: *i64, peer: i32, n: i32", aligned=("n",))
@triton.jit
def remote_load(x, out, ctx, peer, n):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out + i, dl.remote_load(x + i, peer, ctx, mask=i < n, other=0.0), mask=i < n)


@case("remote_store", "x: *fp16, out: *fp16, ctx: *i64, peer: i32, n: i32", aligned=("n",))
@triton.jit
def remote_store(x, out, ctx, peer, n):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    dl.remote_store(out + i, tl.load(x + i, mask=i < n), peer, ctx, i < n)


@triton.jit
def store_relaxed(x, out, ctx, peer, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if KIND == "loaded":
        dl.remote_store(out + i, tl.load(x + i, mask=i < n), peer, ctx, mask=i < n, sem="relaxed")
    elif KIND == "computed":
        dl.remote_store(out + i, i, peer, ctx, sem="relaxed")
    elif KIND == "summed":  # its layout has every element in many threads
        rows = tl.load(x + i[:, None] * 32 + tl.arange(0, 32)[None, :])
        dl.remote_store(out + i, tl.sum(rows, 1), peer, ctx, mask=i < n, sem="relaxed")
    elif KIND == "of a product":
        lanes = tl.arange(0, 64)
        square = tl.load(x + lanes[:, None] * 64 + lanes[None, :]).to(tl.float16)
        row = tl.max(tl.dot(square, square), 0)
        dl.remote_store(out + lanes, row.to(x.dtype.element_ty), peer, ctx, sem="relaxed")
        half = tl.max(tl.join(tl.load(x + i), tl.load(x + i + 1)), 1)
        dl.remote_store(out + i, half, peer, ctx, sem="relaxed")
    elif KIND == "scalar":
        dl.remote_store(out, n, peer, ctx, sem="relaxed")
    else:
        rows, columns = tl.arange(0, 16), tl.arange(0, BLOCK // 16)
        square = rows[:, None] * (BLOCK // 16) + columns[None, :]
        dl.remote_store(out + square, square, peer, ctx, mask=square < n, sem="relaxed")


for t in ("i32", "fp32", "i64", "fp64"):
    for kind in ("loaded", "computed", "summed", "of a product", "scalar", "rows"):
        words = f"x: *{t}, out: *{t}, ctx: *i64, peer: i32, n: i32"
        case(f"store_relaxed {kind} {t}", words, KIND=kind, BLOCK=512 if t[-2:] == "32" else 256)(store_relaxed)
    case(f"store_relaxed few {t}", words, KIND="loaded", BLOCK=32)(store_relaxed)


@case("refused remote_store relaxed fp16", "x: *fp16, ctx: *i64")
@case("refused remote_store relaxed i32 on ascend", "x: *i32, ctx: *i64", targets=("ascend",))
@triton.jit
def relaxed_refused(x, ctx):
    dl.remote_store(x + tl.arange(0, 512), 0, 1, ctx, sem="relaxed")


@case("refused remote_store release", "x: *i32, ctx: *i64")
@triton.jit
def store_released(x, ctx):
    dl.remote_store(x + tl.arange(0, 512), 0, 1, ctx, sem="release")


@case("symm_at descriptor", "x: *fp16, out: *fp16, ctx: *i64, peer: i32, v: i32, sig: *i32")
@triton.jit
def symm_at_descriptor(x, out, ctx, peer, v, sig):
    theirs = tl.make_tensor_descriptor(dl.symm_at(x, peer, ctx), [128, 64], [64, 1], [64, 64])
    mine = tl.make_tensor_descriptor(dl.symm_at(out, peer, ctx), [128, 64], [64, 1], [64, 64])
    dl.wait(sig, v, ctx)
    mine.store([0, 0], theirs.load([64, 0]))
    dl.notify(sig, peer, ctx, v)


# -- signals


@triton.jit
def notify(x, sig, ctx, peer, v, OP: tl.constexpr):
    i = tl.arange(0, 1024)
    dl.remote_store(x + i, i, peer, ctx)
    dl.notify(sig, peer, ctx, v, OP)


@triton.jit
def notify_default(x, sig, ctx, peer):
    i = tl.arange(0, 1024)
    dl.remote_store(x + i, i, peer, ctx)
    dl.notify(sig, peer, ctx)


for t in ("i32", "i64"):
    for op in ("set", "add"):
        case(f"notify {op} {t}", f"x: *i32, sig: *{t}, ctx: *i64, peer: i32, v: i32", OP=op)(notify)
case("notify default", "x: *i32, sig: *i32, ctx: *i64, peer: i32", targets=("nvidia", "ascend"))(notify_default)
case("notify before sm_90", "x: *i32, sig: *i32, ctx: *i64, peer: i32", arch=80)(notify_default)


@triton.jit
def wait(x, sig, ctx, v, out, CMP: tl.constexpr):
    i = tl.arange(0, 1024)
    token = dl.wait(sig, v, ctx, CMP)
    tl.store(out + i, tl.load(dl.consume_token(x, token) + i) + token)


@triton.jit
def wait_default(x, sig, ctx, v, out):
    i = tl.arange(0, 1024)
    token = dl.wait(dl.signal_at(sig, 3), v, ctx)
    tl.store(out + i, tl.load(dl.consume_token(x, token) + i) + token)


@case("wait written out", "x: *i32, sig: *i32, ctx: *i64, v: i32, out: *i32")
@triton.jit
def wait_written_out(x, sig, ctx, v, out):
    i = tl.arange(0, 1024)
    token = dl.target.spin(sig, v, "ge")
    dl.target.acquired()
    tl.store(out + i, tl.load(x + i) + token)


for compare in COMPARES:
    case(f"wait {compare}", "x: *i32, sig: *i32, ctx: *i64, v: i32, out: *i32", CMP=compare)(wait)
case("wait i64", "x: *i64, sig: *i64, ctx: *i64, v: i32, out: *i64", CMP="ge")(wait)
case("wait default", "x: *i32, sig: *i32, ctx: *i64, v: i32, out: *i32", targets=("nvidia", "ascend"))(wait_default)
case("wait before sm_90", "x: *i32, sig: *i32, ctx: *i64, v: i32, out: *i32", arch=80)(wait_default)


@case("wait n", "x: *i32, sig: *i32, ctx: *i64, v: i32, n: i32, out: *i32", targets=("nvidia", "ascend"))
@triton.jit
def wait_n(x, sig, ctx, v, n, out):
    i = tl.arange(0, 1024)
    token = dl.wait(sig, v, ctx, n=n)
    token += dl.wait(sig, v, ctx, n=3)
    tl.store(out + i, tl.load(x + i) + token)


@case("test", "x: *i32, sig: *i32, ctx: *i64, v: i32, out: *i32", targets=("nvidia", "ascend"))
@triton.jit
def test(x, sig, ctx, v, out):
    i = tl.arange(0, 1024)
    if dl.test(sig, v, ctx):
        tl.store(out + i, tl.load(x + i))


@case("put_signal", "dst: *fp16, src: *fp16, sig: *i32, ctx: *i64, peer: i32, n: i32", targets=("nvidia", "ascend"))
@triton.jit
def put_signal(dst, src, sig, ctx, peer, n):
    pid = tl.program_id(0)
    dl.put_signal(dst, src, n, sig, peer, ctx, op="add", pid=pid, num_pids=tl.num_programs(0))


@case("notify_all", "sig: *i32, ctx: *i64, v: i32", targets=("nvidia", "ascend"))
@triton.jit
def notify_all(sig, ctx, v):
    dl.notify_all(sig, ctx, v)


@case("fence", "x: *i32, ctx: *i64")
@triton.jit
def fence(x, ctx):
    i = tl.arange(0, 1024)
    tl.store(x + i, i)
    dl.fence(ctx)
    tl.store(x + 1024 + i, i)


@case("quiet", "x: *i32, ctx: *i64")
@triton.jit
def quiet(x, ctx):
    i = tl.arange(0, 1024)
    tl.store(x + i, i)
    dl.quiet(ctx)
    tl.store(x + 1024 + i, i)


# -- atomics


@triton.jit
def atomic(p, ctx, peer, v, out, OP: tl.constexpr):
    i = tl.arange(0, 128)
    if OP == "add":
        old = dl.atomic_add(p + i, v, peer, ctx, mask=i < 100)
    elif OP == "max":
        old = dl.atomic_max(p + i, v, peer, ctx, mask=i < 100)
    elif OP == "min":
        old = dl.atomic_min(p + i, v, peer, ctx, mask=i < 100)
    else:
        old = dl.atomic_xchg(p + i, v, peer, ctx, mask=i < 100)
    tl.store(out + i, old)


@triton.jit
def atomic_cas(p, ctx, peer, v, out):
    tl.store(out, dl.atomic_cas(p, 0, v, peer, ctx))


@case("atomic cas block", "p: *i64, ctx: *i64, peer: i32, v: i32, out: *i64")
@triton.jit
def atomic_cas_block(p, ctx, peer, v, out):
    i = tl.arange(0, 128)
    tl.store(out + i, dl.atomic_cas(p + i, 0, v, peer, ctx))


@case("atomic scalar", "p: *i32, ctx: *i64, peer: i32")
@triton.jit
def atomic_scalar(p, ctx, peer):
    dl.atomic_add(p, 1, peer, ctx)


for t in ("i32", "i64", "u32", "u64", "fp32", "fp64"):
    for op in ATOMICS:
        case(f"atomic {op} {t}", f"p: *{t}, ctx: *i64, peer: i32, v: {t}, out: *{t}", OP=op)(atomic)
for t in ("i32", "i64", "u32", "u64"):
    case(f"atomic cas {t}", f"p: *{t}, ctx: *i64, peer: i32, v: {t}, out: *{t}")(atomic_cas)


# -- barriers and tile order


@triton.jit
def barrier_all(sig, ctx):
    for _ in range(3):
        dl.barrier_all(sig, ctx)


@triton.jit
def barrier_clear(sig, ctx):
    dl.barrier_clear(sig, ctx)


@triton.jit
def barrier_grid(sig, ctx):
    dl.barrier_grid(sig, ctx)


for t in ("i32", "i64"):
    case(f"barrier_all {t}", f"sig: *{t}, ctx: *i64", targets=("nvidia", "ascend"))(barrier_all)
    for word in (barrier_clear, barrier_grid):
        where = ("nvidia", "ascend") if t == "i32" else ("nvidia",)
        case(f"{word.__name__} {t}", f"sig: *{t}, ctx: *i64", targets=where)(word)


@case("tile order", "out: *i32, ctx: *i64, m: i32, n: i32", targets=("nvidia", "ascend"))
@triton.jit
def tile_order(out, ctx, m, n):
    owner, i, j = dl.rank_first_tile(tl.program_id(0), m, n, dl.rank(ctx), dl.num_ranks(ctx), 4)
    tl.store(out, owner)
    tl.store(out + 1, i)
    tl.store(out + 2, j)


# -- what must be refused


@triton.jit
def wait_unknown(sig, ctx):
    dl.wait(sig, 1, ctx, cmp="above")


@triton.jit
def notify_unknown(sig, ctx):
    dl.notify(sig, 1, ctx, op="sub")


@triton.jit
def notify_add(sig, ctx):
    dl.notify(sig, 1, ctx, op="add")


@triton.jit
def notify_only(sig, ctx):
    dl.notify(sig, 1, ctx)


@triton.jit
def wait_only(sig, ctx):
    dl.wait(sig, 1, ctx)


@triton.jit
def test_only(sig, ctx, out):
    tl.store(out, dl.test(sig, 1, ctx).to(tl.int32))


case("refused cmp", "sig: *i32, ctx: *i64")(wait_unknown)
case("refused op", "sig: *i32, ctx: *i64")(notify_unknown)
case("refused ctx", "sig: *i32, ctx: *i32")(notify_only)
for t in ("fp32", "i8", "i16", "u32", "u64", "fp64"):
    case(f"refused notify {t}", f"sig: *{t}, ctx: *i64")(notify_only)
    case(f"refused wait {t}", f"sig: *{t}, ctx: *i64")(wait_only)
case("refused test fp32", "sig: *fp32, ctx: *i64, out: *i32")(test_only)
for t in ("fp16", "bf16", "i8", "i16"):
    for op in ATOMICS:
        case(f"refused atomic {op} {t}", f"p: *{t}, ctx: *i64, peer: i32, v: {t}, out: *{t}", OP=op)(atomic)
case("refused atomic cas fp32", "p: *fp32, ctx: *i64, peer: i32, v: fp32, out: *fp32")(atomic_cas)
case("refused put of two dtypes", "dst: *fp16, src: *bf16, ctx: *i64, peer: i32, n: i32", BLOCK=1024)(put)

for t, op in (("i32", "xchg"), ("i64", "add"), ("fp64", "add"), ("u32", "max"), ("i64", "min"), ("i32", "add")):
    signature = f"p: *{t}, ctx: *i64, peer: i32, v: {t}, out: *{t}"
    case(f"refused atomic {op} {t} on ascend", signature, targets=("ascend",), OP=op)(atomic)
case("refused cas on ascend", "p: *i32, ctx: *i64, peer: i32, v: i32, out: *i32", targets=("ascend",))(atomic_cas)
case("refused add i64 on ascend", "sig: *i64, ctx: *i64", targets=("ascend",))(notify_add)
case("atomic scalar on ascend", "p: *i32, ctx: *i64, peer: i32", targets=("ascend",))(atomic_scalar)


# -- compiling


class Driver:
    """Stands in for a driver: which GPU the kernels run on is all that Triton asks of it while compiling."""

    arch = 90

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


def compile_case(fn, kinds, arch, aligned, debug, constexprs):
    Driver.arch = arch
    signature = {**kinds, **dict.fromkeys(constexprs, "constexpr")}
    names = list(signature)
    hinted = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in aligned]
    attrs = {(i,): [["tt.divisibility", 16]] for i in hinted}
    source = ASTSource(fn, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"debug": debug}).asm["ptx"]


def causes(error):
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def main(out, *names):
    triton.runtime.driver.set_active(Driver())
    results = {}
    for name in names or CASES:
        try:
            results[name] = {"ptx": compile_case(*CASES[name])}
        except Exception as error:
            results[name] = {"error": "\n".join(causes(error))}
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[2:])
