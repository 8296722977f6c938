"""Lowers the kernels of ascend_kernels.py with the Ascend toolchain, from the main environment."""

import functools
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(ROOT))

from third_party.ascend import pool  # noqa: E402
from third_party.ascend.cases import Case, types  # noqa: E402
from third_party.ascend.checks import run_checks  # noqa: E402

sys.path.remove(str(ROOT))

PUT = "dst: *fp16, src: *fp16, sig: *i32, n: i32, peer: i32, ctx: *i64"
PEER = "x: *fp16, out: *fp16, peer: i32, ctx: *i64"
GEMM = "a: *fp16, b: *fp16, c: *fp16, sig: *i32, tiles: i32, N: i32, K: i32, peer: i32, ctx: *i64"
COUNT = "count: *i32, sig: *i32, n: i32, peer: i32, ctx: *i64"
SPIN = "sig: *i32, v: i32, out: *i32"
INTEGERS = "dst: *fp16, src: *fp16, bases: *i64, peer: i32"

# kernel: (signature, constants); "kernel of dtype" is the kernel with another signature
KERNELS = {
    "put_then_set": ("dst: *fp16, src: *fp16, sig: *i32, n: i32, peer: i32, other: i32, ctx: *i64", {}),
    **dict.fromkeys(
        (
            "put_then_add", "put_then_atomic_without_barrier", "put_then_store_without_barrier", "barrier_on_one_path",
            "barrier_before_the_last_turn", "put_then_add_relaxed_without_barrier", "put_then_set_eight_without_barrier",
        ),
        (PUT, {}),
    ),
    "wait_then_read": ("x: *i32, sig: *i32, v: i32, out: *i32, ctx: *i64", {}),
    "bare_wait_in_an_if": ("x: *i32, sig: *i32, v: i32, out: *i32, ctx: *i64", {}),
    "wait_for_many": ("x: *i32, sig: *i32, v: i32, n: i32, out: *i32, ctx: *i64", {}),
    **dict.fromkeys(
        (
            "read_peer", "read_own", "store_every_third_lane", "store_every_third_lane_here", "store_a_range_of_lanes",
            "update_a_range_of_lanes", "update_every_third_lane", "update_lanes_that_another_tensor_names",
        ),
        (PEER, {}),
    ),
    **dict.fromkeys(
        (
            "gemm_then_set", "wait_then_gemm", "gemm_then_set_unfenced", "gemm_then_add", "wait_then_gemm_in_a_for",
            "gemm_then_set_in_a_for", "gemm_with_a_flag_of_the_compiler", "gemm_then_set_sixteen",
        ),
        (GEMM, {"BLOCK": 64}),
    ),
    "add_a_product": (GEMM.replace("c: *fp16", "c: *fp32"), {"BLOCK": 64}),
    **dict.fromkeys(("spin_on_a_scalar", "spin_on_a_scalar_with_barrier", "spin_on_an_atomic"), (SPIN, {})),
    "exchange_a_scalar": ("p: *i32, v: i32", {}),
    "compare_and_swap": ("p: *i32, v: i32, out: *i32", {}),
    "add_and_use_the_old_value": ("p: *i32, v: i32, out: *i32", {}),
    "add": ("p: *i32, v: i32", {}),
    "add of i64": ("p: *i64, v: i64", {}),
    "bitwise_or": ("p: *i32, v: i32", {}),
    "bare_atomic_in_an_if": ("p: *i32, v: i32, peer: i32, ctx: *i64", {}),
    **dict.fromkeys(("counts_then_set", "count_then_set_without_barrier"), (COUNT, {})),
    **dict.fromkeys(
        (
            "block_of_integers_as_pointers", "block_pointer_on_an_integer", "offset_then_address_as_integer",
            "address_as_integer_then_offset",
        ),
        (INTEGERS, {}),
    ),
    "pointer_chosen_in_an_if": ("x: *fp16, y: *fp16, out: *fp16, n: i32", {}),
}  # fmt: skip


@functools.cache
def lowered():
    """{kernel: what it was lowered to}: stage, log, ttir, ttadapter, hivm (None where not reached). Once a process."""
    path = (HERE / "ascend_kernels.py").relative_to(ROOT)
    cases = [
        Case(name, f"{path}:{name.split()[0]}", types(signature), constants)
        for name, (signature, constants) in KERNELS.items()
    ]
    out = {}
    with tempfile.TemporaryDirectory(prefix="triton_dist_checks_") as folder:
        for result in pool.run(cases, emit=folder):
            assert not result.error, f"{result.case.name}: {result.error}"
            texts = {Path(path).suffixes[-2][1:]: Path(path).read_text() for path in result.emitted}
            out[result.case.name] = SimpleNamespace(
                name=result.case.name, stage=result.stage, log=result.log, checks=result.checks,
                **{stage: texts.get(stage) for stage in ("ttir", "ttadapter", "hivm")},
            )  # fmt: skip
    return out


def checks(kernel, hivm=None, ttir=None):
    """{check: Check} of a lowered kernel; with another text in place of its HIVM or TTIR."""
    found = lowered()[kernel]
    assert found.hivm, f"{kernel} ended after {found.stage}: {found.log[-2000:]}"
    texts = SimpleNamespace(ttir=ttir or found.ttir, hivm=hivm or found.hivm)
    return {check.name: check for check in run_checks(texts)}


def failed(kernel, hivm=None, ttir=None):
    return {name for name, check in checks(kernel, hivm, ttir).items() if check.passed is False}
