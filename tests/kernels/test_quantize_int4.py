"""Quantization to 4 bits equals its plain PyTorch oracle bit for bit, recovers weights on a grid of 4 bits, and is
nearer to other weights than simpler methods."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.linear_int4 import GROUP_SIZE, quantize, quantize_int4
from inferd.kernels.ops.quantized import Matrix

pytestmark = pytest.mark.usefixtures("implementation")

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 32), (16, 32), (77, 96), (200, 1024), (64, 4096)]
"""(out, in)."""
Quantized = tuple[Tensor, Tensor, Tensor]


def dequantized(quantized: Quantized) -> Tensor:
    q, scales, minimums = quantized
    return Matrix(q, scales, None, minimums=minimums).dequantized()


def error(found: Tensor, weight: Tensor) -> float:
    """Squared error relative to the squares of the weights."""
    return float((found - weight.double()).square().sum() / weight.double().square().sum())


def spread(weight: Tensor) -> Quantized:
    """The usual method: the smallest weight becomes 0 and the largest 15."""
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    minimums = groups.amin(2).to(torch.float16)
    scales = ((groups.amax(2) - minimums) / 15).to(torch.float16)
    q = ((groups - minimums.unsqueeze(2)) / scales.unsqueeze(2)).round().clamp(0, 15)
    return q.flatten(1).to(torch.uint8), scales, minimums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_equals_the_reference(dtype: torch.dtype, out_size: int, in_size: int) -> None:
    weight = (torch.randn(out_size, in_size) + torch.randn(out_size, 1)).to(dtype)
    weight[0, :32] = 0
    weight[-1, -32:] = 0.3
    for found, expected in zip(quantize_int4(weight), quantize.reference(weight), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_weights_on_a_grid_are_found_again() -> None:
    q = torch.randint(0, 16, (64, 256), dtype=torch.uint8)
    q.unflatten(1, (-1, GROUP_SIZE))[:, :, 3:5] = torch.tensor([0, 15], dtype=torch.uint8)
    scales = (torch.rand(64, 8) + 0.5).to(torch.float16)
    minimums = (torch.randn(64, 8) * 8).to(torch.float16)
    found = quantize_int4(dequantized((q, scales, minimums)).float())
    assert torch.equal(found[0], q) and torch.equal(found[1], scales)
    assert (found[2].float() - minimums.float()).abs().max() <= 2**-10 * minimums.float().abs().max()


def test_weights_are_nearer_than_by_simpler_methods() -> None:
    weight = torch.randn(256, 1024)
    found = error(dequantized(quantize_int4(weight)), weight)
    assert found < 0.00525
    assert error(dequantized(spread(weight)), weight) > 1.2 * found
    q, scales, minimums = quantize_int4(weight)
    assert error(dequantized((q, scales, minimums + scales / 4)), weight) > 1.2 * found


@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
def test_the_magnitude_of_weights_does_not_matter(magnitude: float) -> None:
    weight = torch.randn(64, 256) * magnitude
    assert error(dequantized(quantize_int4(weight)), weight) < 0.0054


def test_weights_that_lie_close_together_become_their_smallest() -> None:
    weight = torch.full((2, 32), 0.75)
    weight[1] = torch.linspace(0, 1e-31, 32)
    q, scales, minimums = quantize_int4(weight)
    assert not q.any() and not scales.any()
    assert minimums.flatten().tolist() == [0.75, 0.0]


def test_groups_that_hold_no_numbers_have_no_scale() -> None:
    weight = torch.randn(16, 64)
    weight[3, 40], weight[5, 1], weight[6, 2] = torch.nan, torch.inf, -torch.inf
    q, scales, minimums = quantize_int4(weight)
    is_spoilt = torch.zeros((16, 2), dtype=torch.bool)
    is_spoilt[3, 1] = is_spoilt[5, 0] = is_spoilt[6, 0] = True
    assert torch.equal(scales.isnan(), is_spoilt) and torch.equal(minimums.isnan(), is_spoilt)
    assert not q.unflatten(1, (-1, GROUP_SIZE))[is_spoilt].any()
