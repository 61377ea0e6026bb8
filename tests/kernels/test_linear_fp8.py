"""The FP8 linear layer agrees with its formula in fp64 on the quantized numbers; a row's bits depend on that row alone.
The C++ kernel takes activations as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from inferd.kernels.linear_fp8 import (
    BLOCK,
    FP8,
    LINEAR_FP8,
    Activations,
    Key,
    linear_fp8,
    quantize_groups,
    quantize_rows,
    quantize_static,
    quantize_weight,
)
from inferd.kernels.quantize_fp8 import QUANTIZE_FP8
from tests.kernels.conftest import COMPILED, REFERENCE, TRITON

pytestmark = pytest.mark.usefixtures("implementation", "plain_quantization")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Relative to the largest result: the rounding of fp32 sums, or one to the dtype."""
TENSOR_CORE_TOLERANCE = 2**-12
"""A tensor core keeps about 14 bits of the sum of 128 products of FP8 numbers."""
SHAPES = [(1, 1), (33, 7), (77, 100), (130, 300), (200, 128)]
"""(out, in), with incomplete tiles of 64 outputs and incomplete blocks of 128 x 128."""


@pytest.fixture
def plain_quantization(implementation: str) -> Iterator[None]:
    """Quantize in plain PyTorch: interpreting a program for each row would take longest here, and has a test of its
    own."""
    QUANTIZE_FP8.force("reference")
    yield
    QUANTIZE_FP8.force(None)


Scales = Literal["rows", "groups", "blocks"]
"""Weights that share a scale: a row, 128 inputs of a row, or those of 128 rows."""
SCALES: tuple[Scales, ...] = get_args(Scales)


