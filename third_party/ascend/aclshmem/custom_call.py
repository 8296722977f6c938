"""Rewrites the calls of words.py in triton-ascend's `ttadapter` text so that the compiler keeps them. Needs Python alone.

triton-ascend 3.2 leaves a call of a library as `tt.extern_elementwise`, which bishengir-compile does not take. It does
take `hivm.hir.custom` with the symbol's name, and its final HIVM calls `_mlir_ciface_<symbol>`.

One more thing is mended here. An address is `memref.extract_aligned_pointer_as_index` of the pointer's memref, and MLIR
defines that without the memref's offset: `(x + n).to(tl.int64)` would be the address of x. Here it becomes the address of
the kernel's argument, which has no offset, plus the offset in bytes.
"""

import re

LIBRARY = "triton_dist_aclshmem"

_EXTERN = re.compile(
    r"^(?P<indent>\s*)(?P<result>%[\w#]+) = tt\.extern_elementwise (?P<operands>[^{]*?)\s*\{(?P<attributes>[^}]*)\} : "
    r"\((?P<types>[^)]*)\) -> (?P<returns>\S+)$"
)
_ADDRESS = re.compile(
    r"^(?P<indent>\s*)(?P<result>%[\w#]+) = memref\.extract_aligned_pointer_as_index (?P<source>%[\w#]+) : "
)
_VIEW = re.compile(
    r"^\s*(?P<result>%[\w#]+) = memref\.reinterpret_cast (?P<base>%[\w#]+) to offset: \[(?P<offset>[^\]]*)\]"
    r".* : (?P<type>memref<\?x(?P<element>\w+)>) to "
)
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}


class RewriteError(ValueError):
    """A call that cannot be compiled right; the text says why and what to do."""


def rewrite(text):
    """`text` with every call of words.py as `hivm.hir.custom` and with whole addresses; unchanged when there is none."""
    if f'libname = "{LIBRARY}"' not in text:
        return text
    if re.search(r"\blinalg\.\w*matmul|\bhivm\.hir\.\w*(matmul|mmad)|mix_mode = \"(mix|aic)\"", text):
        raise RewriteError(
            "aclshmem's device functions in a kernel with tl.dot: the compiler splits such a kernel, and its vector half runs "
            "twice a program, so the call would be made twice and unordered with the tile. Make it in a kernel of its own"
        )
    out, pointers, views = [], set(), {}
    for line in text.splitlines(keepends=True):  # a name's definition precedes its uses; sibling regions reuse names
        if re.match(r"\s*func\.func ", line):
            pointers, views = set(re.findall(r"(%arg\d+): memref<", line)), {}
        elif found := _VIEW.match(line):
            views[found["result"]] = found
        if LIBRARY in line:
            line = _custom(line)
        elif found := _ADDRESS.match(line):
            line = _whole_address(line, found, pointers, views)
        out.append(line)
    return "".join(out)


def _custom(line):
    found = _EXTERN.match(line.rstrip("\n"))
    symbol = re.search(r'\bsymbol = "(\w+)"', found["attributes"]) if found else None
    if symbol is None:
        raise RewriteError(f"a call of {LIBRARY} is not written as triton-ascend 3.2.0 writes it: {line.strip()}")
    if "tensor<" in found["types"]:
        raise RewriteError(f"{symbol[1]} takes scalars; this call has a block: {found['types']}")
    return (
        f"{found['indent']}hivm.hir.custom {{hivm.is_distributed, hivm.pipe = #hivm.pipe<PIPE_S>, "
        "hivm.tcore_type = #hivm.tcore_type<VECTOR>, hivm.vf_mode = #hivm.vf_mode<SIMD>, "
        f'symbol = "{symbol[1]}"}} "dist.{symbol[1]}" ins({found["operands"].strip()} : {found["types"]})\n'
    )


def _whole_address(line, found, pointers, views):
    source, result, indent = found["source"], found["result"], found["indent"]
    if source in pointers:
        return line
    view = views.get(source)
    itemsize = _BYTES.get(view["element"]) if view else None
    if itemsize is None or view["base"] not in pointers:
        raise RewriteError(
            f"the address of {source} ({line.strip()}) is not that of an argument plus an offset: its offset would be lost. "
            "Give the call a pointer that was computed from a kernel's argument"
        )
    name, offset = result.lstrip("%"), view["offset"].strip()
    lines = [f"%{name}_base = memref.extract_aligned_pointer_as_index {view['base']} : {view['type']} -> index"]
    if not offset.startswith("%"):
        lines.append(f"%{name}_elements = arith.constant {offset} : index")
        offset = f"%{name}_elements"
    lines.append(f"%{name}_itemsize = arith.constant {itemsize} : index")
    lines.append(f"%{name}_bytes = arith.muli {offset}, %{name}_itemsize : index")
    lines.append(f"{result} = arith.addi %{name}_base, %{name}_bytes : index")
    return "".join(f"{indent}{one}\n" for one in lines)
