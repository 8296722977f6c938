"""Arithmetic in the interpreter equals torch's, in every float type that Triton has."""

import pytest
import torch

import triton_dist
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton_dist.interpreted, reason="checks the CPU engine; kernels are compiled here")

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]
SIZE = 1024


def values(dtype, seed, shape=(SIZE,)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(4).to(dtype)


def poison(dtype, shape=(SIZE,)):
    return torch.full(shape, float("nan")).to(dtype)


def same(a, b):
    return torch.equal(a.float().nan_to_num(nan=12345.0), b.float().nan_to_num(nan=12345.0))


@triton.jit
def arithmetic(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "add":
        r = x + y
    elif OP == "sub":
        r = x - y
    elif OP == "mul":
        r = x * y
    elif OP == "max":
        r = tl.maximum(x, y)
    elif OP == "min":
        r = tl.minimum(x, y)
    elif OP == "neg":
        r = -x
    elif OP == "abs":
        r = tl.abs(x)
    elif OP == "where":
        r = tl.where(x > y, x, y)
    else:
        r = x * 2
    tl.store(out_ptr + i, r)


TORCH = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "twice": lambda x, y: x * 2,
}


# Triton itself refuses max, min and abs of fp8
ELEMENTWISE = [(d, op) for d in FLOATS for op in TORCH if d.itemsize > 1 or op not in ("max", "min", "abs")]


@pytest.mark.parametrize("dtype, op", ELEMENTWISE, ids=str)
def test_elementwise_arithmetic_rounds_as_torch_does(dtype, op):
    x, y, out = values(dtype, 1), values(dtype, 2), poison(dtype)
    arithmetic[(1,)](x, y, out, op, SIZE)
    expected = TORCH[op](x.float(), y.float()).to(dtype)
    assert same(out, expected)


@triton.jit
def cast(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


SOURCES = [*FLOATS, torch.int32, torch.int64, torch.float64]
TARGETS = [*FLOATS, torch.int32, torch.int8, torch.float64]
# Triton itself refuses casts between fp8 and integers or fp64
CASTS = [
    (s, t)
    for s in SOURCES
    for t in TARGETS
    if not any(a.itemsize == 1 and a.is_floating_point and b not in FLOATS for a, b in ((s, t), (t, s)))
]


@pytest.mark.parametrize("source, target", CASTS, ids=str)
def test_casts_equal_torch(source, target):
    # e5m2 and e4m3fn overflow to inf and nan in torch; the values here stay inside both
    x = (values(torch.float32, 3) * 3).to(source)
    out = torch.zeros(SIZE, dtype=target)
    cast[(1,)](x, out, SIZE)
    # through fp32, as Triton converts between small floats
    expected = x.to(target) if source in (torch.float64, torch.int64, torch.int32) else x.float().to(target)
    assert same(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rounding_of_every_tie_is_to_even(dtype):
    bits = torch.arange(0, 256 if dtype.itemsize == 1 else 1 << 15, dtype=torch.int32)
    view = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    grid = bits.to(view).view(dtype).float()
    grid = grid[grid.isfinite() & (grid >= 0)].unique()
    ties = (grid[:-1] + grid[1:]) / 2  # exact in fp32
    ties = ties[: len(ties) // SIZE * SIZE or len(ties)]
    padded = torch.zeros(triton.next_power_of_2(len(ties)))
    padded[: len(ties)] = ties
    out = poison(dtype, (len(padded),))
    cast[(1,)](padded, out, len(padded))
    assert same(out, padded.to(dtype))


@triton.jit
def reduce(x_ptr, out_ptr, OP: tl.constexpr, AXIS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    if OP == "sum":
        r = tl.sum(x, AXIS)
    elif OP == "max":
        r = tl.max(x, AXIS)
    else:
        r = tl.min(x, AXIS)
    tl.store(out_ptr + i, r.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_reductions_equal_torch(dtype, op, axis):
    x = values(dtype, 4, (64, 64))
    out = poison(dtype, (64,))
    reduce[(1,)](x, out, op, axis, 64)
    if op == "sum":
        expected = x.float().sum(axis).to(dtype)
        # one rounding of a fp32 sum whose order is free: 64 additions of values up to 20
        bound = 64 * 20 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps * expected.float().abs()
        assert ((out.float() - expected.float()).abs() <= bound).all()
    else:
        assert same(out, getattr(x.float(), "a" + op)(axis).to(dtype))


@triton.jit
def scan(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.cumsum(tl.load(x_ptr + i), 0))


def test_cumsum_of_bfloat16_does_not_add_bit_patterns():
    x = torch.ones(128, dtype=torch.bfloat16)
    out = poison(torch.bfloat16, (128,))
    scan[(1,)](x, out, 128)
    assert torch.equal(out, torch.arange(1, 129).bfloat16())


@triton.jit
def dot(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    if TRANSPOSED:
        b = tl.trans(tl.load(b_ptr + n[:, None] * K + k[None, :]))
    else:
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    acc = tl.full((M, N), 1.0, tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, acc))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dot_accumulates_in_fp32(dtype, transposed):
    a, b = values(dtype, 5, (32, 64)), values(dtype, 6, (16, 64) if transposed else (64, 16))
    out = poison(torch.float32, (32, 16))
    dot[(1,)](a, b, out, 32, 16, 64, transposed)
    wide = (b.T if transposed else b).double()
    expected = a.double() @ wide + 1
    bound = 64 * torch.finfo(torch.float32).eps * (a.double().abs() @ wide.abs() + 1)
    assert ((out.double() - expected).abs() <= bound).all()


@triton.jit
def dot_int8(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), out_dtype=tl.int32))


def test_integer_dot_is_exact():
    a, b = (torch.randint(-128, 128, (64, 64), dtype=torch.int8) for _ in range(2))
    out = torch.full((64, 64), -1, dtype=torch.int32)
    dot_int8[(1,)](a, b, out, 64)
    assert torch.equal(out, a.int() @ b.int())


@triton.jit
def ragged_gemm(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        inside = k[None, :] + start < K
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :], mask=(m[:, None] < M) & inside, other=0.0)
        b_mask = (start + k[:, None] < K) & (n[None, :] < N)
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("shape", [(100, 77, 51), (1, 1, 1), (33, 64, 32), (31, 95, 129)], ids=str)
def test_masked_gemm_of_ragged_sizes(shape, dtype):
    m, n, k = shape
    a, b = values(dtype, 7, (m, k)), values(dtype, 8, (k, n))
    c = poison(dtype, (m, n))
    ragged_gemm[(triton.cdiv(m, 32), triton.cdiv(n, 32))](a, b, c, m, n, k, 32)
    expected = a.double() @ b.double()
    bound = k * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())
    bound += torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).tiny
    assert ((c.double() - expected).abs() <= bound).all()
