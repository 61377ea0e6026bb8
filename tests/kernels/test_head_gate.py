"""Gated heads agree with torch in fp64, and each token has the same bits in any step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inferd.kernels.ops.head_gate import add_gated, norm_silu_gate, sigmoid_gate, silu_gate_norm

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
EPS = 1e-3


def inputs(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Heads, gates that lie between other numbers, and a weight."""
    gate = (3 * torch.randn(40, 3, 2, size)).to(dtype)[:, :, 1]
    return (2 * torch.randn(40, 3, size)).to(dtype), gate, torch.randn(size)


def error(result: Tensor, expected: Tensor) -> float:
    return float(((result.double() - expected).abs() / (expected.abs() + 1)).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [16, 41, 128])
def test_equals_torch_in_fp64(size: int, dtype: torch.dtype) -> None:
    x, gate, weight = inputs(size, dtype)
    wide, opened = x.double(), gate.double()
    gated = wide * opened.sigmoid()
    assert error(sigmoid_gate(x, gate), gated) < TOLERANCE[dtype]
    assert error(sigmoid_gate(x, gate), wide * functional.silu(opened)) > 10 * TOLERANCE[dtype]
    result = norm_silu_gate(x, gate, weight, EPS)
    for eps, is_near in ((EPS, True), (0.2, False)):
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        assert (error(result, normed * functional.silu(opened)) < TOLERANCE[dtype]) == is_near
    weights, opened = torch.randn(3, size), wide * functional.silu(opened)
    result = silu_gate_norm(x.float(), gate, weights, EPS)
    for eps, is_near in ((EPS, True), (0.2, False)):
        normed = opened * torch.rsqrt(opened.square().mean(-1, keepdim=True) + eps) * weights
        assert (error(result, normed) < TOLERANCE[dtype]) == is_near
    tokens, other, share = x[:, 0].contiguous(), x[:, 1].contiguous(), torch.randn(40, 1)
    total = add_gated(tokens, other, share)
    for gate_of_each, is_near in ((share, True), (share.roll(1, 0), False)):
        expected = tokens.double() + other.double() * gate_of_each.double().sigmoid()
        assert (error(total, expected) < TOLERANCE[dtype]) == is_near


def test_a_token_is_its_own() -> None:
    x, gate, weight = inputs(128, torch.bfloat16)
    torch.set_num_threads(2)
    whole = sigmoid_gate(x, gate), norm_silu_gate(x, gate, weight, EPS)
    weights = torch.randn(3, 128)
    normed = silu_gate_norm(x.float(), gate, weights, EPS)
    tokens, share = torch.randn(2, 40, 2000).bfloat16(), torch.randn(40, 1)
    total = add_gated(*tokens, share)
    for start, end in ((0, 1), (3, 9), (7, 40)):
        own = x[start:end].clone(), gate[start:end]
        assert torch.equal(sigmoid_gate(*own), whole[0][start:end])
        assert torch.equal(norm_silu_gate(*own, weight, EPS), whole[1][start:end])
        assert torch.equal(silu_gate_norm(own[0].float(), own[1], weights, EPS), normed[start:end])
        assert torch.equal(add_gated(*tokens[:, start:end].clone(), share[start:end]), total[start:end])
