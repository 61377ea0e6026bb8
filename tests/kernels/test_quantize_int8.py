"""Quantization to 8 bits equals its plain PyTorch oracle bit for bit, and is as near to the weights as its scales
allow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops import quantized
from inferd.kernels.ops.linear_int8 import LONG_GROUP_SIZE, group_size, quantize, quantize_int8
from inferd.kernels.ops.quantized import Matrix

pytestmark = pytest.mark.usefixtures("implementation")

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 1), (33, 7), (32, 64), (77, 100), (200, 1030), (64, 4096)]
"""(out, in), with rows of one group, also of incomplete vectors, and with groups of 64."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_equals_the_reference(dtype: torch.dtype, out_size: int, in_size: int) -> None:
    weight = torch.randn(out_size, in_size).to(dtype)
    weight[0, :64] = 0
    size = in_size if in_size % 64 else 64
    found, expected = quantize_int8(weight, size), quantize.reference(weight, size)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("magnitude", [1e-20, 1, 1e20])
@pytest.mark.parametrize(("in_size", "num_groups"), [(128, 2), (100, 1)])
def test_each_group_has_a_scale(magnitude: float, in_size: int, num_groups: int) -> None:
    weight = torch.randn(50, in_size) * magnitude
    weight[7, 3] *= 1000
    q, scales = quantize_int8(weight, in_size // num_groups)
    assert scales.shape == (50, num_groups) and int(q.min()) >= -127
    allowed = scales.double().repeat_interleave(in_size // num_groups, 1)
    error = (Matrix(q, scales, None).dequantized() - weight.double()).abs()
    assert (error <= allowed * 0.501).all()
    assert (error > allowed * 0.4).any(1).all(), "the scales are larger than need be"


def test_groups_without_numbers_have_no_scale_and_small_ones_are_zeros() -> None:
    weight = torch.randn(9, 128)
    weight[3, 100], weight[5, 1], weight[6, 2], weight[7] = torch.nan, torch.inf, -torch.inf, 1e-31
    q, scales = quantize_int8(weight, 64)
    is_finite = torch.ones((9, 2), dtype=torch.bool)
    is_finite[3, 1] = is_finite[5, 0] = is_finite[6, 0] = False
    assert torch.equal(scales.isfinite(), is_finite)
    assert not q.unflatten(1, (2, 64))[~is_finite].any()
    assert not q[7].any() and not scales[7].any()


@pytest.mark.parametrize(("in_size", "in_groups"), [(128, 64), (100, 100)])
def test_rows_have_one_scale_where_activations_have_16_bits(
    monkeypatch: pytest.MonkeyPatch, in_size: int, in_groups: int
) -> None:
    weight = torch.randn(5, in_size)
    for is_wide, size in ((False, in_groups), (True, in_size)):
        monkeypatch.setattr(quantized, "has_wide_rows", lambda device_type, is_wide=is_wide: is_wide)
        assert group_size(in_size, "cpu") == size
        q, scales = quantize_int8(weight)
        assert scales.shape == (5, in_size // size)
        assert Matrix(q, scales, None).chosen_x_group_size == (0 if is_wide else 32)


@pytest.mark.parametrize(("in_size", "size"), [(384, 128), (320, 64), (312, 312)])
def test_long_groups_if_inputs_are_a_multiple_of_them(monkeypatch: pytest.MonkeyPatch, in_size: int, size: int) -> None:
    monkeypatch.setattr(quantized, "has_wide_rows", lambda device_type: False)
    assert group_size(in_size, "cpu", LONG_GROUP_SIZE) == size


def test_only_processors_with_amx_have_wide_rows(implementation: str) -> None:
    assert quantized.has_wide_rows("cpu") == (native.level() == "amx")
    assert not quantized.has_wide_rows("cuda")
