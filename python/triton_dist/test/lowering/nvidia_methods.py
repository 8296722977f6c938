"""Compiles the kernels of the methods for NVIDIA GPUs, in the shipped configurations, for sm_90 and writes what they became as
JSON: `python nvidia_methods.py OUT`. Run with TRITON_DIST_BACKEND=nvidia in a process of its own; needs no GPU."""

import os

os.environ["TRITON_DIST_BACKEND"] = "nvidia"

import triton_dist  # noqa: F401, I001

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_dist.kernels import all_reduce_sentinel as sentinel
from triton_dist.kernels import moe_combine_pipelined as combine
from triton_dist.kernels import moe_dispatch_pipelined as dispatch
from triton_dist.kernels import moe_dispatch_pipelined_tokens as in_place
from triton_dist.kernels.all_reduce_flagged import BLOCK, NUM_WARPS, flagged_kernel
from triton_dist.kernels.all_reduce_pipelined import BLOCK_BYTES, PARTS, pipelined_kernel
from triton_dist.kernels import gemm_allreduce_columns as reduced
from triton_dist.kernels.gemm_allreduce_tma import gemm_allreduce_tma_kernel
from triton_dist.kernels.gemm_reduce_scatter_columns import ADD, add_others_kernel
from triton_dist.kernels.gemm_reduce_scatter_tma import gemm_reduce_scatter_tma_kernel
from triton_dist.kernels.gemm_tma import CONFIG
from triton_dist.kernels.moe_combine import moe_combine_kernel

MULTIPROCESSORS = 132  # of an H200
POINTERS = {
    "i32": "ready result calls epochs state origin number rows filled read ids owners first_expert out_counts out_origin "
    "out_map out_tokens out_rows totals counts begun arrived counted numbered mapped sent partial base map tokens goes "
    "index".split(),
    "i64": ["ctx"],
    "fp32": ["weights"],
}
ALIGNED = "M N K n slot words stride_om stride_y stride_out stride_x H".split()


def compiled(kernel, constants, options, types, aligned=ALIGNED):
    """`usage` of a kernel, compiled for arguments of these types; those in `aligned` are multiples of 16."""
    kinds = {name: f"*{dtype}" for dtype, names in POINTERS.items() for name in names} | types
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    hinted = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*") or n in aligned]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in hinted})
    return usage(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def usage(made):
    """{ptx, shared (bytes), registers, spills (bytes), threads} of a compiled kernel."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return {
        "ptx": made.asm["ptx"],
        "shared": made.metadata.shared,
        "registers": used["REG"],
        "spills": used["STACK"] + used["LOCAL"],
        "threads": 32 * made.metadata.num_warps,
    }


def shipped(config, **more):
    """(constexprs, options) of a config."""
    options = {name: config[name] for name in ("num_warps", "maxnreg") if name in config}
    return {name: value for name, value in config.items() if name not in options} | more, options


def moe_pipelined():
    """The kernels of mixtures of experts for 4096 tokens of 4096 columns in 16 bits, and 128 of 7168 sent as fp8."""
    results = {}
    for size, tokens, hidden, columns, payload in (("", 4096, 4096, 128, "*bf16"), (" few", 128, 7168, 512, "*fp8e4nv")):
        config, _ = dispatch.pipelined_config(tokens, hidden)
        constants, options = shipped(config, K_PAD=8, COLUMNS=columns, FP8=payload == "*fp8e4nv", stride_k=1)
        types = dict(x="*bf16", out=payload, inbox=payload, scales="*fp32", out_scales="*fp32")
        results[f"dispatch pipelined{size}"] = compiled(dispatch.moe_dispatch_pipelined_kernel, constants, options, types)
        config, _ = in_place.pipelined_tokens_config(tokens, hidden)
        constants, options = shipped(config, K_PAD=8, COLUMNS=columns, FP8=payload == "*fp8e4nv", stride_k=1)
        results[f"dispatch tokens{size}"] = compiled(in_place.moe_dispatch_tokens_kernel, constants, options, types)
        constants, options = shipped(combine.pipelined_config(tokens, hidden)[0], TOPK=8, stride_wk=1)
        types = dict.fromkeys(("y", "out", "returned"), "*bf16")
        results[f"combine pipelined{size}"] = compiled(combine.moe_combine_pipelined_kernel, constants, options, types)
    return results


def main(out):
    options = {name: CONFIG[name] for name in ("num_warps", "num_stages")}
    tiles = {name: value for name, value in CONFIG.items() if name not in options}
    m, n, k = tiles["BLOCK_M"], tiles["BLOCK_N"], tiles["BLOCK_K"]
    results = {}
    for name, kernel in (("scatter", gemm_reduce_scatter_tma_kernel), ("all", gemm_allreduce_tma_kernel)):
        types = dict.fromkeys(("out", "staging", "gathered"), "*bf16")
        types.update(a=f"tensordesc<bf16[{m},{k}]>", b=f"tensordesc<bf16[{k},{n}]>")
        results[f"tma {name}"] = compiled(kernel, {**tiles, "B_TRANSPOSED": False}, options, types)
    types = dict.fromkeys(("own", "parts", "out"), "*bf16")
    results["added"] = compiled(add_others_kernel, *shipped(ADD, ME=0, WORLD=2), types)
    types = dict(out="*bf16", gathered="*bf16", words="*i32", pieces="*i32")
    for name, kernel in (("put last", reduced.put_last_kernel), ("gather", reduced.gather_kernel)):
        results[name] = compiled(kernel, *shipped(reduced.tiles()), types)
        results[f"{name} ragged"] = compiled(kernel, *shipped(reduced.tiles()), types, aligned=())
    results["await"] = compiled(reduced.await_kernel, {}, {"num_warps": 1}, types)
    types = dict(x="*bf16", out="*bf16", staging="*u64")
    results["flagged"] = compiled(flagged_kernel, dict(OP="sum", WORLD=2, BLOCK=BLOCK), {"num_warps": NUM_WARPS}, types)
    for module in (sentinel, dispatch, in_place, combine):
        module.device_programs = lambda: MULTIPROCESSORS  # there may be no device to ask
    words, warps, programs = sentinel.default_config()
    constants = dict(OP="sum", WORLD=2, BLOCK=words, PROGRAMS=programs)
    types = dict(x="*bf16", out="*bf16", staging="*u32")
    results["sentinel"] = compiled(sentinel.sentinel_kernel, constants, {"num_warps": warps}, types)
    constants = dict(OP="sum", WORLD=2, BLOCK=BLOCK_BYTES // 2, PARTS=PARTS, IN_PLACE=False)
    types = dict.fromkeys(("x", "out", "staging"), "*bf16")
    results["pipelined"] = compiled(pipelined_kernel, constants, {"num_warps": 16}, types)
    results.update(moe_pipelined())
    types = dict.fromkeys(("y", "out", "returned"), "*bf16")
    constants = dict(BLOCK_T=1, BLOCK_H=4096, TOPK=8)
    results["combine"] = compiled(moe_combine_kernel, constants, {"num_warps": 8}, types)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
