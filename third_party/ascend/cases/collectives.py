"""The collectives: `triton_dist.kernels.channels` and what is built on it."""

from . import Case, types

CHANNELS = 20
CASES = [
    Case("barrier", "triton_dist/kernels/barrier.py:barrier_kernel", types("signals: *i32, ctx: *i64")),
]


def _case(name, source, signature, itemsize, world=4, **constants):
    block = 8192 // itemsize
    constants = {"CHANNELS": CHANNELS, "WORLD": world, "BLOCK": block, **constants}
    CASES.append(Case(name, f"triton_dist/kernels/{source}", types(signature), constants))


for t, size in (("i8", 1), ("i16", 2), ("i32", 4), ("i64", 8)):
    data = f"x: *{t}, out: *{t}, staging: *{t}, ready: *i32"
    _case(f"all_gather {t}", "all_gather.py:all_gather_kernel", f"{data}, epochs: *i32, n: i32, slot: i32, ctx: *i64", size)
    _case(
        f"broadcast {t}", "broadcast.py:broadcast_kernel",
        f"{data}, done: *i32, epochs: *i32, n: i32, slot: i32, root: i32, ctx: *i64", size,
    )  # fmt: skip

for t, size in (("fp16", 2), ("bf16", 2), ("fp32", 4), ("i32", 4), ("i64", 8)):
    sums = "fp32" if size == 2 else t
    for op in ("sum", "max", "min", "prod") if t in ("fp16", "i32") else ("sum", "max"):
        sizes = "epochs: *i32, n: i32, slot: i32, ctx: *i64"
        shares = "epochs: *i32, n: i32, share: i32, slot: i32, ctx: *i64"
        data = f"x: *{t}, out: *{t}, staging: *{t}, ready: *i32, {sizes}"
        _case(f"reduce_scatter {op} {t}", "reduce_scatter.py:reduce_scatter_kernel", data, size, OP=op)
        _case(f"all_reduce mesh {op} {t}", "all_reduce.py:mesh_kernel", data, size, OP=op)
        _case(
            f"all_reduce two_shot {op} {t}", "all_reduce.py:two_shot_kernel",
            f"x: *{t}, out: *{t}, parts: *{t}, results: *{t}, ready: *i32, handed: *i32, {shares}", size, OP=op,
        )  # fmt: skip
        _case(
            f"all_reduce ring {op} {t}", "all_reduce.py:ring_kernel",
            f"x: *{t}, out: *{t}, sums: *{sums}, results: *{t}, arrived: *i32, {shares}", size, OP=op,
        )  # fmt: skip
