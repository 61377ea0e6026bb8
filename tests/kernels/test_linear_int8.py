"""The 8-bit linear layer whose activations have one scale a row, in 8 or 16 bits, equals its plain PyTorch oracle bit
for bit at every level; a row's bits depend on that row alone. `test_quantized` has the other layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops import int_dot, quantized
from inferd.kernels.ops import linear_int8 as op
from inferd.kernels.ops.linear_int8 import LINEAR_INT8
from inferd.kernels.ops.quantized import ROW_OF_BYTES, WIDE_ROW, Key, Matrix

pytestmark = pytest.mark.usefixtures("implementation")
HAS_TRITON = False
"""Triton keeps activations as they are: see `test_linear_integers_triton`."""

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 1), (33, 7), (32, 64), (77, 100), (77, 128), (200, 1030), (64, 4096), (70, 4160)]
"""(out, in), with incomplete tiles of 32 columns, sets of four inputs and pieces of 64 inputs. The sums of 4,160 inputs
wait in memory."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


linear_int8 = partial(op.linear_int8, x_group_size=WIDE_ROW)
in_rows = pytest.mark.parametrize("row", [WIDE_ROW, ROW_OF_BYTES], ids=["16-bit", "8-bit"])


def by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q, scales) with one scale for each row."""
    return int_dot.quantize(weight, weight.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
@in_rows
def test_equals_the_reference(row: int, dtype: torch.dtype, has_bias: bool, out_size: int, in_size: int) -> None:
    q, scales = by_rows(torch.randn(out_size, in_size).to(dtype))
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    layer = op.linear_int8(q, scales, bias, dtype, x_group_size=row)
    oracle = quantized.bind(Matrix(q, scales, bias, x_group_size=row))
    for num_rows in (1, 2, 6, 7, 16, 17, 40):
        x = torch.randn(num_rows, in_size).to(dtype)
        assert same_bits(layer(x), oracle(x)), num_rows


def test_the_reference_is_the_definition() -> None:
    weight, x, bias = torch.randn(50, 300), torch.randn(20, 300) * 3, torch.randn(50)
    q, scales = by_rows(weight)
    parts = int_dot.quantize_wide(x)
    near = sum(x_q.double() * x_scale.double() for x_q, x_scale in parts)
    assert (near - x).abs().max() <= 0.501 * x.abs().max() / 32258
    assert all(int(x_q.abs().max()) == 127 for x_q, _ in parts)
    for x_q, _ in parts:
        assert torch.equal(int_dot.product(x_q, q).long(), x_q.long() @ q.long().T)
    result = quantized.bind(Matrix(q, scales, bias, x_group_size=0))(x)
    expected = near @ (q.double() * scales.double()).T + bias.double()
    assert (result.double() - expected).abs().max() < 1e-6 * expected.abs().max()
    without_bias = expected - bias.double()
    assert (result.double() - without_bias).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("weight", [127, -128])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_the_largest_sums_are_exact(weight: int, num_rows: int) -> None:
    """The high bytes are 127, or the low ones are and the high ones 126."""
    in_size = 65536
    layer = linear_int8(torch.full((32, in_size), weight, dtype=torch.int8), torch.ones(32, 1), None, torch.float32)
    x = torch.ones(num_rows, in_size)
    x[1] = -1
    x[2, 1:] = (126 * 254 + 127) / 32258
    parts = [(x_q.long().sum(1) * weight, scale) for x_q, scale in int_dot.quantize_wide(x)]
    assert parts[0][0].abs().max() == 127 * abs(weight) * in_size and parts[1][0][2] == 127 * weight * (in_size - 1)
    expected = sum(sums.float() * scale[:, 0] for sums, scale in parts)
    assert torch.equal(layer(x), expected[:, None].expand(num_rows, 32))  # type: ignore[union-attr]


@pytest.mark.parametrize("weight", [127, -128])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_the_largest_sums_of_bytes_are_exact(weight: int, num_rows: int) -> None:
    in_size = 65536
    q = torch.full((32, in_size), weight, dtype=torch.int8)
    layer = op.linear_int8(q, torch.ones(32, 1), None, torch.float32, x_group_size=ROW_OF_BYTES)
    x = torch.full((num_rows, in_size), 127.0)
    x[1], x[2, 1:] = -127.0, 126.0
    expected = (x.double().sum(1) * weight).float()
    assert torch.equal(layer(x), expected[:, None].expand(num_rows, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@in_rows
def test_what_is_not_a_number_stays_in_its_row(row: int, dtype: torch.dtype) -> None:
    q, scales = by_rows(torch.randn(40, 96).to(dtype))
    layer = op.linear_int8(q, scales, None, dtype, x_group_size=row)
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
@pytest.mark.parametrize(("out_size", "in_size"), [(96, 64), (77, 250), (256, 1024)])
@in_rows
def test_a_row_is_its_own(row: int, dtype: torch.dtype, out_size: int, in_size: int, num_threads: int) -> None:
    q, scales = by_rows(torch.randn(out_size, in_size).to(dtype))
    layer = op.linear_int8(q, scales, torch.randn(out_size), dtype, x_group_size=row)
    own = torch.randn(1, in_size).to(dtype)
    alone = layer(own)[0]
    for num_rows in (2, 3, 8, 12, 13, 25, 64, 300):
        place = int(torch.randint(0, num_rows, ()))
        neighbours = torch.randn(num_rows, in_size).to(dtype) * 10
        neighbours[place] = own
        assert torch.equal(layer(neighbours)[place], alone), f"{num_rows} rows, {num_threads} threads"


def test_no_rows_and_rows_that_do_not_lie_side_by_side() -> None:
    q, scales = by_rows(torch.randn(40, 96))
    layer = linear_int8(q.T.contiguous().T, scales, None, torch.float32)
    wide = torch.randn(5, 200)
    assert layer(wide[:0, :96]).shape == (0, 40)
    assert torch.equal(layer(wide[:, :96]), layer(wide[:, :96].clone()))


def test_what_the_kernel_does_not_take_runs_in_plain_pytorch_and_says_why() -> None:
    q, scales = by_rows(torch.randn(8, 32))
    layer = linear_int8(q, scales, None, torch.float16)
    assert layer(torch.ones(2, 32, dtype=torch.float16)).dtype == torch.float16
    choice = next(choice for choice in LINEAR_INT8.choices() if choice.key == Key("cpu", torch.float16))
    assert choice.chosen == "reference"
    assert choice.refused[0][0] == "cpp"
    assert re.search("float16|forced", choice.refused[0][1])
