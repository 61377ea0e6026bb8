"""gelu's tanh form agrees with torch's own in fp64, with the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.gelu import gelu

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_is_torchs_tanh_form(dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 999).reshape(27, 37).to(dtype)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    ours = gelu(x)
    assert ours.dtype == dtype
    assert torch.allclose(ours.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)


def test_it_is_not_the_exact_form() -> None:
    x = torch.linspace(-8, 8, 999)
    assert not torch.allclose(gelu(x), torch.nn.functional.gelu(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    x = torch.randn(65, 203).to(dtype)
    whole = gelu(x)
    for row in (0, 31, 64):
        assert torch.equal(gelu(x[row : row + 1]), whole[row : row + 1])
