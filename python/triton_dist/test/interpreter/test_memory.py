"""Strided fast paths move the same bytes as lane-by-lane access, whatever the shape of addresses and masks."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import triton_dist
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton_dist.interpreted, reason="checks the CPU engine; kernels are compiled here")

if triton_dist.interpreted:
    from triton_dist.interpreter.affine import Affine, affine_of, rectangle_of


@triton.jit
def copy_strided(
    x_ptr, y_ptr, start, sm, sn, lo_m, hi_m, lo_n, hi_n,
    OTHER: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    at = start + m * sm + n * sn
    mask = (m >= lo_m) & (m < hi_m) & (n >= lo_n) & (n < hi_n)
    if MASK == "checker":
        mask = mask & ((m + n) % 2 == 0)
    if MASK == "none":
        v = tl.load(x_ptr + at)
    else:
        v = tl.load(x_ptr + at, mask=mask, other=OTHER)
    tl.store(y_ptr + m * N + n, v)
    if MASK != "none":
        tl.store(y_ptr + M * N + m * N + n, v, mask=mask)


DTYPES = [torch.int8, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int32, torch.float32, torch.int64]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sm=st.integers(-20, 20),
    sn=st.integers(-5, 5),
    window=st.tuples(*[st.integers(-2, 18)] * 4),
    mask=st.sampled_from(["none", "rectangle", "checker"]),
)
def test_any_strides_and_masks(dtype, sm, sn, window, mask):
    m, n = 16, 8
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x = torch.arange(1000).to(bits).view(dtype)
    y = torch.zeros(2 * m * n, dtype=bits).view(dtype)
    copy_strided[(1,)](x, y, 500, sm, sn, *window, -3.0 if dtype.is_floating_point else -3, mask, m, n)
    i, j = torch.meshgrid(torch.arange(m), torch.arange(n), indexing="ij")
    expected = x.view(bits)[500 + i * sm + j * sn]
    other = torch.full((1,), -3.0).to(dtype).view(bits) if dtype.is_floating_point else torch.tensor([-3], dtype=bits)
    inside = (i >= window[0]) & (i < window[1]) & (j >= window[2]) & (j < window[3])
    if mask == "checker":
        inside &= (i + j) % 2 == 0
    if mask == "none":
        inside = torch.ones_like(inside)
    got = y.view(bits).view(2, m, n)
    assert torch.equal(got[0], torch.where(inside, expected, other))
    if mask != "none":
        assert torch.equal(got[1], torch.where(inside, expected, 0))


@triton.jit
def store_to_one_address(y_ptr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N) * 0, tl.arange(0, N))


def test_lanes_that_share_an_address_store_in_order():
    y = torch.zeros(1, dtype=torch.int32)
    store_to_one_address[(1,)](y, 16)
    assert y.item() == 15


@triton.jit
def gather(x_ptr, index_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + tl.load(index_ptr + i)))


def test_gather_of_unrelated_addresses():
    x, index, y = torch.randn(500), torch.randint(0, 500, (64,)), torch.zeros(64)
    gather[(1,)](x, index, y, 64)
    assert torch.equal(y, x[index])


@triton.jit
def wrap(y_ptr, big, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, (i + big) * 3)
    tl.store(y_ptr + N + i, (i - 8) // 3)
    tl.store(y_ptr + 2 * N + i, (i - 8) % 3)
    tl.store(y_ptr + 3 * N + i, i % 64)


def test_integer_blocks_wrap_and_divide_as_a_device_does():
    n = 16
    y = torch.zeros(4 * n, dtype=torch.int32)
    wrap[(1,)](y, 2**31 - 8, n)
    i = np.arange(n, dtype=np.int64)
    assert (y[:n].numpy() == ((i + 2**31 - 8) * 3).astype(np.int32)).all()
    assert (y[n : 2 * n].numpy() == np.trunc((i - 8) / 3)).all()
    assert (y[2 * n : 3 * n].numpy() == np.fmod(i - 8, 3)).all()
    assert (y[3 * n :].numpy() == i).all()


@triton.jit
def far(x_ptr, y_ptr, offset, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + offset + i))


def test_offsets_beyond_two_to_the_31():
    x = torch.empty(2**31 + 64, dtype=torch.int8)  # virtual memory: only the touched pages exist
    x[-16:] = torch.arange(16, dtype=torch.int8)
    y = torch.zeros(16, dtype=torch.int8)
    far[(1,)](x, y, 2**31 + 48, 16)
    assert torch.equal(y, torch.arange(16, dtype=torch.int8))


small = st.integers(-9, 9)
shapes = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3)


@given(
    shape=shapes,
    base=small,
    strides=st.tuples(small, small, small),
    bound=small,
    name=st.sampled_from(["lt", "le", "gt", "ge"]),
)
def test_comparison_of_formulas_equals_comparison_of_arrays(shape, base, strides, bound, name):
    a = Affine(base, strides[: len(shape)], shape)
    c = Affine(bound, [0] * len(shape), shape)
    op = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[name]
    for x, y in ((a, c), (c, a)):
        found = x.compare(y, name)
        if found is not None:
            assert (found.array() == op(x.array(np.int64), y.array(np.int64))).all()
            assert (rectangle_of(found.array()).array() == found.array()).all()
    again = affine_of(a.array(np.int64).view(np.uint64))
    assert (again.array(np.int64) == a.array(np.int64)).all()


@pytest.mark.parametrize("seed", range(40))
def test_which_words_a_strided_access_meets(seed):
    rng = random.Random(seed)
    for _ in range(50):
        shape = [rng.randint(0, 4) if rng.random() < 0.1 else rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
        form = Affine(rng.randint(90, 110), [rng.randint(-20, 20) for _ in shape], shape)
        size, nbytes, address = rng.choice([1, 2, 4, 8]), rng.choice([4, 8]), rng.randint(0, 220)
        touched = {int(a) + k for a in form.array(np.int64).ravel() for k in range(size)}
        assert form.meets(size, address, nbytes) == any(address + k in touched for k in range(nbytes))


@triton.jit
def copy_kept(x_ptr, kept_ptr, y_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    scalar = tl.max(tl.load(n + tl.arange(0, 1)), 0) >= 0
    kept = (tl.load(kept_ptr + i) > 0) & scalar
    tl.store(y_ptr + i, tl.load(x_ptr + i * 3, mask=kept, other=-1))


def test_a_mask_joined_with_a_scalar_comparison_is_still_a_mask():
    x, y, kept = torch.arange(24), torch.zeros(8, dtype=torch.int64), torch.tensor([1, 0, 0, 1, 1, 0, 1, 0])
    copy_kept[(1,)](x, kept, y, torch.zeros(1, dtype=torch.int32), N=8)
    assert torch.equal(y, torch.where(kept > 0, x[::3], -1))


@triton.jit
def wide_integers(y_ptr, f_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    big = tl.full((N,), 0x9E3779B97F4A7C15, tl.uint64)
    tl.store(y_ptr + i, big * (i + 1).to(tl.uint64))
    tl.store(f_ptr + i, (i * 0 + 0x3F800000).to(tl.float32, bitcast=True))


def test_unsigned_64_bit_blocks_and_bitcasts_of_formulas():
    n = 16
    y, f = torch.zeros(n, dtype=torch.uint64), torch.zeros(n)
    wide_integers[(1,)](y, f, n)
    expected = [(0x9E3779B97F4A7C15 * (i + 1)) % 2**64 for i in range(n)]
    assert y.numpy().tolist() == expected and torch.equal(f, torch.ones(n))


@triton.jit
def to_half(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float16))


def test_a_cast_does_not_depend_on_the_size_of_the_block():
    for n in (16, 256, 1024):
        x = torch.full((n,), 1 + 2**-11 + 2**-40, dtype=torch.float64)
        y = torch.zeros(n, dtype=torch.float16)
        to_half[(1,)](x, y, n)
        assert torch.equal(y, x.half())


@triton.jit
def load_either(a, b, out, first, BLOCK: tl.constexpr):
    i, j = tl.arange(0, 2), tl.arange(0, BLOCK)
    at = tl.where(i == first, a, b)
    tl.store(out + i[:, None] * BLOCK + j, tl.load(at[:, None] + j))


def test_a_block_of_addresses_far_apart_with_all_other_memory_between():
    """numpy takes a view of them for one that overlaps with whatever lies between."""
    rows = sorted((torch.randn(16) for _ in range(1000)), key=torch.Tensor.data_ptr)
    high = torch.randn(1 << 24)
    assert rows[0].data_ptr() < high.data_ptr()
    for first in (0, 1):
        for a, b in ((rows[0], high), (high, rows[0]), (rows[0], rows[-1])):
            out = torch.full((2, 16), float("nan"))
            load_either[(1,)](a, b, out, first, 16)
            assert torch.equal(out, torch.stack([a[:16], b[:16]] if first == 0 else [b[:16], a[:16]]))
