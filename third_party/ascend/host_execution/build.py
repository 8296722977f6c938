"""Builds a shared library for the host from ttadapter IR. Runs where triton-ascend is.

    ttadapter  --host_ir-->  upstream MLIR  --bishengir-opt-->  LLVM dialect  --triton's LLVM-->  assembly  --C compiler-->  .so

The passes are MLIR's own, in the order bufferization, loops, control flow, LLVM. No LLVM optimisation runs: none may delete a
poll. Needs a C compiler (`CC`, else cc, gcc or clang) and an x86-64 CPU with AVX2 and F16C.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import ascendnpuir
from triton._C.libtriton import ir, llvm

from .host_ir import parameters, to_host

_OPT = Path(ascendnpuir.__file__).parent / "bin" / "bishengir-opt"
_PASSES = """
    --convert-elementwise-to-linalg --eliminate-empty-tensors --empty-tensor-to-alloc-tensor
    --one-shot-bufferize=allow-return-allocs-from-loops=true --convert-bufferization-to-memref --convert-linalg-to-loops
    --lower-affine --convert-scf-to-cf --memref-expand --expand-strided-metadata --lower-affine --convert-arith-to-llvm
    --convert-math-to-llvm --convert-index-to-llvm --finalize-memref-to-llvm=use-generic-functions=true
    --convert-func-to-llvm --convert-cf-to-llvm --convert-arith-to-llvm --reconcile-unrealized-casts
""".split()
_RUNTIME = Path(__file__).with_name("runtime.c")
_CPU, _CPU_FLAGS = "x86-64-v3", {"avx2", "f16c", "fma", "bmi2"}
_TIMEOUT = 120  # seconds, of each tool
_C_TYPES = {f"i{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)} | {"i1": "_Bool", "f32": "float", "f64": "double"}


class BuildError(Exception):
    """A tool refused; the text says which and why."""


def c_compiler():
    """The C compiler that will be used; BuildError when there is none."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    raise BuildError("no C compiler: install gcc or clang (Debian: apt-get install gcc libc6-dev), or name one in CC")


def check_machine():
    """BuildError, with what to do, unless libraries can be built and run here."""
    c_compiler()
    if os.uname().machine != "x86_64":
        raise BuildError(f"this machine is {os.uname().machine}: lowered kernels are executed on x86-64 alone")
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    if missing := _CPU_FLAGS - flags:
        raise BuildError(f"this CPU lacks {', '.join(sorted(missing))}: lowered kernels are compiled for {_CPU}")


def build(ttadapter, target):
    """Builds `target`, a path ending in .so, with the function `triton_dist_launch` of runtime.c.

    Returns: the kernel's parameters without the two and the six that the compiler adds: "memref" or an MLIR scalar type each.
    Raises BuildError or NotForTheHost.
    """
    name, kinds = parameters(ttadapter)
    with tempfile.TemporaryDirectory(prefix="build_", dir=Path(target).parent) as folder:
        folder = Path(folder)
        (folder / "kernel.mlir").write_text(to_host(ttadapter))
        lowered = _tool([_OPT, folder / "kernel.mlir", *_PASSES])
        (folder / "llvm.mlir").write_text(lowered)
        (folder / "kernel.s").write_text(_assembly(folder / "llvm.mlir"))
        (folder / "program.c").write_text(_program(name, kinds))
        sources = [folder / "kernel.s", folder / "program.c", _runtime(Path(target).parent)]
        _tool([c_compiler(), "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", f"{target}.part", *sources, "-lm", "-lpthread"])
    os.replace(f"{target}.part", target)
    return ["memref" if kind.startswith("memref") else kind for kind in kinds[2:-6]]


def _runtime(folder):
    """The compiled runtime.c, which all libraries of a folder are linked with."""
    made = folder / "runtime.o"
    if not made.exists():
        _tool([c_compiler(), "-O2", "-fPIC", "-mf16c", "-c", "-o", made, _RUNTIME])
    return made


def _tool(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{Path(command[0]).name} had not ended after {_TIMEOUT} s") from None
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr[:4000]}")
    return done.stdout


def _assembly(path):
    context = ir.context()
    ir.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    llvm.init_targets()
    text = str(llvm.to_module(module, llvm.context()))
    return llvm.translate_to_asm(text, "x86_64-unknown-linux-gnu", _CPU, "", [], False, False)


def _program(name, kinds):
    """C source of `triton_dist_program`: one program of the kernel, its arguments from slots of 8 bytes."""
    types, values = [], []
    own = kinds[2:-6]
    for i, kind in enumerate(kinds):
        if kind.startswith("memref"):
            types += ["void *", "void *", "int64_t", "int64_t", "int64_t"]
            base = f"(void *)arguments[{i - 2}]" if 2 <= i < 2 + len(own) else "0"  # the lock and the workspace: not used here
            values += [base, base, "0", "INT64_C(1) << 40", "1"]
        elif kind in _C_TYPES:
            types.append(_C_TYPES[kind])
            if i < 2 + len(own):
                values.append(f"*(const {_C_TYPES[kind]} *)&arguments[{i - 2}]")
            else:
                place = i - 2 - len(own)
                values.append(f"{'grid' if place < 3 else 'program'}[{place % 3}]")
        else:
            raise BuildError(f"parameter {i} is {kind}: a scalar of this type cannot be passed on the host")
    return (
        "#include <stdint.h>\n"
        f"extern void {name}({', '.join(types)});\n"
        "void triton_dist_program(const int64_t *arguments, const int32_t grid[3], const int32_t program[3]) {\n"
        f"  {name}({', '.join(values)});\n}}\n"
    )