def random_layer(out_size: int, in_size: int, kind: Scales) -> tuple[Tensor, Tensor]:
    """Unrelated numbers and scales, as in a checkpoint."""
    q = (torch.randn(out_size, in_size) * 50).to(FP8)
    num_groups = -(-in_size // BLOCK)
    shapes = {"rows": (out_size,), "groups": (out_size, num_groups), "blocks": (-(-out_size // BLOCK), num_groups)}
    shape = shapes[kind]
    return q, torch.rand(shape) * 0.01 + 0.001


def dequantized(q: Tensor, scales: Tensor) -> Tensor:
    """[out, in] fp64, for `scales` of rows, of blocks, or of a token's blocks of inputs."""
    rows, columns = q.shape
    if scales.dim() == 1:
        return q.double() * scales.double()[:, None]
    wide = scales.double().repeat_interleave(BLOCK, 1)[:, :columns]
    return q.double() * (wide if len(wide) == rows else wide.repeat_interleave(BLOCK, 0)[:rows])


def product(x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, quantize: Activations | None) -> Tensor:
    near = x.double() if quantize is None else dequantized(*quantize(x))
    out = near @ dequantized(q, scales).T
    return out if bias is None else out + bias.double()


def is_cpp(implementation: str) -> bool:
    return implementation not in (REFERENCE, TRITON, COMPILED)


def tolerance(dtype: torch.dtype, implementation: str) -> float:
    return max(TOLERANCE[dtype], TENSOR_CORE_TOLERANCE * (implementation == COMPILED))


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_equals_the_formula(dtype: torch.dtype, kind: Scales, out_size: int, in_size: int, implementation: str) -> None:
    if is_cpp(implementation) and dtype == torch.float16:
        pytest.skip("runs in plain PyTorch")
    q, scales = random_layer(out_size, in_size, kind)
    quantize = None if is_cpp(implementation) else quantize_rows if kind == "rows" else quantize_groups
    for num_rows, bias in ((3, None), (70, torch.randn(out_size).to(dtype))):
        x = torch.randn(num_rows, in_size).to(dtype)
        x[-1] = 0
        result = linear_fp8(q, scales, bias, dtype)(x)
        assert result.dtype == dtype
        assert error(result, product(x, q, scales, bias, quantize)) < tolerance(dtype, implementation)


@pytest.mark.parametrize("kind", SCALES)
def test_the_tolerance_sees_other_scales_and_other_activations(kind: Scales, implementation: str) -> None:
    q, scales = random_layer(260, 300, kind)
    x = torch.randn(9, 300)
    x[:, :128] *= 20
    result = linear_fp8(q, scales, None, torch.float32)(x)
    ways = {"rows": quantize_rows, "groups": quantize_groups, "none": None}
    own = ways.pop("none" if is_cpp(implementation) else "rows" if kind == "rows" else "groups")
    assert error(result, product(x, q, scales, None, own)) < tolerance(torch.float32, implementation)
    assert error(result, product(x, q, scales.roll(1, 0), None, own)) > 0.01
    for other in ways.values():
        assert error(result, product(x, q, scales, None, other)) > 0.001


def test_a_static_scale_is_everybodys_and_saturates(implementation: str) -> None:
    q, scales = random_layer(20, 40, "rows")
    x = torch.randn(5, 40)
    x[0, 0], x[1, 1] = 1e6, -1e6
    found, found_scales = quantize_static(0.01)(x)
    assert (found[0, 0].item(), found[1, 1].item()) == (448.0, -448.0)
    assert (found_scales == 0.01).all()
    result = linear_fp8(q, scales, None, torch.float32, quantize_static(0.01))(x)
    own = None if is_cpp(implementation) else quantize_static(0.01)
    assert error(result, product(x, q, scales, None, own)) < tolerance(torch.float32, implementation)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_quantized_weight_is_near_the_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 200).to(dtype)
    weight[3] = 0
    weight[4] *= 1e-4
    q, scales = quantize_weight(weight)
    assert q.dtype == FP8 and scales.shape == (50, 2)
    wide = weight.double()
    # Half a unit of the last of four binary digits; below the smallest normal number, 2^-6, half a unit of 2^-9.
    allowed = torch.maximum(wide.abs() * 2**-4, scales.double().repeat_interleave(BLOCK, 1)[:, :200] * 2**-10)
    assert ((dequantized(q, scales) - wide).abs() <= allowed * 1.0001).all()
    largest = torch.stack([group.float().abs().amax(1) for group in torch.split(q, BLOCK, 1)])
    assert (largest[:, torch.arange(50) != 3] == 448).all()


@pytest.mark.parametrize("kind", SCALES)
def test_a_row_is_its_own(kind: Scales) -> None:
    q, scales = random_layer(70, 300, kind)
    layer = linear_fp8(q, scales, torch.randn(70), torch.bfloat16, is_invariant=True)
    row = torch.randn(1, 300).to(torch.bfloat16)
    alone = layer(row)[0]
    for num_rows in (2, 3, 8, 17, 64):
        neighbours = torch.randn(num_rows, 300).to(torch.bfloat16) * 10
        neighbours[num_rows // 2] = row
        assert torch.equal(layer(neighbours)[num_rows // 2], alone), num_rows


def test_sums_of_the_reference_are_exact(implementation: str) -> None:
    """The same inputs in another order give the same bits."""
    if implementation != REFERENCE:
        pytest.skip("sums in fp32")
    q, scales = random_layer(40, 2000, "rows")
    x, order = torch.randn(6, 2000), torch.randperm(2000)
    first = linear_fp8(q, scales, None, torch.float32)(x)
    assert torch.equal(linear_fp8(q[:, order].contiguous(), scales, None, torch.float32)(x[:, order]), first)


@pytest.mark.parametrize("kind", SCALES)
def test_what_is_not_a_number_stays_in_its_row(kind: Scales) -> None:
    q, scales = random_layer(40, 200, kind)
    layer = linear_fp8(q, scales, None, torch.float32)
    x = torch.randn(6, 200)
    clean = layer(x)
    x[1, 50], x[4, 3] = torch.nan, torch.inf
    result = layer(x)
    assert result[1].isnan().all() and not result[4].isfinite().any()
    assert torch.equal(result[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert layer(x[:0]).shape == (0, 40)


def test_the_others_say_why_not() -> None:
    q, scales = random_layer(8, 32, "blocks")
    linear_fp8(q, scales, None, torch.float32)(torch.ones(2, 32))
    key = Key("cpu", torch.float32, 8, 32, has_groups=True, is_invariant=False)
    choice = next(choice for choice in LINEAR_FP8.choices() if choice.key == key)
    if choice.chosen == "cpp":
        return
    assert dict(choice.refused)["scaled_mm"] in (
        "takes a scale for each row, not for 128 inputs",
        f"{choice.chosen} is forced",
    )
