"""aclshmem's device functions in a kernel: kept as far as the final HIVM, with whole addresses and in order.

The kernels go the way that they go on an NPU machine: triton-ascend, then the bishengir-compile that stands before the
compiler on PATH. The shim that the calls end in is compiled for the host, against stand-ins of aclshmem's headers. The
link step, and a run, need CANN: not done here."""

import ctypes
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
SHIMS = ROOT / "third_party" / "ascend" / "aclshmem"
WRAPPER = SHIMS / "bin" / "bishengir-compile"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


custom_call = load(SHIMS / "custom_call.py")
PIECE = 1 << 30


# -- the shim, on the host


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("g++") or pytest.skip("no g++ on this machine")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", "-I", HERE / "aclshmem_headers"]
    done = subprocess.run([*command, SHIMS / "shim.cpp", "-o", library], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.calls.restype = ctypes.c_char_p

    def call(name, *arguments):
        """What aclshmem was asked for."""
        loaded.reset()
        types = {"pe": ctypes.c_int32, "value": ctypes.c_int32, "nothing": ctypes.c_int32}
        function = loaded[f"_mlir_ciface_aclshmem_tdist_{name}"]
        function.restype = None
        function(*(types.get(kind, ctypes.c_int64)(value) for kind, value in arguments))
        return [tuple(int(part) if part.lstrip("-").isdigit() else part for part in line.split())
                for line in loaded.calls().decode().splitlines()]  # fmt: skip

    return call


@pytest.mark.parametrize("word, name", [("put_nbi", "put"), ("get_nbi", "get")])
def test_the_shim_copies_every_byte_once_in_pieces_that_fit_32_bits(word, name, shim):
    rest, pe = random.randrange(1, PIECE), random.randrange(16384)
    arguments = ("dst", 4096), ("src", 1 << 45), ("nbytes", 3 * PIECE + rest), ("pe", pe)
    assert shim(word, *arguments) == [
        (name, 4096 + i * PIECE, (1 << 45) + i * PIECE, PIECE if i < 3 else rest, pe) for i in range(4)
    ]
    assert shim(word, ("dst", 64), ("src", 128), ("nbytes", PIECE), ("pe", 1)) == [(name, 64, 128, PIECE, 1)]
    assert shim(word, ("dst", 64), ("src", 128), ("nbytes", 0), ("pe", 1)) == []


def test_the_shim_sets_a_signal_after_all_bytes(shim):
    def put(nbytes):
        return shim("put_signal_nbi", ("dst", 64), ("src", 0), ("nbytes", nbytes), ("sig", 8), ("value", -5), ("pe", 3))

    assert put(100) == [("put_signal", 64, 0, 100, 8, -5, 0, 3)]
    assert put(PIECE) == [("put_signal", 64, 0, PIECE, 8, -5, 0, 3)]
    assert put(2 * PIECE + 1) == [
        ("put", 64, 0, PIECE, 3), ("put", 64 + PIECE, PIECE, PIECE, 3), ("quiet",),
        ("put_signal", 64 + 2 * PIECE, 2 * PIECE, 1, 8, -5, 0, 3),
    ]  # fmt: skip
    assert put(0) == [("fence",), ("signal", 8, -5, 0, 3)]
    assert shim("quiet", ("nothing", 0)) == [("quiet",)]


# -- the rewriting, on text

CALL = '  %9 = tt.extern_elementwise %7, %8 {libname = "triton_dist_aclshmem", libpath = "", pure = false, symbol = "f"} : '
HEAD = "func.func @k(%arg0: memref<?xf16>, %arg1: i32) {\n"


def address(view):
    return HEAD + view + "  %p = memref.extract_aligned_pointer_as_index %v : memref<1xf16, strided<[1]>> -> index\n" + (
        CALL + "(i64, i32) -> i32\n}\n"
    )


VIEW = "  %v = memref.reinterpret_cast BASE to offset: [OFFSET], sizes: [1], strides: [1] : memref<?xf16> to memref<1xf16>\n"


def test_an_address_is_that_of_the_argument_plus_its_offset_in_bytes():
    static = custom_call.rewrite(address(VIEW.replace("BASE", "%arg0").replace("OFFSET", "24")))
    assert "%p_elements = arith.constant 24 : index" in static and "%p_itemsize = arith.constant 2 : index" in static
    dynamic = custom_call.rewrite(address(VIEW.replace("BASE", "%arg0").replace("OFFSET", "%3")))
    assert "%p_base = memref.extract_aligned_pointer_as_index %arg0 : memref<?xf16> -> index" in dynamic
    assert "%p_bytes = arith.muli %3, %p_itemsize : index" in dynamic
    assert dynamic.count("%p = ") == 1 and "%p = arith.addi %p_base, %p_bytes : index" in dynamic


@pytest.mark.parametrize("text, words", [
    (address(VIEW.replace("BASE", "%arg7").replace("OFFSET", "%3")), "its offset would be lost"),
    (address(VIEW.replace("BASE", "%arg0").replace("f16", "complex")), "its offset would be lost"),
    (address(""), "its offset would be lost"),
    (HEAD + CALL + "(tensor<4xi64>, i32) -> tensor<4xi32>\n}\n", "this call has a block"),
    (HEAD + CALL.replace("symbol", "simbol") + "(i64, i32) -> i32\n}\n", "not written as triton-ascend 3.2.0 writes it"),
    (HEAD + "  linalg.matmul ins(%1, %2)\n" + CALL + "(i64, i32) -> i32\n}\n", "in a kernel with tl.dot"),
])  # fmt: skip
def test_a_call_that_would_be_compiled_wrong_is_refused(text, words):
    with pytest.raises(custom_call.RewriteError, match=words):
        custom_call.rewrite(text)


def test_other_libraries_calls_are_left_alone():
    text = (HEAD + CALL + "(i64, i32) -> i32\n}\n").replace("triton_dist_aclshmem", "libdevice")
    assert custom_call.rewrite(text) == text


# -- the compiler that stands before the compiler


def run_wrapper(folder, arguments, path, bitcode=None, timeout=120):
    environment = {**os.environ, "PATH": os.pathsep.join([str(WRAPPER.parent), *map(str, path), "/usr/bin", "/bin"])}
    environment.pop("TRITON_DIST_ACLSHMEM_BITCODE", None)
    if bitcode:
        environment["TRITON_DIST_ACLSHMEM_BITCODE"] = str(bitcode)
    command = ["bishengir-compile", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout,
        executable=shutil.which("bishengir-compile", path=environment["PATH"]),
    )  # fmt: skip


def test_the_wrapper_adds_the_shim_only_to_kernels_that_call_it(tmp_path):
    compiler, bitcode = tmp_path / "bin" / "bishengir-compile", tmp_path / "shim.bc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done\nexit 7\n')
    compiler.chmod(0o755)
    bitcode.touch()
    kernel = tmp_path / "kernel.ttadapter.mlir"
    kernel.write_text(HEAD + "}\n")
    plain = run_wrapper(tmp_path, [kernel, "--target=Ascend910B2", "-o", "kernel"], [compiler.parent])
    assert (plain.returncode, plain.stdout.split()) == (7, [str(kernel), "--target=Ascend910B2", "-o", "kernel"])
    assert run_wrapper(tmp_path, ["--help"], [compiler.parent]).stdout.split() == ["--help"]
    kernel.write_text(HEAD + CALL + "(i64, i32) -> i32\n}\n")
    called = run_wrapper(tmp_path, [kernel, "-o", "kernel"], [compiler.parent], bitcode)
    first, *rest = called.stdout.split()
    assert called.returncode == 7 and rest == ["-o", "kernel", f"--link-aicore-bitcode={bitcode}"]
    assert first != str(kernel) and "hivm.hir.custom" in Path(first).read_text() and "extern" in kernel.read_text()
    for wrong, words in ((None, "found: unset"), (tmp_path / "gone.bc", "gone.bc"), ("shim.bc", "found: shim.bc")):
        refused = run_wrapper(tmp_path, [kernel, "-o", "kernel"], [compiler.parent], wrong)
        assert refused.returncode == 1 and words in refused.stderr and "build.sh" in refused.stderr
    kernel.write_text(HEAD + "  linalg.matmul ins(%1, %2)\n" + CALL + "(i64, i32) -> i32\n}\n")
    refused = run_wrapper(tmp_path, [kernel], [compiler.parent], bitcode)
    assert refused.returncode == 1 and "in a kernel with tl.dot" in refused.stderr
    absent = run_wrapper(tmp_path, [kernel], [])
    assert absent.returncode == 1 and "no bishengir-compile on PATH behind" in absent.stderr


# -- through the real toolchain


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """{case: {"ttadapter", "log"}} of device_call_kernels.py, and the toolchain's bin folder."""
    source = SHIMS.parent / "toolchain.py"
    place = load(source).folder() if source.exists() else None
    if place is None or not (place / "bin" / "python").exists():
        pytest.skip(f"no Ascend toolchain in {place}: `python -m third_party.ascend.lower --all` makes it")
    folder = tmp_path_factory.mktemp("device_calls")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_DIST_BACKEND": "ascend"}
    environment.pop("TRITON_INTERPRET", None)
    command = [place / "bin" / "python", HERE / "device_call_kernels.py", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (package,) = place.glob("lib/python*/site-packages/ascendnpuir/bin")
    return json.loads((folder / "cases.json").read_text()), package


def hivm_of(case, lowered, tmp_path, text=None):
    """The final HIVM of a case, by way of the wrapper and the real compiler."""
    cases, compiler = lowered
    assert cases[case]["ttadapter"], cases[case]["log"]
    bitcode = tmp_path / "shim.bc"
    bitcode.touch()
    # triton-ascend takes mix_mode away before it calls the compiler
    (tmp_path / "kernel.mlir").write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text or cases[case]["ttadapter"]))
    arguments = [
        "kernel.mlir", "--target=Ascend910B2", "--enable-auto-multi-buffer=True", "--enable-auto-bind-sub-block=True",
        "--enable-hivm-compile=true", "--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true",
        "--save-temps=.", "-o", "kernel",
    ]  # fmt: skip
    done = run_wrapper(tmp_path, arguments, [compiler], bitcode)
    final = tmp_path / "module.hivm.opt.mlir"
    # without CANN's hivmc the compiler stops behind this file, and says so
    assert "Cannot find hivmc" in done.stderr + done.stdout and final.is_file(), done.stderr[-3000:]
    return final.read_text()


