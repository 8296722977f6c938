"""The ttadapter IR without what only an NPU has: text in, text out, for the MLIR passes that end in LLVM's dialect.

    hivm.hir.pointer_cast           an integer becomes a pointer: llvm.inttoptr and a descriptor
    gpu.barrier, sync_block_*       a call of the host's fence (runtime.c)
    linalg.generic with
      GenericAtomicRMW              a loop of memref.atomic_rmw: atomic between the threads and processes of the host
    call @triton_cumsum             a loop
    annotation.mark                 nothing
"""

import itertools
import re

FENCE = "triton_dist_fence"

# Functions of runtime.c. MLIR's own lowering of the float atomics is not valid LLVM.
_FLOAT_ATOMIC = {"maximumf": "triton_dist_atomic_max_f32", "minimumf": "triton_dist_atomic_min_f32"}
_FUNCTIONS = {FENCE: "()", **dict.fromkeys(_FLOAT_ATOMIC.values(), "(i64, f32)")}

# GenericAtomicRMW -> memref.atomic_rmw, for integers and floats
_ATOMICS = {
    "add": ("addi", "addf"),
    "fadd": (None, "addf"),
    "max": ("maxs", "maximumf"),
    "min": ("mins", "minimumf"),
    "umax": ("maxu", None),
    "umin": ("minu", None),
    "and": ("andi", None),
    "or": ("ori", None),
    "exch": ("assign", "assign"),
}
_DESCRIPTOR = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>"


class NotForTheHost(Exception):
    """The IR has an operation that this file does not know how to do on the host; the text names it."""


def to_host(ttadapter):
    """Returns the text of the module with nothing of the `hivm` dialect left."""
    text = re.sub(r" attributes \{SyncBlock[^}]*\}", "", ttadapter)
    text = re.sub(r"\} \{[^{}\n]*\bhivm\.(unlikely_condition|parallel_loop)\b[^{}\n]*\}$", "}", text, flags=re.M)  # hints
    text = _cumsums(_atomics(text))
    lines = []
    for line in text.splitlines():
        if found := _POINTER_CAST.fullmatch(line):
            lines += _pointer_cast(*found.groups())
        elif _FENCE.match(line):
            lines.append(f"{line[: len(line) - len(line.lstrip())]}func.call @{FENCE}() : () -> ()")
        elif not line.lstrip().startswith("annotation.mark"):
            lines.append(line)
    text = "\n".join(lines)
    left = sorted(set(re.findall(r"\b(?:hivm|hfusion|tt|gpu)\.(?!tensor_kind)[a-z_.]+", text)))
    if left:
        raise NotForTheHost(f"operations without a host form: {', '.join(left)}")
    for name, kind in _FUNCTIONS.items():
        if f"@{name}(" in text:
            text = text.replace("module {", f"module {{\n  func.func private @{name}{kind}", 1)
    return text


_POINTER_CAST = re.compile(r"(\s*)%(\w+) = hivm\.hir\.pointer_cast\((%\w+)\) \[(%\w+)\] : (memref<\?x\w+>)")
_FENCE = re.compile(r"\s*(gpu\.barrier|hivm\.hir\.sync_block(_set|_wait)?)\b")


def _pointer_cast(indent, result, address, size, kind):
    """A memref of `size` elements at an integer address: its descriptor, field by field."""
    name = f"%pc_{result}"
    lines = [
        f"{name}_p = llvm.inttoptr {address} : i64 to !llvm.ptr",
        f"{name}_n = arith.index_cast {size} : index to i64",
        f"{name}_zero = llvm.mlir.constant(0 : i64) : i64",
        f"{name}_one = llvm.mlir.constant(1 : i64) : i64",
        f"{name}_0 = llvm.mlir.undef : {_DESCRIPTOR}",
    ]
    fields = (("p", "0"), ("p", "1"), ("zero", "2"), ("n", "3, 0"), ("one", "4, 0"))
    for i, (value, place) in enumerate(fields):
        lines.append(f"{name}_{i + 1} = llvm.insertvalue {name}_{value}, {name}_{i}[{place}] : {_DESCRIPTOR}")
    lines.append(f"%{result} = builtin.unrealized_conversion_cast {name}_{len(fields)} : {_DESCRIPTOR} to {kind}")
    return [indent + line for line in lines]


_ATOMIC = re.compile(
    r"^(?P<indent> *)(?P<result>%\w+ = )?linalg\.generic \{indexing_maps = \[(?P<maps>[^\]]*)\], iterator_types = \[[^\]]*\]\} "
    r"ins\((?P<ins>[^\n]*)\) outs\((?P<outs>[^\n]*)\) attrs = +\{[^\n]*GenericAtomicRMW = \"(?P<what>\w+)\"[^\n]*\} \{\n"
    r"(?P<body>.*?)^(?P=indent)\}[^\n]*\n",
    re.S | re.M,
)


def _atomics(text):
    count = itertools.count()
    return _ATOMIC.sub(lambda found: _atomic(found, next(count)), text)


