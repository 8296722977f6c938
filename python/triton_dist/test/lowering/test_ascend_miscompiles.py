"""What the Ascend compiler gets wrong today, by name. Rules of this library rest on it (see language/target/ascend.py).

A test here fails when a new version of the toolchain gets the thing right. Then, as its message says: confirm it on a
device or on the host, lift the rule, and take the entry out.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ascend_cases import checks, lowered  # noqa: E402

sys.path.pop(0)

from third_party.ascend.checks import kernels  # noqa: E402  # found by ascend_cases
from third_party.ascend.toolchain import PACKAGES  # noqa: E402


@dataclass(frozen=True)
class Miscompile:
    """kernel: of ascend_kernels.py. what: the sentence that is true today. rule: what this library does about it. check: the
    meaning check that says so, with the words of its reason; or crash: a part of the compiler's last words."""

    kernel: str
    what: str
    rule: str
    check: str = ""
    words: str = ""
    crash: str = ""


MISCOMPILES = [
    Miscompile(
        "spin_on_a_scalar", "a loop that polls by a volatile scalar load is deleted",
        "dl.wait polls by a block of one", "waits", "have vanished",
    ),
    Miscompile(
        "spin_on_a_scalar_with_barrier", "a scalar poll goes through a cache that nothing refreshes",
        "dl.wait polls by a block of one", "waits", "a scalar load through a cache",
    ),
    Miscompile(
        "spin_on_an_atomic", "a poll by an atomic holds a lock all the while, so that nobody else can signal",
        "dl.wait does not poll by an atomic", "waits", "holds the lock",
    ),
    Miscompile(
        "wait_then_gemm_in_a_for", "when a for over `wait for many, then tiles` is pipelined, the cube half does not wait",
        "operators wait in a while loop", "waits", "loops that follow the vector half's",
    ),
    Miscompile(
        "bare_wait_in_an_if", "a call whose result is unused, in an if, crashes the front end",
        "tokens of dl.wait are assigned (its docstring)", crash="Cannot destroy a value that still has uses",
    ),
    Miscompile(
        "bare_atomic_in_an_if", "so does an atomic whose result is unused, in an if",
        "atomics that depend on something are masked", crash="Cannot destroy a value that still has uses",
    ),
    Miscompile(
        "exchange_a_scalar", "the store of a scalar exchange is deleted",
        "dl.atomic_xchg is refused, dl.notify sets by a store", "complete", "are not in HIVM",
    ),
    Miscompile(
        "compare_and_swap", "a compare-and-swap is made under a lock of one launch",
        "dl.atomic_cas is refused", "atomics", "no atomic store of the hardware",
    ),
    Miscompile(
        "add_and_use_the_old_value", "the old value of an atomic is a separate load",
        "atomics of dl return nothing on ascend", "atomics", "the old value",
    ),
    Miscompile(
        "add of i64", "a 64-bit atomic is a load, an add and a store under a lock of one launch",
        "64-bit atomics are refused", "atomics", "under a lock",
    ),
    Miscompile(
        "bitwise_or", "a bitwise atomic is a load and a store under a lock of one launch",
        "dl has none", "atomics", "under a lock",
    ),
    Miscompile(
        "gemm_then_set_in_a_for", "in a persistent for the flags between tile and signal are dropped",
        "GEMMs loop over tiles with while (dl.fence_dot)", "dot signals", "sync_block_wait of flag 10 is there 0 times",
    ),
    Miscompile(
        "gemm_with_a_flag_of_the_compiler", "the compiler allots flags without looking which the program uses",
        "dl.fence_dot uses flag 10", "dot signals", "for something else",
    ),
    Miscompile(
        "gemm_then_add", "both vector cores of a block make an atomic add in a kernel with a dot",
        "such kernels signal by set (dl.fence_dot)", "atomics", "counts twice",
    ),
    Miscompile(
        "add_a_product", "an atomic add of a product adds memory that nothing has written",
        "operators store products and reduce them afterwards", "complete", "a buffer that nothing has filled",
    ),
    Miscompile(
        "store_every_third_lane", "a store with a scattered mask reads all lanes and writes them back",
        "masks of stores are ranges of lanes", "lanes", "writes back what",
    ),
    Miscompile(
        "update_every_third_lane", "and so does one to a tile that the kernel has loaded itself",
        "masks of stores are ranges of lanes", "lanes", "writes back all lanes",
    ),
    Miscompile(
        "offset_then_address_as_integer", "the offset of a pointer that is made an integer is lost",
        "dl.symm_at adds elements to a pointer", "complete", "the offset of that view is lost",
    ),
    Miscompile(
        "block_of_integers_as_pointers", "a block of pointers made from integers crashes the compiler",
        "dl.symm_at adds elements to a pointer", crash="Assertion",
    ),
    Miscompile(
        "block_pointer_on_an_integer", "a block pointer on an integer crashes the compiler",
        "dl.symm_at adds elements to a pointer", crash="Invalid element type. It should be a base memref type",
    ),
    Miscompile(
        "pointer_chosen_in_an_if", "a pointer that is chosen in an if crashes the compiler",
        "operators choose offsets or call twice", crash="triton-adapter-opt ended with",
    ),
]  # fmt: skip


@pytest.mark.parametrize("today", MISCOMPILES, ids=lambda today: today.kernel)
def test_the_compiler_still_gets_it_wrong(today):
    mended = (
        f"{' '.join(PACKAGES[:2])} no longer shows it: {today.what}. Confirm that {today.kernel} is right now, lift the "
        f"rule ({today.rule}), move the kernel to those that the checks accept, and take this entry out."
    )
    found = lowered()[today.kernel]
    if today.crash:
        assert found.stage == "ttir", mended
        assert today.crash in found.log, f"it fails in another way now: {found.log[-1000:]}"
    else:
        check = checks(today.kernel)[today.check]
        assert check.passed is False, mended
        assert today.words in check.reason, f"it is wrong in another way now: {check.reason}"


def test_a_compare_and_swap_still_returns_the_new_value():
    """The old value would be loaded before the swap's store; today it is loaded again after it."""
    found = lowered()["compare_and_swap"]
    _, (part,) = kernels(found.ttir, found.hivm)
    (swap,) = [a for a in part.accesses if a.kind == "store" and a.arguments == {0}]
    (result,) = [a for a in part.accesses if a.kind == "store" and a.arguments == {2}]
    ops = set()
    part.flow.backward([v for v in result.op.operands if v is not result.address], ops=ops)
    loads = [a for a in part.accesses if a.op in ops and a.kind == "load" and a.arguments == {0}]
    assert loads and all(load.op.line > swap.op.line for load in loads), (
        "atomic_cas returns a value from before its store now: if it also became atomic across devices, allow dl.atomic_cas"
    )


def test_the_order_of_an_atomic_still_makes_no_fence():
    """A release of Triton's becomes the same HIVM as none: the barrier of dl.notify is what orders."""
    hivm = lowered()["put_then_atomic_without_barrier"].hivm
    signal = [line for line in hivm.splitlines() if re.search(r"call @store_ubuf_to_gm_1d_int32_t\(", line)][-1]
    before = hivm[: hivm.index(signal)].splitlines()[-12:]
    assert not any("PIPE_ALL" in line or "fence" in line for line in before), (
        "sem='release' makes a fence now: see whether publish_add of language/target/ascend.py still needs its barrier"
    )