def operands(hivm, symbol):
    """The operands of each call of the symbol, in order."""
    return [
        [one.strip() for one in found.split(",")]
        for found in re.findall(rf"\bcall @_mlir_ciface_{symbol}\(([^)]*)\)", hivm)
    ]


def evaluate(hivm, name, given):
    """The value that an integer of the final HIVM has, with the values `given` of arguments and loop counters."""
    if name in given:
        return given[name]
    what = re.search(rf"^\s*{re.escape(name)} = (.*)$", hivm, re.MULTILINE)[1]
    operation, rest = what.split(" ", 1)
    values = re.findall(r"%[\w#]+", rest)
    if operation == "arith.constant":
        return int(rest.split(" ")[0])
    if operation == "memref.extract_aligned_pointer_as_index":
        assert values[0] in given, f"the address of {values[0]}, which may have an offset"
        return given[values[0]]
    values = [evaluate(hivm, one, given) for one in values]
    if operation in ("arith.index_cast", "arith.extsi"):
        return values[0]
    if operation in ("arith.addi", "arith.muli"):
        return values[0] + values[1] if operation == "arith.addi" else values[0] * values[1]
    assert operation == "affine.apply", what
    symbols, formula = re.search(r"^#map\d* = affine_map<\(\)\[([^\]]*)\] -> \(([^)]*)\)>", hivm, re.MULTILINE).groups()
    assert re.fullmatch(r"[s\d +*]+", formula) and hivm.count("affine_map") == 1
    return eval(formula, dict(zip(symbols.split(", "), values)))


