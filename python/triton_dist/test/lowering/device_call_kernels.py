"""Lowers kernels that call aclshmem's device functions; run by the interpreter of the Ascend toolchain's environment:
`python device_call_kernels.py FOLDER`. Writes {case: {"ttadapter": text, "log": text}} to FOLDER/cases.json."""

import json
import sys
from pathlib import Path

import triton
import triton.language as tl

import triton_dist.language as dl
from third_party.ascend.aclshmem import words as aclshmem
from third_party.ascend.lowering import to_ttadapter

GET, ALL = tl.constexpr("get"), tl.constexpr(64)


@triton.jit
def exchange(x, inbox, out, sig, n, pe, ctx, BLOCK: tl.constexpr):
    """A block to the peer over aclshmem, its block awaited by an ordinary wait."""
    lanes = tl.arange(0, BLOCK)
    tl.store(x + lanes, tl.load(out + lanes) + 1)
    aclshmem.put_signal_nbi(inbox + n * 3, x, n, sig, 7, pe)
    dl.wait(sig, 7, ctx)
    tl.store(out + lanes, tl.load(inbox + lanes) * 2)


@triton.jit
def read_peer(x, out, n, pe, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    aclshmem.get_nbi(out, x + 5, n, pe)
    aclshmem.quiet()
    tl.store(x + lanes, tl.load(out + lanes))


@triton.jit
def put_in_a_loop(x, inbox, n, world, BLOCK: tl.constexpr):
    for pe in range(world):
        aclshmem.put_nbi(inbox + pe * BLOCK, x, n, pe)
    aclshmem.quiet()


@triton.jit
def no_call(x, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes))


@triton.jit
def tile(a, b, c, inbox, pe, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    at = lanes[:, None] * BLOCK + lanes[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)).to(tl.float16))
    aclshmem.put_nbi(inbox, c, BLOCK * BLOCK, pe)


@triton.jit
def other_dtype(x, inbox, n, pe):
    aclshmem.put_nbi(inbox, x, n, pe)


@triton.jit
def wide_signal(x, inbox, sig, n, pe):
    aclshmem.put_signal_nbi(inbox, x, n, sig, 1, pe)


HALF = {"x": "*fp16", "inbox": "*fp16", "out": "*fp16"}
CASES = {
    "exchange": (exchange, {**HALF, "sig": "*i32", "n": "i32", "pe": "i32", "ctx": "*i64"}, {"BLOCK": 256}),
    "exchange_fp32": (
        exchange,
        {"x": "*fp32", "inbox": "*fp32", "out": "*fp32", "sig": "*i32", "n": "i64", "pe": "i32", "ctx": "*i64"},
        {"BLOCK": 64},
    ),
    "read_peer": (read_peer, {"x": "*bf16", "out": "*bf16", "n": "i32", "pe": "i32"}, {"BLOCK": 128}),
    "put_in_a_loop": (put_in_a_loop, {"x": "*i8", "inbox": "*i8", "n": "i32", "world": "i32"}, {"BLOCK": 512}),
    "no_call": (no_call, {"x": "*fp16", "out": "*fp16"}, {"BLOCK": 64}),
    "tile": (tile, {"a": "*fp16", "b": "*fp16", "c": "*fp16", "inbox": "*fp16", "pe": "i32"}, {"BLOCK": 64}),
    "other_dtype": (other_dtype, {"x": "*fp16", "inbox": "*fp32", "n": "i32", "pe": "i32"}, {}),
    "wide_signal": (wide_signal, {"x": "*fp16", "inbox": "*fp16", "sig": "*i64", "n": "i32", "pe": "i32"}, {}),
}

if __name__ == "__main__":
    told = {}
    for name, (kernel, signature, constants) in CASES.items():
        lowered = to_ttadapter(kernel, signature, constants)
        told[name] = {"ttadapter": lowered.ttadapter, "log": lowered.log}
    Path(sys.argv[1], "cases.json").write_text(json.dumps(told))
