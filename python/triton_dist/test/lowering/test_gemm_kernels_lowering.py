"""The kernels that send partial products compile for sm_90, on a machine that needs no GPU, and order what they send."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton_dist.kernels import gemm_allreduce, gemm_reduce_scatter  # noqa: F401

CONSTANTS = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, EVEN_K=True, stride_ak=1, stride_bn=1)
TYPES = dict(a="*fp16", b="*fp16", out="*fp16", gathered="*fp16", staging="*fp32", ctx="*i64")
TYPES.update(dict.fromkeys(("ready", "done", "result", "calls"), "*i32"))
kernels = {}
for name in ("gemm_reduce_scatter", "gemm_allreduce"):
    module = sys.modules["triton_dist.kernels." + name]
    kernels.update({k: v for k, v in vars(module).items() if k.endswith("_kernel")})
ptx = {}
for name, kernel in kernels.items():
    names = kernel.arg_names
    signature = {n: "constexpr" if n in CONSTANTS else TYPES.get(n, "i32") for n in names}
    constants = {(names.index(n),): v for n, v in CONSTANTS.items()}
    aligned = [i for i, n in enumerate(names) if n in TYPES or n in ("M", "N", "K", "stride_am", "stride_bk", "stride_om")]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": 8, "num_stages": 3}
    ptx[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
json.dump(ptx, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    out = tmp_path_factory.mktemp("gemm") / "ptx.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_DIST_BACKEND": "nvidia"}
    environment.pop("TRITON_INTERPRET", None)
    code = out.with_name("compile_gemm.py")
    code.write_text(COMPILE)
    done = subprocess.run([sys.executable, code, out], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "kernel", ["gemm_reduce_scatter_kernel", "gemm_allreduce_one_shot_kernel", "gemm_allreduce_two_shot_kernel"]
)
def test_a_kernel_multiplies_on_tensor_cores_and_signals_at_system_scope(compiled, kernel):
    ptx = compiled[kernel]
    assert "wgmma.mma_async" in ptx
    assert "st.global.v4" in ptx
    lines = ptx.splitlines()
    assert any(".release" in line and ".sys" in line for line in lines)
    assert any(".acquire" in line and ".sys" in line for line in lines)