def arguments_of(hivm, parameters):
    """Random values of the kernel's arguments: ({parameter: value}, {%argN: value}). Three of the compiler's come first."""
    given = {name: random.randrange(1, 1000) * (1 << 30 if kind == "*" else 1) for name, kind in parameters.items()}
    return given, {f"%arg{index + 3}": value for index, value in enumerate(given.values())}


@pytest.mark.parametrize("case, itemsize", [("exchange", 2), ("exchange_fp32", 4)])
def test_put_signal_reaches_hivm_as_one_call_between_the_store_and_the_wait(case, itemsize, lowered, tmp_path):
    hivm = hivm_of(case, lowered, tmp_path)
    (operand,) = operands(hivm, "aclshmem_tdist_put_signal_nbi")
    of, given = arguments_of(hivm, {"x": "*", "inbox": "*", "out": "*", "sig": "*", "n": "", "pe": ""})
    assert [evaluate(hivm, one, given) for one in operand] == [
        of["inbox"] + of["n"] * 3 * itemsize, of["x"], of["n"] * itemsize, of["sig"], 7, of["pe"]
    ]  # fmt: skip
    assert "func.func private @_mlir_ciface_aclshmem_tdist_put_signal_nbi(i64, i64, i64, i64, i32, i32)" in hivm
    order = "  call @store_ubuf_to_gm", "pipe_barrier[<PIPE_ALL>]", "  call @_mlir_ciface_", "scf.while"
    store, barrier, call, poll = map(hivm.index, order)
    assert store < barrier < call < poll, "the stored block is in memory before the call"
    assert "tt.extern" not in hivm and "hivm.hir.custom" not in hivm


