"""All-to-all and its relatives, and the two operators of mixtures of experts."""

from . import Case, types

CASES = []


def _case(name, source, signature, refused=None, **constants):
    CASES.append(Case(name, f"triton_dist/kernels/{source}", types(signature), constants, refused))


for t, size in (("i8", 1), ("i16", 2), ("i32", 4), ("i64", 8)):
    block = 16384 // size
    signals = "counts: *i32, ready: *i32, epochs: *i32, status: *i32"
    _case(
        f"all_to_all {t}", "all_to_all.py:all_to_all_kernel",
        f"x: *{t}, out: *{t}, staging: *{t}, {signals}, rows: i32, row: i32, max_rows: i32, ctx: *i64",
        LANES=16, BLOCK=block,
    )  # fmt: skip
    for counts in ("i32", "i64") if t == "i16" else ("i32",):
        _case(
            f"all_to_all_v {t} counts {counts}", "all_to_all.py:all_to_all_v_kernel",
            f"x: *{t}, send_counts: *{counts}, out: *{t}, received: *i32, staging: *{t}, counts: *i32, counted: *i32, "
            "ready: *i32, epochs: *i32, status: *i32, x_rows: i32, row: i32, max_rows: i32, ctx: *i64",
            LANES=16, BLOCK=block,
        )  # fmt: skip
    tiles = dict(BLOCK_M=32, BLOCK_N=512 // size)
    for reverse in (False, True):
        _case(
            f"{'reverse' if reverse else 'transpose'}_all_to_all {t}", "sequence_all_to_all.py:sequence_all_to_all_kernel",
            f"x: *{t}, out: *{t}, staging: *{t}, ready: *i32, epochs: *i32, offsets: *i32, cols: i32, slot: i32, "
            "x_stride: i32, out_stride: i32, ctx: *i64",
            REVERSE=reverse, **tiles,
        )  # fmt: skip
    _case(
        f"qkv_all_to_all {t}", "qkv_all_to_all.py:qkv_all_to_all_kernel",
        f"q: *{t}, k: *{t}, v: *{t}, out_q: *{t}, out_k: *{t}, out_v: *{t}, staging: *{t}, ready: *i32, epochs: *i32, "
        "offsets: *i32, cols_q: i32, cols_kv: i32, copies: i32, longest: i32, slot: i32, q_stride: i32, k_stride: i32, "
        "v_stride: i32, out_q_stride: i32, out_k_stride: i32, out_v_stride: i32, ctx: *i64",
        **tiles,
    )  # fmt: skip



def _dispatch(name, t, payload, ids="i32", refused=None, tokens=False):
    """tokens: of the layout tokens, where an index is written for the rows."""
    if tokens:
        written, block, others = "index: *i32", 128, dict(out=None, out_scales=None)
    else:
        written, block, others = f"out: *{payload}, out_scales: *fp32", 8, dict(index=None)
    _case(
        f"moe_dispatch {name}", "moe_dispatch_gather.py:moe_dispatch_kernel",
        f"x: *{t}, ids: *{ids}, owners: *i32, first_expert: *i32, {written}, out_counts: *i32, "
        "number: *i32, out_origin: *i32, out_rows: *i32, totals: *i32, "
        f"inbox: *{payload}, scales: *fp32, source: *i32, origin: *i32, counts: *i32, arrived: *i32, counted: *i32, "
        "filled: *i32, place: *i32, partial: *i32, base: *i32, epochs: *i32, "
        "T: i32, H: i32, topk: i32, E: i32, max_tokens: i32, max_received: i32, max_rows: i32, stride_x: i32, "
        "stride_t: i32, ctx: *i64",
        refused, stride_k=1, BLOCK_T=8, BLOCK_R=block, BLOCK_H=512, K_PAD=8, COLUMNS=128, FP8=payload != t, **others,
    )  # fmt: skip


for t in ("fp16", "bf16", "fp32"):
    for ids in ("i32", "i64") if t == "bf16" else ("i32",):
        _dispatch(f"{t} ids {ids}", t, t, ids)
    _case(
        f"moe_combine {t}", "moe_combine.py:moe_combine_kernel",
        f"y: *{t}, weights: *fp32, out: *{t}, origin: *i32, number: *i32, rows: *i32, returned: *{t}, filled: *i32, "
        "read: *i32, epochs: *i32, T: i32, H: i32, max_tokens: i32, stride_y: i32, stride_wt: i32, "
        "stride_out: i32, ctx: *i64",
        stride_wk=1, BLOCK_T=8, BLOCK_H=512, TOPK=8,
    )  # fmt: skip
_dispatch("bf16 tokens", "bf16", "bf16", tokens=True)
_dispatch("bf16 as fp8", "bf16", "fp8e4nv", refused="fp8")
