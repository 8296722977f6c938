"""The reader of MLIR's text and the walks over it: what the meaning checks stand on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[4]))

from third_party.ascend.checks.dataflow import Flow, constant, root, sources  # noqa: E402
from third_party.ascend.checks.mlir import ParseError, parse  # noqa: E402
from third_party.ascend.checks.paths import depth, early, follow, most  # noqa: E402

sys.path.pop(0)

TEXT = """
#map = affine_map<()[s0] -> (s0 + 8)>
#loc1 = loc("kernel.py":3:5)
#loc2 = loc(callsite(#loc1 at "caller.py":9:1))
module attributes {dlti.spec = #dlti.spec<"A" : 24 : i32>,   hivm.core = #hivm.core<AIV>} {
  func.func private @load(memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<gm>>, i32) attributes {hacc.inline}
  func.func @kernel(%arg0: i64 {hacc.arg_type = #hacc.arg_type<ffts>}, %arg1: memref<?xi32, #hivm.address_space<gm>> {tt.kind = 0 : i32}, %arg2: i1) attributes {dims = dense<[false, true]> : vector<2xi1>, hacc.entry} {
    // hivm.hir.pipe_barrier[<PIPE_ALL>] is only a comment
    %c0 = arith.constant 0 : index
    %c-1_i64 = arith.constant -1 : i64
    %0 = hivm.hir.pointer_cast(%c-1_i64) : memref<1xi32, #hivm.address_space<ub>>
    %view = memref.reinterpret_cast %arg1 to offset: [%c0], sizes: [1], strides: [1] : memref<?xi32, #hivm.address_space<gm>> to memref<1xi32, strided<[1], offset: ?>, #hivm.address_space<gm>>
    %1:2 = scf.if %arg2 -> (i32, i64) {
      %5 = memref.load %0[%c0] {"label::x" = 1 : i32} : memref<1xi32, #hivm.address_space<ub>>
      scf.yield %5, %c-1_i64 : i32, i64
    } else {
      %5 = arith.constant 7 : i32
      scf.yield %5, %c-1_i64 : i32, i64
    } {hivm.unlikely}
    %2 = scf.for %arg3 = %c0 to %c0 step %c0 iter_args(%arg4 = %1#0) -> (i32)  : i32 {
      func.call @load(%view, %arg4) : (memref<1xi32, strided<[1], offset: ?>, #hivm.address_space<gm>>, i32) -> ()
      %5 = arith.addi %arg4, %1#0 : i32
      scf.yield %5 : i32
    } {pipeline.veconly}
    %3 = scf.while (%arg3 = %2) : (i32) -> i32 {
      %5 = arith.cmpi slt, %arg3, %1#0 : i32
      scf.condition(%5) %arg3 : i32
    } do {
    ^bb0(%arg3: i32):
      hivm.hir.pipe_barrier[<PIPE_ALL>]
      scf.yield %arg3 : i32
    } attributes {pipeline.veconly}
    "tt.reduce"(%3) <{axis = 0 : i32}> ({
    ^bb0(%arg5: i32 loc("x.py":1:2), %arg6: i32):
      tt.return %arg5 : i32
    }) : (i32) -> i32 loc(#loc2)
    hivm.hir.sync_block_set[<CUBE>, <PIPE_FIX>, <PIPE_MTE2>] flag = 3 ffts_base_addr = %arg0
    memref.store %3, %0[%c0] : memref<1xi32, #hivm.address_space<ub>>
    return
  }
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def module():
    return parse(TEXT)


@pytest.fixture(scope="module")
def ops(module):
    (function,) = module.functions()
    return list(function.walk())


def named(ops, name):
    return [op for op in ops if op.name == name]


def test_operations_are_found_in_their_regions(module, ops):
    assert [op.name for op in module.walk()].count("func.func") == 2
    assert [op.name for op in ops if op.regions] == ["func.func", "scf.if", "scf.for", "scf.while", "tt.reduce"]
    (barrier,) = named(ops, "hivm.hir.pipe_barrier")  # not the one in the comment
    assert barrier.parent.name == "scf.while" and "PIPE_ALL" in barrier.words and TEXT.splitlines()[barrier.line - 1].strip(
    ).startswith("hivm.hir.pipe_barrier")  # fmt: skip
    assert len(named(ops, "scf.while")[0].regions) == 2 and len(named(ops, "scf.if")[0].regions) == 2


def test_a_name_means_what_its_scope_defines(ops):
    first, second = [op for op in ops if op.name == "scf.yield" and op.parent.name == "scf.if"]
    assert first.operands[0].op.name == "memref.load" and second.operands[0].op.name == "arith.constant"


def test_arguments_have_types_and_attributes(ops):
    ffts, memory, flag = ops[0].regions[0].blocks[0].args
    assert ffts.type == "i64" and ffts.attributes == {"hacc.arg_type": "#hacc.arg_type<ffts>"}
    assert memory.type == "memref<?xi32, #hivm.address_space<gm>>" and flag.type == "i1"
    assert ops[0].symbol == "kernel" and ops[0].attributes["hacc.entry"] == ""
    (loop,) = named(ops, "scf.for")
    assert [value.name for value in loop.regions[0].blocks[0].args] == ["%arg3", "%arg4"]
    assert [value.name for value in loop.operands] == ["%c0", "%c0", "%c0", "%1#0"]


def test_types_attributes_words_and_symbols(ops):
    (view,) = named(ops, "memref.reinterpret_cast")
    assert view.result_type == "memref<1xi32, strided<[1], offset: ?>, #hivm.address_space<gm>>"
    (call,) = named(ops, "func.call")
    assert call.symbol == "load" and call.operand_types == [view.result_type, "i32"]
    (load,) = named(ops, "memref.load")
    assert load.attributes == {"label::x": "1 : i32"} and load.result_type == "i32"
    (flag,) = named(ops, "hivm.hir.sync_block_set")
    assert [w for w in flag.words if w.isupper()] == ["CUBE", "PIPE_FIX", "PIPE_MTE2"] and flag.words[-1] == "%arg0"
    assert constant(named(ops, "hivm.hir.pointer_cast")[0].operands[0]) == -1


def test_source_places_are_the_innermost_call_first(module, ops):
    assert module.places(named(ops, "tt.reduce")[0]) == [("kernel.py", 3), ("caller.py", 9)]


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("%c0 = arith.constant 0 : index", "", "%c0 is used before it is defined"),
        ("    return\n  }\n}", "    return\n", "the text ends inside a region"),
        ("%0 = hivm.hir.pointer_cast", "%0 hivm.hir.pointer_cast", "results without ="),
    ],
)
def test_a_text_that_is_not_understood_is_an_error_with_its_line(old, new, words):
    assert old in TEXT
    with pytest.raises(ParseError, match=r"line \d+") as error:
        parse(TEXT.replace(old, new))
    assert words in str(error.value)


def test_values_are_followed_through_control_flow_and_buffers(ops):
    (loop,) = named(ops, "scf.while")
    flow = Flow(ops[0])
    seen = flow.backward(loop.results)
    assert named(ops, "memref.load")[0].results[0] in seen, "while <- for <- if <- load"
    assert ops[0].regions[0].blocks[0].args[2] in seen, "the condition of the if"
    assert loop.results[0] in flow.backward(named(ops, "memref.load")[0].results), "what is stored in the buffer comes out"
    assert sources(loop.regions[0].blocks[0].args[0])[0] is named(ops, "scf.for")[0].results[0]
    inside = flow.backward(loop.results, within=loop)
    assert named(ops, "memref.load")[0].results[0] not in inside
    view = named(ops, "memref.reinterpret_cast")[0].results[0]
    assert root(view) == [ops[0].regions[0].blocks[0].args[1]]


def function(body):
    (out,) = parse("func.func @f(%c: i1, %n: index) {\n" + body + "\nreturn\n}").functions()
    return out


def after(body, turning=False):
    """What may have happened at the end: `a` adds, `b` takes all away."""

    def step(op, facts):
        return facts | {"a"} if op.name == "t.a" else frozenset() if op.name == "t.b" else facts

    return follow(function(body), step, turning=turning)


FOR = "scf.for %i = %n to %n step %n {{\n{}\n}}"
IF = "scf.if %c {{\n{}\n}}"


@pytest.mark.parametrize(
    "body, may",
    [
        ("t.a", True),
        ("t.a\nt.b", False),
        ("t.a\n" + IF.format("t.b"), True),
        ("t.a\nscf.if %c {\nt.b\n} else {\nt.b\n}", False),
        ("t.a\n" + FOR.format("t.b"), True),
        (FOR.format("t.b\nt.a"), True),
        (FOR.format("t.a\nt.b"), False),
        ("scf.while : () -> () {\nt.a\nscf.condition(%c)\n} do {\nt.b\nscf.yield\n}", True),
        ("t.a\nscf.while : () -> () {\nt.b\nscf.condition(%c)\n} do {\nscf.yield\n}", False),
        ("t.b\nscf.while : () -> () {\nscf.condition(%c)\n} do {\nt.a\nscf.yield\n}", True),
    ],
)
def test_facts_hold_if_they_hold_on_some_path(body, may):
    assert bool(after(body)) == may


def test_loops_can_be_taken_to_turn():
    assert after("t.a\n" + FOR.format("t.b")) and not after("t.a\n" + FOR.format("t.b"), turning=True)


def test_counts_on_a_path():
    body = "t.a\nscf.if %c {\nt.a\nt.a\n} else {\nt.a\n}\n" + FOR.format("t.a")
    f = function(body)
    assert most(f, lambda op: [op.name] if op.name == "t.a" else []) == {"t.a": 4}
    assert [depth(op) for op in f.walk() if op.name == "t.a"] == [0, 0, 0, 0, 1]


def test_early_is_what_a_path_reaches_without_a_gate_in_its_turn():
    f = function("t.x1\n" + FOR.format("t.x2\nt.gate\nt.x3") + "\nt.x4")
    gates = {op for op in f.walk() if op.name == "t.gate"}
    assert {op.name for op in early(f, gates) if op.name.startswith("t.")} == {"t.x1", "t.x2", "t.x4"}
    assert {op.name for op in early(f, gates, turning=True) if op.name.startswith("t.")} == {"t.x1", "t.x2"}
    g = function("t.gate\nt.x1\n" + FOR.format("t.x2"))
    assert not early(g, {op for op in g.walk() if op.name == "t.gate"}) & {op for op in g.walk() if op.name[:3] == "t.x"}
