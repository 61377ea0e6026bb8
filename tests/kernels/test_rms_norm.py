"""RMS norm agrees with its formula in fp64, and a row has the same bits beside any other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("implementation")

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Relative to the largest result: one rounding to the dtype, and in fp32 the rounding of the sum."""


def oracle(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (2, 3, 40), (4, 4096)])
def test_equals_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    assert error(rms_norm(x, weight, EPS), oracle(x, weight, EPS)) < TOLERANCE[dtype]
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert error(normed, oracle(total, weight, EPS)) < TOLERANCE[dtype]


def test_the_tolerance_sees_a_wrong_formula() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    without_eps = oracle(x * 1e-2, weight, 0.0)
    assert error(rms_norm(x * 1e-2, weight, EPS), without_eps) > 10 * TOLERANCE[torch.bfloat16]
    centred = oracle(x - x.mean(-1, keepdim=True), weight, EPS)
    assert error(rms_norm(x, weight, EPS), centred) > 10 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 64, 2048, 4096])
def test_a_row_is_its_own(dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(40, size).to(dtype), torch.randn(size).to(dtype)
    whole = rms_norm(x, weight, EPS)
    for start, count in ((0, 1), (3, 1), (5, 2), (1, 17), (9, 31)):
        assert torch.equal(rms_norm(x[start : start + count].clone(), weight, EPS), whole[start : start + count])
