"""product against torch in float64: on cpu by torch, on nvidia by cuBLASLt where it takes the operands."""

import pytest

import triton_dist

import torch

from triton_dist.kernels.library_product import product

ON_GPU = triton_dist.backend == "nvidia"
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = [(64, 32, 16), (256, 136, 72), (101, 77, 51), (1, 1, 1), (1, 40, 8), (40, 1, 8), (8, 8, 0), (0, 8, 8)]
WAYS = ["rows", "columns", "apart"]  # how a matrix lies

pytestmark = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def matrix(rows, columns, dtype, way, *seed):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(hash((rows, columns, *seed)) % 2**31)).to(dtype)
    values = values.to(DEVICE)
    if way == "columns":
        return values.T.contiguous().T
    if way == "apart":
        wide = torch.full((rows, columns + 8), float("nan"), dtype=dtype, device=DEVICE)
        wide[:, :columns] = values
        return wide[:, :columns]
    return values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spare", [False, True])
def test_a_product_onto_a_matrix_is_rounded_once(shape, dtype, spare):
    M, N, K = shape
    for a_way in WAYS:
        for b_way in WAYS:
            for c_way, out_way in (("rows", "rows"), ("apart", "rows"), ("rows", "apart")):
                a, b, c = matrix(M, K, dtype, a_way, 1), matrix(K, N, dtype, b_way, 2), matrix(M, N, dtype, c_way, 3)
                out = matrix(M, N, dtype, out_way, 4).fill_(float("nan"))
                for given in (c, None):
                    product(a, b, out.fill_(float("nan")), given, spare)
                    c_or_0 = torch.zeros_like(c) if given is None else c
                    exact = c_or_0.double() + a.double() @ b.double()
                    terms = c_or_0.abs().double() + a.abs().double() @ b.abs().double()
                    bound = torch.finfo(dtype).eps * exact.abs() + (K + 1) * 2.0**-22 * terms
                    assert ((out.double() - exact).abs() <= bound).all(), (a_way, b_way, c_way, out_way)


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_the_library_takes_aligned_operands_and_leaves_the_matrix_alone():
    from triton_dist.backends import nvidia_blas

    for way in ("rows", "columns"):
        a, b, c = (matrix(*shape, torch.bfloat16, way) for shape in ((256, 64), (64, 136), (256, 136)))
        c = c.contiguous()
        before, out = c.clone(), torch.full_like(c, float("nan"))
        for multiprocessors in (0, 100):
            assert nvidia_blas.product(a, b, out.fill_(float("nan")), c, multiprocessors)
            assert torch.equal(c, before)
            assert torch.allclose(out.float(), c.float() + a.float() @ b.float(), rtol=1e-2, atol=1e-2)
