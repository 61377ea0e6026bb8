"""The 4-bit linear layer equals its plain PyTorch oracle bit for bit at every level; a row's bits depend on that row
alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops import int_dot, quantized
from inferd.kernels.ops.linear_int4 import GROUP_SIZE, LINEAR_INT4, linear_int4
from inferd.kernels.ops.quantized import Key, Matrix

pytestmark = pytest.mark.usefixtures("implementation")
HAS_TRITON = False
"""Triton keeps activations as they are: see `test_linear_integers_triton`."""

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 32), (16, 32), (77, 96), (200, 1024), (64, 4096)]
"""(out, in), with incomplete tiles of 16 columns and incomplete groups of four tiles."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def dequantized(q: Tensor, scales: Tensor) -> Tensor:
    groups = (q.double() - 8).unflatten(1, (-1, GROUP_SIZE))
    return (groups * scales.double().unsqueeze(2)).flatten(1)


def symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q, scales). The weight of the largest magnitude becomes -7 or 7."""
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    scales = (groups.abs().amax(2) / 7).to(torch.bfloat16)
    q = (groups / scales.unsqueeze(2)).round().clamp(-8, 7) + 8
    return q.flatten(1).to(torch.uint8), scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_equals_the_reference(dtype: torch.dtype, has_bias: bool, out_size: int, in_size: int) -> None:
    q, scales = symmetric(torch.randn(out_size, in_size).to(dtype))
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    layer, oracle = linear_int4(q, scales, bias, dtype), quantized.bind(Matrix(q, scales, bias))
    for num_rows in (1, 2, 11, 12, 13, 40):
        x = torch.randn(num_rows, in_size).to(dtype)
        assert same_bits(layer(x), oracle(x)), num_rows


def test_the_reference_is_the_definition() -> None:
    weight, x, bias = torch.randn(50, 320), torch.randn(20, 320) * 3, torch.randn(50)
    q, scales = symmetric(weight)
    x_q, x_scales = int_dot.quantize(x, GROUP_SIZE)
    x_near = (x_q.double().unflatten(1, (-1, GROUP_SIZE)) * x_scales.double().unsqueeze(2)).flatten(1)
    assert (x_near - x).abs().max() <= 0.501 * x_scales.max()
    result = quantized.bind(Matrix(q, scales, bias))(x).double()
    expected = x_near @ dequantized(q, scales).T + bias.double()
    tolerance = 1e-6 * expected.abs().max()
    assert (result - expected).abs().max() < tolerance
    other_zero_point = x_near @ dequantized(q + 1, scales).T + bias.double()
    assert (result - other_zero_point).abs().max() > 1000 * tolerance


def test_the_largest_sums_are_exact() -> None:
    q, scales = torch.zeros((16, 64), dtype=torch.uint8), torch.ones((16, 2), dtype=torch.bfloat16)
    x = torch.tensor([[127.0], [-127.0]]).expand(2, 64)
    assert torch.equal(linear_int4(q, scales, None, torch.float32)(x)[:, 0], torch.tensor([-8.0, 8.0]) * 127 * 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    layer = linear_int4(*symmetric(torch.randn(40, 96).to(dtype)), None, dtype)
    x = torch.randn(16, 96).to(dtype)
    clean = layer(x)
    x[3, 50], x[7, 0], x[9], x[10] = torch.nan, torch.inf, 0.0, 1e-36
    result = layer(x)
    assert result[[3, 7]].isnan().all()
    assert (result[[9, 10]] == 0).all()
    others = [row for row in range(16) if row not in (3, 7, 9, 10)]
    assert torch.equal(result[others], clean[others])


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_size", "in_size"), [(96, 64), (77, 256), (256, 1024)])
def test_a_row_is_its_own(dtype: torch.dtype, out_size: int, in_size: int, num_threads: int) -> None:
    layer = linear_int4(*symmetric(torch.randn(out_size, in_size).to(dtype)), torch.randn(out_size), dtype)
    row = torch.randn(1, in_size).to(dtype)
    alone = layer(row)[0]
    for num_rows in (2, 3, 8, 12, 13, 25, 64, 300):
        place = int(torch.randint(0, num_rows, ()))
        neighbours = torch.randn(num_rows, in_size).to(dtype) * 10
        neighbours[place] = row
        assert torch.equal(layer(neighbours)[place], alone), f"{num_rows} rows, {num_threads} threads"


def test_no_rows_and_rows_that_do_not_lie_side_by_side() -> None:
    q, scales = symmetric(torch.randn(40, 96))
    layer = linear_int4(q.T.contiguous().T, scales, None, torch.float32)
    wide = torch.randn(5, 200)
    assert layer(wide[:0, :96]).shape == (0, 40)
    assert torch.equal(layer(wide[:, :96]), layer(wide[:, :96].clone()))


def test_what_the_kernel_does_not_take_runs_in_plain_pytorch_and_says_why() -> None:
    q, scales = symmetric(torch.randn(8, 64))
    layer = linear_int4(q, scales, None, torch.float16)
    assert layer(torch.ones(2, 64, dtype=torch.float16)).dtype == torch.float16
    choice = next(
        choice
        for choice in LINEAR_INT4.choices()
        if choice.key == Key("cpu", torch.float16, 32, torch.bfloat16, x_group_size=32)
    )
    assert choice.chosen == "reference"
    assert choice.refused[0][0] == "cpp"
    assert re.search("float16|forced", choice.refused[0][1])
