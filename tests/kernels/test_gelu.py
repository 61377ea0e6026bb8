"""Both forms of gelu agree with torch's own in fp64, with the same bits for any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.gelu import gelu, gelu_erf

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_is_torchs_tanh_form(dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 999).reshape(27, 37).to(dtype)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    ours = gelu(x)
    assert ours.dtype == dtype
    assert torch.allclose(ours.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_is_torchs_exact_form(dtype: torch.dtype) -> None:
    x = torch.linspace(-10, 10, 9999).reshape(-1, 33).to(dtype)
    ours, expected = gelu_erf(x), torch.nn.functional.gelu(x.double())
    assert ours.dtype == dtype
    # 1 + erf cancels in the plain form: torch's own result in fp32 is as far from fp64.
    assert torch.allclose(ours.double(), expected, rtol=TOLERANCE[dtype], atol=max(TOLERANCE[dtype] / 10, 4e-7))


def test_the_forms_differ() -> None:
    x = torch.linspace(-8, 8, 999)
    assert not torch.allclose(gelu(x), torch.nn.functional.gelu(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(gelu_erf(x), torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-6, atol=1e-6)


def test_the_exact_form_is_zero_far_below_and_the_number_far_above() -> None:
    x = torch.tensor([-1e30, -50.0, -7.0, 7.0, 50.0, 1e30])
    ours = gelu_erf(x)
    assert torch.equal(ours[3:], x[3:])
    assert ours[:2].abs().max() == 0 and ours[2].abs() < 1e-10
    assert gelu_erf(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("form", [gelu, gelu_erf])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_alone_and_among_others(form: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(65, 203).to(dtype)
    whole = form(x)
    for row in (0, 31, 64):
        assert torch.equal(form(x[row : row + 1]), whole[row : row + 1])
