"""Layer norm agrees with its definition in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.layer_norm import add_layer_norm, layer_norm

pytestmark = pytest.mark.usefixtures("implementation")

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Relative to the largest result: one rounding to the dtype, and in fp32 the rounding of the sums."""


def definition(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double() + bias.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8), (7, 64), (33, 200), (2, 3, 96)])
def test_it_is_its_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = (torch.randn(shape).add_(5.0).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    expected = definition(x, weight, bias)
    allowed = TOLERANCE[dtype] * float(expected.abs().max())
    ours = layer_norm(x, weight, bias, EPS)
    assert ours.dtype == dtype and ours.shape == x.shape
    assert (ours.double() - expected).abs().max() < allowed
    without_bias = definition(x, weight, torch.zeros_like(bias))
    assert (ours.double() - without_bias).abs().max() > allowed
    normed, total = add_layer_norm(x, residual, weight, bias, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, layer_norm(total, weight, bias, EPS))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(65, 200).to(dtype), torch.randn(200).to(dtype), torch.randn(200).to(dtype)
    whole = layer_norm(x, weight, bias, EPS)
    for row in (0, 31, 64):
        assert torch.equal(layer_norm(x[row : row + 1], weight, bias, EPS), whole[row : row + 1])
