"""The meaning checks accept kernels that the Ascend compiler gets right and reject those that are wrong, be it their
author's fault or the compiler's; and they reject right HIVM from which something was taken."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ascend_cases import checks, failed, lowered  # noqa: E402

sys.path.pop(0)

from third_party.ascend.checks import NAMES, kernels, run_checks  # noqa: E402  # found by ascend_cases
from third_party.ascend.checks.mlir import parse  # noqa: E402

STORES = {"complete", "lanes"}
RIGHT = {
    "put_then_set": {"publishes", "barriers", "remote", *STORES},
    "put_then_add": {"publishes", "barriers", "remote", "atomics", *STORES},
    "wait_then_read": {"waits", "barriers", *STORES},
    "wait_for_many": {"waits", "barriers", *STORES},
    "read_peer": {"remote", *STORES},
    "read_own": STORES,
    "store_a_range_of_lanes": STORES,
    "update_a_range_of_lanes": STORES,
    "address_as_integer_then_offset": {"remote", *STORES},
    "counts_then_set": {"publishes", "barriers", "remote", *STORES},
    "gemm_then_set": {"publishes", "barriers", "remote", "dot signals", *STORES},
    "wait_then_gemm": {"waits", "barriers", "dot signals", *STORES},
    "add": {"publishes", "complete", "atomics"},
}

# a kernel, the check that must reject it, and words of its reason
WRONG = [
    ("spin_on_a_scalar", "waits", "vanished"),
    ("spin_on_a_scalar_with_barrier", "waits", "through a cache"),
    ("spin_on_an_atomic", "waits", "holds the lock"),
    ("wait_then_gemm_in_a_for", "waits", "loops that follow the vector half's"),
    ("put_then_atomic_without_barrier", "publishes", "no barrier between"),
    ("put_then_store_without_barrier", "publishes", "no barrier between"),
    ("put_then_add_relaxed_without_barrier", "publishes", "no barrier between"),
    ("put_then_set_eight_without_barrier", "publishes", "no barrier between"),
    ("count_then_set_without_barrier", "publishes", "(store to argument 0 at a peer) and the signal"),
    ("barrier_on_one_path", "publishes", "no barrier between"),
    ("barrier_before_the_last_turn", "publishes", "no barrier between"),
    ("store_every_third_lane", "remote", "load of argument 1 at a peer"),
    ("store_every_third_lane_here", "lanes", "writes back what"),
    ("update_every_third_lane", "lanes", "writes back all lanes"),
    ("update_lanes_that_another_tensor_names", "lanes", "writes back all lanes"),
    ("gemm_then_set_sixteen", "dot signals", "nothing orders it before the signal"),
    ("gemm_then_set_unfenced", "dot signals", "nothing orders it before the signal"),
    ("gemm_then_set_in_a_for", "dot signals", "sync_block_wait of flag 10 is there 0 times"),
    ("gemm_with_a_flag_of_the_compiler", "dot signals", "for something else"),
    ("gemm_then_set_in_a_for", "barriers", "barriers of the TTIR in 1 loops are not in"),
    ("exchange_a_scalar", "complete", "are not in HIVM"),
    ("offset_then_address_as_integer", "complete", "the offset of that view is lost"),
    ("add_a_product", "complete", "a buffer that nothing has filled"),
    ("gemm_then_add", "atomics", "counts twice"),
    ("compare_and_swap", "atomics", "no atomic store of the hardware"),
    ("add_and_use_the_old_value", "atomics", "the old value"),
    ("add of i64", "atomics", "under a lock"),
]


@pytest.mark.parametrize("kernel", RIGHT)
def test_a_right_kernel_passes_what_it_is_about(kernel):
    found = checks(kernel)
    assert list(found) == list(NAMES)
    assert {name: c.reason for name, c in found.items() if c.passed is False} == {}
    assert {name for name, c in found.items() if c.passed} == RIGHT[kernel]


@pytest.mark.parametrize("kernel, name, words", WRONG)
def test_a_wrong_kernel_is_rejected_by_the_check_that_knows_why(kernel, name, words):
    check = checks(kernel)[name]
    assert check.passed is False and words in check.reason, check
    assert re.search(r"\(line \d+\)", check.reason), "a reason names operations and their lines"


def test_every_check_has_a_kernel_that_it_rejects_and_one_that_it_accepts():
    assert {name for _, name, _ in WRONG} == set(NAMES)
    assert set().union(*RIGHT.values()) == set(NAMES)


def test_the_worker_of_the_toolchain_says_the_same():
    for kernel in ("gemm_then_set", "gemm_then_add"):
        there = {name: (passed, reason) for name, passed, reason in lowered()[kernel].checks}
        assert there == {name: (c.passed, c.reason) for name, c in checks(kernel).items()}


# -- right HIVM, changed


def _matters(op, part):
    """What the sweep deletes: accesses of global memory (the compiler's workspace included), full barriers but the one that
    ends a function, flags, and loops that nothing needs the results of."""
    last = [o for o in part.function.walk() if o.name == "hivm.hir.pipe_barrier"][-1]
    return (
        (op in part.by_op and op.name == "func.call")
        or (op.name == "hivm.hir.pipe_barrier" and "PIPE_ALL" in op.words and op is not last)
        or op.name.startswith("hivm.hir.sync_block")
        or (op.name == "scf.while" and not op.results)
    )


@pytest.mark.parametrize("kernel", RIGHT)
def test_nothing_that_matters_can_be_deleted_unseen(kernel):
    _, parts = kernels(lowered()[kernel].ttir, lowered()[kernel].hivm)
    wanted = {op.line for part in parts for op in part.function.walk() if _matters(op, part)}
    assert wanted
    unseen = []
    for line in sorted(wanted):
        text = Text(kernel)
        ops = [op for f in text.functions.values() for op in f.walk() if op.line == line and op.name != "scf.if"]
        if not failed(kernel, str(text.delete(*ops))):
            unseen.append(lowered()[kernel].hivm.splitlines()[line - 1].strip())
    assert unseen == []


class Text:
    """The HIVM of a kernel, as lines to change. `find` gives line numbers, from 1, of operations of a function."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.lines = lowered()[kernel].hivm.splitlines()
        module = parse(lowered()[kernel].hivm)
        self.functions = {f.symbol.removeprefix(kernel).strip("_") or "all": f for f in module.functions()}

    def find(self, pattern, part="all"):
        """Operations of a part whose line matches."""
        return [op for op in self.functions[part].walk() if re.search(pattern, self.lines[op.line - 1])]

    def __str__(self):
        return "\n".join(line for line in self.lines if line is not None)

    def delete(self, *ops):
        for op in ops:
            for i in range(op.line - 1, self.end(op)):
                self.lines[i] = None
        return self

    def end(self, op):
        inner = max((o.line for o in op.walk()), default=op.line)
        return inner + 1 if op.regions else inner

    def change(self, op, pattern, by):
        line = self.lines[op.line - 1]
        self.lines[op.line - 1] = re.sub(pattern, by, line, count=1)
        assert self.lines[op.line - 1] != line
        return self

    def before(self, op, text):
        self.lines[op.line - 1] = f"{text}\n{self.lines[op.line - 1]}"
        return self


BARRIER = r"pipe_barrier\[<PIPE_ALL>\]"
STORE = r"call @store_ubuf_to_gm"


def signal_of(text, part="all"):
    """The last store of a function: its signal."""
    return text.find(STORE, part)[-1]


@pytest.mark.parametrize("comment", [False, True])
@pytest.mark.parametrize("kernel", ["put_then_set", "put_then_add"])
def test_a_signal_without_its_barrier_is_rejected(kernel, comment):
    text = Text(kernel)
    barriers = [op for op in text.find(BARRIER) if op.line < signal_of(text).line]
    assert len(barriers) == 1
    text.change(barriers[0], "hivm", "// hivm") if comment else text.delete(*barriers)
    assert failed(kernel, str(text)) == {"publishes", "barriers"}


def test_a_barrier_of_one_pipeline_is_not_enough():
    text = Text("put_then_set")
    (barrier,) = [op for op in text.find(BARRIER) if op.line < signal_of(text).line]
    assert failed("put_then_set", str(text.change(barrier, "PIPE_ALL", "PIPE_V"))) == {"publishes", "barriers"}


def test_a_barrier_on_one_path_is_not_enough():
    text = Text("put_then_set")
    (barrier,) = [op for op in text.find(BARRIER) if op.line < signal_of(text).line]
    text.change(barrier, r".*", "%odd = arith.constant true\nscf.if %odd {\nhivm.hir.pipe_barrier[<PIPE_ALL>]\n}")
    assert failed("put_then_set", str(text)) == {"publishes"}


def test_a_barrier_before_the_last_store_is_not_enough():
    text = Text("put_then_set")
    (barrier,) = [op for op in text.find(BARRIER) if op.line < signal_of(text).line]
    last = text.find(STORE)[-2]
    text.delete(barrier).before(last, "hivm.hir.pipe_barrier[<PIPE_ALL>]")
    assert failed("put_then_set", str(text)) == {"publishes"}


def test_a_wait_without_its_loop_is_rejected():
    text = Text("wait_then_read")
    (loop,) = text.find(r"scf\.while .*\(i32\) -> \(\)")
    assert failed("wait_then_read", str(text.delete(loop))) == {"waits", "barriers", "complete"}


@pytest.mark.parametrize("which", [0, 1])
def test_a_wait_that_does_not_look_at_its_signal_is_rejected(which):
    text = Text("wait_for_many")
    loop = text.find(r"scf\.while")[which]
    (condition,) = [op for op in loop.walk() if op.name == "scf.condition" and op.parent is loop]
    comparison = condition.operands[0].op
    text.change(comparison, r"= arith\.cmpi .*", "= arith.constant false")
    assert failed("wait_for_many", str(text)) == {"waits"}


def test_a_wait_that_loads_nothing_afresh_is_rejected():
    text = Text("wait_then_read")
    (loop,) = text.find(r"scf\.while")
    (load,) = [op for op in loop.walk() if op.symbol.startswith("load_gm_to_ubuf")]
    assert failed("wait_then_read", str(text.delete(load))) == {"waits", "complete"}


def test_a_wait_whose_load_does_not_reach_the_condition_is_rejected():
    text = Text("wait_then_read")
    (loop,) = text.find(r"scf\.while")
    end = loop.regions[1].blocks[0].ops[-1]
    assert end.name == "scf.yield" and len(end.operands) == 1
    assert failed("wait_then_read", str(text.change(end, r"%\w+", loop.operands[0].name))) == {"waits"}


def test_data_loaded_before_the_wait_are_rejected():
    text = Text("wait_then_read")
    (loop,) = text.find(r"scf\.while")
    load = text.find("call @load_gm_to_ubuf")[-1]
    views = [value.op for value in load.operands if value.op.line > loop.line]
    views += [v.op for op in views for v in op.operands if v.op and v.op.line > loop.line]
    moved = "\n".join(text.lines[op.line - 1] for op in (*sorted(set(views), key=lambda op: op.line), load))
    text.delete(*views, load).before(loop, moved)
    (reason,) = [c.reason for c in checks("wait_then_read", str(text)).values() if c.passed is False]
    assert "is made before the wait" in reason


def test_a_wait_on_another_signal_is_rejected():
    text = Text("wait_then_read")
    (loop,) = text.find(r"scf\.while")
    (load,) = [op for op in loop.walk() if op.symbol.startswith("load_gm_to_ubuf")]
    source = load.operands[0].op.operands[0].op
    text.change(source, "%arg4", "%arg6")  # sig, out: three arguments of the compiler stand before the kernel's
    assert "waits" in failed("wait_then_read", str(text))


def test_a_cube_half_that_does_not_follow_the_wait_is_rejected():
    text = Text("wait_then_gemm")
    outer, inner = text.find(r"scf\.while", "mix_aic")
    assert inner.inside(outer)
    assert "waits" in failed("wait_then_gemm", str(text.delete(inner)))


def _distance(text):
    """The division of a peer's distance by the element size, of the first access at a peer."""
    _, parts = kernels(lowered()[text.kernel].ttir, lowered()[text.kernel].hivm)
    access = next(a for p in parts for a in p.accesses if a.translated)
    ops = set()
    access.flow.backward([access.address], ops=ops)
    lines = sorted(op.line for op in ops if op.name == "arith.divsi" and "i64" in op.types)
    return next(op for op in text.functions["all"].walk() if op.line == lines[0])


@pytest.mark.parametrize("kernel", ["put_then_set", "read_peer"])
def test_an_access_at_this_rank_instead_of_the_peer_is_rejected(kernel):
    text = Text(kernel)
    division = _distance(text)
    text.change(division, r"= arith\.divsi .*", "= arith.constant 0 : i64")
    assert "remote" in failed(kernel, str(text))


def test_an_access_at_another_peer_is_rejected():
    text = Text("put_then_set")
    access = _distance(text).operands[0].op
    index = next(op for op in text.find(r"arith\.index_cast %arg7 ") if op.line < access.line)
    assert "remote" in failed("put_then_set", str(text.change(index, "%arg7", "%arg8")))  # peer, other


def test_a_distance_in_elements_of_another_size_is_rejected():
    text = Text("put_then_set")
    division = _distance(text)
    assert failed("put_then_set", str(text.change(division, "%c2_i64", "%c4_i64"))) == {"remote"}


def test_the_hivm_of_a_kernel_that_reads_its_own_memory_is_rejected():
    # The same kernel but for `remote_load`: as if the compiler had dropped the translation.
    assert "remote" in failed("read_peer", lowered()["read_own"].hivm)


@pytest.mark.parametrize("part, pattern", [("mix_aic", "sync_block_set"), ("mix_aiv", "sync_block_wait")])
def test_half_a_pair_of_flags_is_rejected(part, pattern):
    text = Text("gemm_then_set")
    (op,) = text.find(pattern, part)
    assert failed("gemm_then_set", str(text.delete(op))) == {"dot signals"}


def test_a_flag_set_before_the_tile_is_stored_is_rejected():
    text = Text("gemm_then_set")
    (flag,) = text.find("sync_block_set", "mix_aic")
    (store,) = text.find("call @fixpipe", "mix_aic")
    line = text.lines[flag.line - 1]
    assert failed("gemm_then_set", str(text.delete(flag).before(store, line))) == {"dot signals"}


def test_a_flag_awaited_after_the_signal_is_rejected():
    text = Text("gemm_then_set")
    (flag,) = text.find("sync_block_wait", "mix_aiv")
    end = text.find(r"scf\.yield %", "mix_aiv")[-1]
    line = text.lines[flag.line - 1]
    assert failed("gemm_then_set", str(text.delete(flag).before(end, line))) == {"dot signals"}


def test_a_flag_awaited_once_for_all_tiles_is_rejected():
    text = Text("gemm_then_set")
    (flag,) = text.find("sync_block_wait", "mix_aiv")
    loop = text.find(r"scf\.while", "mix_aiv")[0]
    line = text.lines[flag.line - 1]
    assert failed("gemm_then_set", str(text.delete(flag).before(loop, line))) == {"dot signals"}


def test_halves_that_use_different_flags_are_rejected():
    text = Text("gemm_then_set")
    (flag,) = text.find("sync_block_wait", "mix_aiv")
    assert failed("gemm_then_set", str(text.change(flag, "flag = 10", "flag = 9"))) == {"dot signals"}


@pytest.mark.parametrize("kernel, part", [("read_own", "all"), ("gemm_then_set", "mix_aiv"), ("put_then_add", "all")])
def test_a_store_that_vanished_is_rejected(kernel, part):
    text = Text(kernel)
    assert "complete" in failed(kernel, str(text.delete(signal_of(text, part))))


def test_a_stored_buffer_that_nothing_fills_is_rejected():
    text = Text("read_own")
    fills = [op for op in text.functions["all"].walk() if op.symbol.startswith(("load_gm", "vadd"))]
    assert fills
    assert "complete" in failed("read_own", str(text.delete(*fills)))


def test_an_operation_on_global_memory_that_is_not_known_is_rejected():
    text = Text("read_own")
    changed = str(text).replace("@store_ubuf_to_gm_1d_half", "@scatter_ubuf_to_gm_1d_half")
    assert "complete" in failed("read_own", changed)


def test_an_add_made_twice_is_rejected():
    text = Text("add")
    signal = signal_of(text)
    assert "atomics" in failed("add", str(text.before(signal, text.lines[signal.line - 1])))


def test_an_add_that_became_a_store_is_rejected():
    text = Text("add")
    assert {"atomics", "complete"} <= failed("add", str(text.change(signal_of(text), "%c1_i32", "%c0_i32")).replace(
        "%c1_i32 = arith.constant 1", "%c0_i32 = arith.constant 0"))  # fmt: skip


def test_an_add_that_one_vector_core_makes_is_accepted():
    text = Text("gemm_then_add")
    signal = signal_of(text, "mix_aiv")
    line = text.lines[signal.line - 1]
    text.delete(signal)
    text.lines[signal.line - 1] = "\n".join(
        ("%core = hivm.hir.get_sub_block_idx -> i64", "%first = arith.constant 0 : i64",
         "%alone = arith.cmpi eq, %core, %first : i64", "scf.if %alone {", line, "}")
    )  # fmt: skip
    assert failed("gemm_then_add") == {"atomics"}
    assert failed("gemm_then_add", str(text)) == set()


def test_a_text_that_cannot_be_read_is_said():
    (check,) = checks("add", hivm=lowered()["add"].hivm.replace("%cast_0 = ", "%cast_other = ")).values()
    assert check.name == "parse" and check.passed is False and "%cast_0" in check.reason


def test_nothing_is_said_of_a_kernel_that_did_not_reach_hivm():
    assert run_checks(lowered()["block_of_integers_as_pointers"]) == []
