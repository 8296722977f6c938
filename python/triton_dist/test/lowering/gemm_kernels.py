"""Compiles kernels of operators and tutorials for sm_90 and writes their PTX as JSON: `python gemm_kernels.py OUT`.

Run with TRITON_DIST_BACKEND=nvidia in a process of its own; needs no GPU.
"""

import os

os.environ["TRITON_DIST_BACKEND"] = "nvidia"

import triton_dist  # noqa: F401, I001

import importlib.util
import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).parents[4]
TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "CHUNK_M": 512, "NUM_BUFFERS": 2, "COPY_BLOCK": 4096}
SIGNALS = ("ready", "done", "epochs")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kind(name, dtype):
    base = name.removesuffix("_ptr")
    if base in ("a", "b", "c", "staging"):
        return f"*{dtype}"
    return {"ctx": "*i64", **dict.fromkeys(SIGNALS, "*i32")}.get(base, "i32")


def ptx(kernel, dtype, even_k):
    constants = {name: value for name, value in {**TILES, "EVEN_K": even_k}.items() if name in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else kind(n, dtype) for n in kernel.arg_names}
    hinted = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*") or n in ("N", "K", "stride_bk")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in hinted}
    source = ASTSource(kernel, signature, constants, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return compiled.asm["ptx"]


def main(out):
    modules = {
        "operator": importlib.import_module("triton_dist.kernels.allgather_gemm"),
        "tutorial": load(ROOT / "tutorials" / "ascend" / "01-ascend-allgather-gemm.py"),
    }
    results = {}
    for name, module in modules.items():
        kernel = module.allgather_gemm_kernel
        for dtype, even_k in (("fp16", True), ("bf16", False)):
            results[f"{name} {dtype}"] = ptx(kernel, dtype, even_k)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
