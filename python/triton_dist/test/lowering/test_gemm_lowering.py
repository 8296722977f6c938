"""The AllGather-GEMM kernels of the operator and of tutorial 01 in PTX for sm_90, compiled without a GPU."""

import pytest

from .compiled_apart import compiled_by
from .ptx import parse, where

KERNELS = ["operator fp16", "operator bf16", "tutorial fp16", "tutorial bf16"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_by("gemm_kernels.py", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", KERNELS)
def test_the_product_runs_on_the_matrix_units(compiled, name):
    assert where(parse(compiled[name]), "wgmma", "mma_async")


@pytest.mark.parametrize("name", KERNELS)
def test_signals_are_acquired_and_released_at_system_scope(compiled, name):
    code = parse(compiled[name])
    released = where(code, "atom", "sys", "release") + where(code, "red", "sys", "release")
    acquired = where(code, "ld", "sys", "acquire") + where(code, "atom", "sys", "acquire")
    assert len(released) == 3, "two puts (the first round's and the next one's) and the acknowledgement"
    assert len(acquired) >= 3, "a wait before each put and before a peer's chunk"


@pytest.mark.parametrize("name", KERNELS)
def test_chunks_are_put_16_bytes_at_a_time(compiled, name):
    assert where(parse(compiled[name]), "st", "global", "v4")
