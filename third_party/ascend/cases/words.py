"""Every word of the device language: what lowers, and what Ascend refuses by name."""

from . import Case, types

_KERNELS = "third_party/ascend/cases/word_kernels.py"
_COPY_DTYPES = ("fp32", "fp16", "bf16", "i8", "i16", "i32", "i64")  # no fp8: see `refused` below
_COMPARES = ("ge", "gt", "eq", "ne", "le", "lt")
CASES = []


def _case(name, signature, refused=None, kernel=None, **constants):
    kernel = kernel or name.split()[0]
    CASES.append(Case(name, f"{_KERNELS}:{kernel}", types(signature), constants, refused))


_case("rank num_ranks", "out: *i32, ctx: *i64", kernel="rank")
for t in _COPY_DTYPES:
    block = 2048 if t == "i8" else 1024
    _case(f"put {t}", f"dst: *{t}, src: *{t}, n: i32, peer: i32, ctx: *i64", BLOCK=block)
    _case(f"get {t}", f"dst: *{t}, src: *{t}, n: i32, peer: i32, ctx: *i64", BLOCK=block)
_case("put n of int64", "dst: *fp16, src: *fp16, n: i64, peer: i32, ctx: *i64", BLOCK=1024)
for word in ("put_2d", "get_2d"):
    region = "rows: i32, cols: i32, dst_stride: i32, src_stride: i32, peer: i32, ctx: *i64"
    _case(word, f"dst: *fp16, src: *fp16, {region}")
_case("remote_load", "x: *fp16, out: *fp16, n: i32, peer: i32, ctx: *i64", BLOCK=1024)
_case("remote_store", "x: *fp16, out: *fp16, n: i32, peer: i32, ctx: *i64", BLOCK=1024)
_case("symm_at_block_pointer", "x: *fp16, out: *fp16, M: i32, N: i32, peer: i32, ctx: *i64", BLOCK_M=32, BLOCK_N=64)
_case("put constant peer", "dst: *fp16, src: *fp16, n: i32, ctx: *i64", peer=1, BLOCK=1024)
_case("put one element", "dst: *fp16, src: *fp16, peer: i32, ctx: *i64", n=1, BLOCK=1024)
_case("symm_at_peers", "x: *fp16, out: *fp16, ctx: *i64", BLOCK=64)

for t in ("i32", "i64"):
    no_add = None if t == "i32" else "no 64-bit atomics"
    _case(f"notify set {t}", f"x: *i32, sig: *{t}, v: i32, peer: i32, ctx: *i64", OP="set")
    _case(f"notify add {t}", f"x: *i32, sig: *{t}, v: i32, peer: i32, ctx: *i64", no_add, OP="add")
    _case(f"notify_all set {t}", f"x: *i32, sig: *{t}, v: i32, ctx: *i64", OP="set")
    _case(f"notify_all add {t}", f"x: *i32, sig: *{t}, v: i32, ctx: *i64", no_add, OP="add")
    _case(f"put_signal set {t}", f"dst: *fp16, src: *fp16, sig: *{t}, n: i32, peer: i32, ctx: *i64", OP="set")
    _case(f"put_signal add {t}", f"dst: *fp16, src: *fp16, sig: *{t}, n: i32, peer: i32, ctx: *i64", no_add, OP="add")
    for compare in _COMPARES:
        _case(f"wait {compare} {t}", f"x: *{t}, out: *{t}, sig: *{t}, v: i32, ctx: *i64", CMP=compare)
    _case(f"wait_many {t}", f"x: *{t}, out: *{t}, sig: *{t}, v: i32, n: i32, ctx: *i64")
    _case(f"test {t}", f"x: *{t}, out: *{t}, sig: *{t}, v: i32, ctx: *i64")
    _case(f"barrier_all {t}", f"sig: *{t}, ctx: *i64")
    _case(f"barrier_clear {t}", f"sig: *{t}, ctx: *i64", no_add)
    _case(f"barrier_grid {t}", f"sig: *{t}, ctx: *i64", no_add)
_case("notify constant peer", "x: *i32, sig: *i32, v: i32, ctx: *i64", peer=1, OP="set")
_case("notify_default", "x: *i32, sig: *i32, peer: i32, ctx: *i64")
_case("wait_unused", "x: *i32, out: *i32, sig: *i32, v: i32, ctx: *i64")
_case("wait_in_if", "x: *i32, out: *i32, sig: *i32, v: i32, ctx: *i64")
_case("fence", "x: *i32, ctx: *i64")
_case("quiet", "x: *i32, ctx: *i64")
_case("fence_dot", "a: *fp16, b: *fp16, c: *fp32, sig: *i32, peer: i32, ctx: *i64, K: i32", BLOCK=64)

for t in ("i32", "u32", "fp32"):
    for op in ("add", "max", "min"):
        refused = f"atomic_{op} is not available for dtype uint32" if t == "u32" and op != "add" else None
        _case(f"atomic {op} {t}", f"p: *{t}, v: {t}, peer: i32, ctx: *i64", refused, OP=op)
        _case(f"atomic_scalar {op} {t}", f"p: *{t}, v: {t}, peer: i32, ctx: *i64", refused, OP=op)
_case("tile_order", "out: *i32, m: i32, n: i32, ctx: *i64")

_case("atomic constant peer", "p: *i32, v: i32, ctx: *i64", peer=1, OP="add")

# What Ascend, or any target, refuses by name.
_ATOMIC = "p: *{0}, v: {0}, peer: i32, ctx: *i64"
for t in ("i64", "u64", "fp64"):
    for op in ("add", "max", "min"):
        _case(f"atomic {op} {t}", _ATOMIC.format(t), f"dl.atomic_{op}: the target ascend has no 64-bit atomics", OP=op)
for t in ("i8", "i16", "fp16", "bf16"):
    for op in ("add", "max", "min", "xchg"):
        _case(f"atomic {op} {t}", _ATOMIC.format(t), f"dl.atomic_{op} is not available for dtype", OP=op)
_case("atomic xchg i32", _ATOMIC.format("i32"), "dl.atomic_xchg is not available on the target ascend", OP="xchg")
_case("atomic_cas i32", _ATOMIC.format("i32"), "dl.atomic_cas is not available on the target ascend")
_case("atomic_old i32", "p: *i32, out: *i32, v: i32, peer: i32, ctx: *i64", "")
for t in ("fp32", "i8", "i16", "u32", "u64"):
    _case(f"notify_plain {t}", f"sig: *{t}, ctx: *i64", "a signal is an int32 or int64 cell", OP="set")
    _case(f"wait_plain {t}", f"sig: *{t}, ctx: *i64", "a signal is an int32 or int64 cell")
_case("notify_plain ctx i32", "sig: *i32, ctx: *i32", "ctx is the int64 context table", OP="set")
_case("notify_unknown", "sig: *i32, ctx: *i64", 'op is "set" or "add", not "sub"')
_case("wait_unknown", "sig: *i32, ctx: *i64", 'not "above"')
_case("store_relaxed i32", "x: *i32, ctx: *i64", 'sem="relaxed" is not available on the target ascend')
_case("store_relaxed i16", "x: *i16, ctx: *i64", 'sem="relaxed" stores elements of 32 or 64 bits, not')
_case("put of two dtypes", "dst: *fp16, src: *bf16, n: i32, peer: i32, ctx: *i64", "must have the same dtype", BLOCK=1024)