def test_a_get_is_followed_by_quiet_and_a_barrier_before_its_data_is_read(lowered, tmp_path):
    hivm = hivm_of("read_peer", lowered, tmp_path)
    (operand,) = operands(hivm, "aclshmem_tdist_get_nbi")
    of, given = arguments_of(hivm, {"x": "*", "out": "*", "n": "", "pe": ""})
    wanted = [of["out"], of["x"] + 5 * 2, of["n"] * 2, of["pe"]]
    assert [evaluate(hivm, one, given) for one in operand] == wanted
    get, quiet = (hivm.index(f"  call @_mlir_ciface_aclshmem_tdist_{one}") for one in ("get_nbi", "quiet"))
    assert get < quiet < hivm.index("pipe_barrier[<PIPE_ALL>]", quiet) < hivm.index("  call @load_gm_to_ubuf")


def test_a_call_in_a_loop_stays_in_the_loop(lowered, tmp_path):
    hivm = hivm_of("put_in_a_loop", lowered, tmp_path)
    counter, body = re.search(r"scf\.for (%arg\d+) [^\n]*\{\n(.*?)\n    \}\n", hivm, re.DOTALL).groups()
    (operand,) = operands(body, "aclshmem_tdist_put_nbi")
    of, given = arguments_of(hivm, {"x": "*", "inbox": "*", "n": "", "world": ""})
    given[counter] = pe = random.randrange(100)
    assert [evaluate(hivm, one, given) for one in operand] == [of["inbox"] + pe * 512, of["x"], of["n"], pe]
    assert body.index("pipe_barrier[<PIPE_ALL>]") < body.index("call @_mlir_ciface_")
    assert len(operands(hivm, "aclshmem_tdist_put_nbi")) == len(operands(hivm, "aclshmem_tdist_quiet")) == 1


def test_the_compiler_needs_the_rewriting_and_other_kernels_do_not(lowered, tmp_path):
    cases, _ = lowered
    assert custom_call.rewrite(cases["no_call"]["ttadapter"]) == cases["no_call"]["ttadapter"]
    assert "_mlir_ciface_" not in hivm_of("no_call", lowered, tmp_path)
    kept = cases["put_in_a_loop"]["ttadapter"].replace("triton_dist_aclshmem", "another_library")
    with pytest.raises(AssertionError):  # should a later compiler take it, the rewriting may go
        hivm_of("put_in_a_loop", lowered, tmp_path, kept)


def test_words_refuse_what_cannot_work(lowered):
    cases, _ = lowered
    assert "dst (fp32) and src (fp16) must have the same dtype" in cases["other_dtype"]["log"]
    assert "a signal is int32, this one is int64" in cases["wide_signal"]["log"]
    with pytest.raises(custom_call.RewriteError, match="in a kernel with tl.dot"):
        custom_call.rewrite(cases["tile"]["ttadapter"])


def test_the_lowering_tool_takes_such_kernels_and_says_why_it_refuses_one(lowered):
    def lower(kernel, signature):
        path = f"{(HERE / 'device_call_kernels.py').relative_to(ROOT)}:{kernel}"
        command = [sys.executable, "-m", "third_party.ascend.lower", path, "--signature", signature, "--constexpr", "BLOCK=64"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)

    right = lower("read_peer", "x: *bf16, out: *bf16, n: i32, pe: i32")
    assert right.returncode == 0 and "hivm" in right.stdout, right.stdout + right.stderr
    wrong = lower("tile", "a: *fp16, b: *fp16, c: *fp16, inbox: *fp16, pe: i32")
    assert wrong.returncode == 1 and "in a kernel with tl.dot" in wrong.stdout + wrong.stderr, wrong.stdout + wrong.stderr