def _atomic(found, number):
    """memory = memory OP value, element by element; the IR says so by a generic that reads and writes one memref."""
    names, kinds = _operands(found["ins"])
    target, target_kinds = _operands(found["outs"])
    if found["result"] or len(names) != 2 or len(set(re.split(r", ", found["maps"]))) != 1 or target != names[:1]:
        raise NotForTheHost(f"an atomic of another form than memory = memory {found['what']} value")
    kind = target_kinds[0]
    element = re.search(r"(\w+)[,>]", kind.split("x")[-1])[1]
    operation = _ATOMICS.get(found["what"], (None, None))[element.startswith(("f", "bf"))]
    if operation is None:
        raise NotForTheHost(f"atomic {found['what']} of {element}")
    rank = kind.split("<")[1].split(",")[0].count("x")
    tag, indent = f"at{number}", found["indent"]
    lines = [f"%{tag}_zero = arith.constant 0 : index", f"%{tag}_one = arith.constant 1 : index"]
    index = [f"%{tag}_i{d}" for d in range(rank)]
    for d in range(rank):
        lines.append(f"%{tag}_d{d} = arith.constant {d} : index")
        lines.append(f"%{tag}_n{d} = memref.dim {names[1]}, %{tag}_d{d} : {kinds[1]}")
    for d, i in enumerate(index):
        lines.append(f"scf.for {i} = %{tag}_zero to %{tag}_n{d} step %{tag}_one {{")
    place = ", ".join(index)
    lines.append(f"%{tag}_v = memref.load {names[1]}[{place}] : {kinds[1]}")
    if operation in _FLOAT_ATOMIC and element == "f32":
        lines += _address(tag, target[0], kind, index)
        lines.append(f"func.call @{_FLOAT_ATOMIC[operation]}(%{tag}_a, %{tag}_v) : (i64, f32) -> ()")
    else:
        types = f"({element}, {kind}) -> {element}"
        lines.append(f"%{tag}_r = memref.atomic_rmw {operation} %{tag}_v, {target[0]}[{place}] : {types}")
    lines += ["}"] * rank
    return "".join(f"{indent}{line}\n" for line in lines)


_CUMSUM = re.compile(
    r"^( *)(%\w+) = call @triton_cumsum\w*\((%\w+), %\w+, (%\w+)\) : \((tensor<(\d+)x(\w+)>), i32, i1\) -> tensor<[^>]*>\n",
    re.M,
)


def _cumsums(text):
    """Sums of the first elements of a vector, in order; by name a function that only the device has."""
    count = itertools.count()
    text = _CUMSUM.sub(lambda found: _cumsum(found, next(count), text), text)
    if "call @triton_cumsum" in text:
        raise NotForTheHost("tl.cumsum of another form than that of a vector")
    return re.sub(r"^ *func\.func private @triton_cumsum.*\n", "", text, flags=re.M)


def _cumsum(found, number, text):
    indent, result, source, reverse, kind, size, element = found.groups()
    if f"{reverse} = arith.constant false" not in text:
        raise NotForTheHost("tl.cumsum in reverse")
    tag, real = f"cs{number}", element.startswith(("f", "bf"))
    lines = [
        f"%{tag}_zero = arith.constant 0 : index",
        f"%{tag}_one = arith.constant 1 : index",
        f"%{tag}_n = arith.constant {size} : index",
        f"%{tag}_none = arith.constant {'0.0' if real else '0'} : {element}",
        f"%{tag}_empty = tensor.empty() : {kind}",
        f"{result}, %{tag}_all = scf.for %{tag}_i = %{tag}_zero to %{tag}_n step %{tag}_one "
        f"iter_args(%{tag}_t = %{tag}_empty, %{tag}_s = %{tag}_none) -> ({kind}, {element}) {{",
        f"  %{tag}_x = tensor.extract {source}[%{tag}_i] : {kind}",
        f"  %{tag}_next = arith.{'addf' if real else 'addi'} %{tag}_s, %{tag}_x : {element}",
        f"  %{tag}_u = tensor.insert %{tag}_next into %{tag}_t[%{tag}_i] : {kind}",
        f"  scf.yield %{tag}_u, %{tag}_next : {kind}, {element}",
        "}",
    ]
    return "".join(f"{indent}{line}\n" for line in lines)


def _address(tag, memref, kind, index):
    """Lines that leave the address of an f32 at memref[index] in %<tag>_a, an i64."""
    rank = len(index)
    names = ", ".join(f"%{tag}_m{i}" for i in range(2 + 2 * rank))
    lines = [
        f"{names} = memref.extract_strided_metadata {memref} : {kind} -> memref<f32>{', index' * (1 + 2 * rank)}",
        f"%{tag}_p = memref.extract_aligned_pointer_as_index {memref} : {kind} -> index",
        f"%{tag}_size = arith.constant 4 : index",
    ]
    offset = f"%{tag}_m1"
    for d, i in enumerate(index):
        lines.append(f"%{tag}_s{d} = arith.muli {i}, %{tag}_m{2 + rank + d} : index")
        lines.append(f"%{tag}_o{d} = arith.addi {offset}, %{tag}_s{d} : index")
        offset = f"%{tag}_o{d}"
    lines.append(f"%{tag}_bytes = arith.muli {offset}, %{tag}_size : index")
    lines.append(f"%{tag}_at = arith.addi %{tag}_p, %{tag}_bytes : index")
    return [*lines, f"%{tag}_a = arith.index_cast %{tag}_at : index to i64"]


def _operands(text):
    """("%a, %b : type, type") -> (names, types)."""
    names, _, kinds = text.partition(" : ")
    return [name.strip() for name in names.split(",")], _split(kinds)


def _split(text):
    """At the commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += c in "<([{"
        depth -= c in ">)]}"
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def parameters(ttadapter):
    """(function name, [MLIR type of each parameter])."""
    found = re.search(r"func\.func @(\w+)\((.*?)\)(?: attributes|\s*\{\n)", ttadapter, re.S)
    kinds = [re.match(r"%arg\d+: (memref<[^>]*>|\w+)", part.strip())[1] for part in _split(found[2])]
    return found[1], kinds
