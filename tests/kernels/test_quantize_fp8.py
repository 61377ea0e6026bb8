"""Rows of 8-bit floats agree with the definition in fp64, and fused functions equal the plain ones in turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.gated_mul import GELU_MUL, SILU_MUL, gelu_mul, silu_mul
from inferd.kernels.ops.quantize_fp8 import (
    add_rms_norm_fp8,
    gelu_mul_fp8,
    quantize_fp8,
    reference,
    rms_norm_fp8,
    silu_mul_fp8,
)
from inferd.kernels.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, add_rms_norm, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def plain_ops(implementation: str) -> None:
    """The implementation of the plain ops that fused functions must equal. Without Triton it is the reference, because
    C++ rounds differently."""
    if not implementation.startswith("triton"):
        for op in (RMS_NORM, ADD_RMS_NORM, SILU_MUL, GELU_MUL):
            op.force("reference")


def same(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 64), (3, 200), (2, 3, 1000)])
def test_each_number_becomes_its_nearest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The neighbours of a quotient in e4m3 are an eighth of its power of two away, or 2^-9 near 0."""
    x = (torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()).to(dtype)
    q, scales = quantize_fp8(x)
    assert (q.dtype, q.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, x.shape[:-1])
    assert torch.equal(scales, x.float().abs().amax(-1) / 448)
    quotient = x.double() / scales.double()[..., None]
    spacing = 2.0 ** (quotient.abs().clamp(2.0**-6, 448.0).log2().floor() - 3)
    error = (q.double() - quotient).abs() / spacing
    assert float(error.max()) < 0.5001
    assert float(q.float().abs().amax()) == 448.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (2, 2, 300), (5, 1000)])
def test_a_group_is_quantized_like_a_row(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
    x[..., :1] = 0.0
    q, scales = quantize_fp8(x, has_groups=True)
    assert (q.shape, scales.shape) == (x.shape, (*shape[:-1], -(-shape[-1] // 128)))
    for group, part in enumerate(torch.split(x, 128, -1)):
        found = q[..., group * 128 : (group + 1) * 128].contiguous(), scales[..., group].contiguous()
        assert same(found, quantize_fp8(part.contiguous()))


def test_quotients_are_rounded_as_a_division_is() -> None:
    """Quotients equal those of a division bit for bit, for rows and numbers of every magnitude in fp32."""
    x = torch.randn(64, 512) * 2.0 ** torch.randint(-12, 1, (64, 512)) * 2.0 ** torch.linspace(-140, 125, 64)[:, None]
    x[:, ::7] = x.abs().amax(1, keepdim=True) * ((torch.arange(74) % 15 + 16.5) / 32)  # halfway, except for the scale
    assert same(quantize_fp8(x), reference.quantize_fp8(x))


def test_ties_go_to_even() -> None:
    """The scale is 1, and numbers are halfway between two of 8 bits, as 1.0625 between 1 and 1.125."""
    x = torch.tensor([[448.0, 1.0625, 1.1875, -1.0625, 2.0**-10, 3 * 2.0**-10, 432.0]])
    q, scales = quantize_fp8(x)
    assert scales.tolist() == [1.0]
    assert q.float().tolist() == [[448.0, 1.0, 1.25, -1.0, 0.0, 2.0**-8, 448.0]]


def test_rows_without_a_scale_of_their_own() -> None:
    x = torch.tensor([[0.0, -0.0], [1.0, NAN], [INF, 1.0], [-INF, NAN], [1e-45, 0.0], [3e38, -1.0], [2.0, 1.0]])
    q, scales = quantize_fp8(x)
    assert torch.equal(q[0].float(), torch.zeros(2)) and float(scales[0]) == 1.0
    assert scales.isfinite().tolist() == [True, False, False, False, True, True, True]
    product = q.float() * scales[:, None]
    assert product[1:4].isnan().any(dim=1).tolist() == [True, True, True]
    assert product[[0, 4]].abs().max() == 0.0
    assert product[6].tolist() == [2.0, 1.0]
    assert bool(product[5].isfinite().all())


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 72, 1000])
def test_a_fused_norm_is_the_two_in_turn(dtype: torch.dtype, size: int, has_groups: bool) -> None:
    x, residual = torch.randn(2, 2, 3, size).to(dtype)
    for weight in (torch.rand(size).to(dtype) + 0.5, torch.rand(size) + 0.5):
        assert same(rms_norm_fp8(x, weight, 1e-5, has_groups), quantize_fp8(rms_norm(x, weight, 1e-5), has_groups))
        quantized, total = add_rms_norm_fp8(x, residual, weight, 1e-5, has_groups)
        normed, expected = add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected)
        assert same(quantized, quantize_fp8(normed, has_groups))


Gate = Callable[[Tensor], Tensor]
FusedGate = Callable[[Tensor, bool], tuple[Tensor, Tensor]]


@pytest.mark.parametrize(("fused", "gate"), [(silu_mul_fp8, silu_mul), (gelu_mul_fp8, gelu_mul)])
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 72, 1000])
def test_a_fused_gate_is_the_two_in_turn(
    fused: FusedGate, gate: Gate, dtype: torch.dtype, size: int, has_groups: bool
) -> None:
    gate_up = torch.randn(2, 3, 2 * size).to(dtype) * 3
    gate_up[1, 2] = 0.0
    result = fused(gate_up, has_groups)
    assert same(result, quantize_fp8(gate(gate_up), has_groups))
    assert size == 1 or not same(result, quantize_fp8(gate(gate_up.flip(-1)), has_groups))


def test_a_row_is_its_own_and_may_be_strided() -> None:
    x = torch.randn(20, 300)[:, :200].to(torch.bfloat16)
    q, scales = quantize_fp8(x)
    for row in (0, 7, 19):
        assert same(quantize_fp8(x[row : row + 1].clone()), (q[row : row + 1], scales[row : row + 1]))
    assert same(quantize_fp8(x.mT.contiguous().mT), (q, scales))
