"""Linear layers: the right product, and bits of a row that do not depend on the number or content of other rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inferd.engine.layers.linear import LINEAR, Key, Linear
from inferd.engine.layers.placement import Placement
from inferd.kernels.registry import KernelError

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Relative to the largest result."""


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    linear = Linear(weight.shape[1], weight.shape[0], Placement(weight.dtype, CPU), bias is not None)
    for name, parameter in linear.parameters():
        parameter.write(0, weight if name == "weight" or bias is None else bias)
    return linear


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 96), (33, 7), (1, 5), (512, 1536)])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_equals_the_product(dtype: torch.dtype, has_bias: bool, in_size: int, out_size: int, num_rows: int) -> None:
    weight, bias = torch.randn(out_size, in_size).to(dtype), torch.randn(out_size).to(dtype)
    x = torch.randn(num_rows, in_size).to(dtype)
    result = linear_of(weight, bias if has_bias else None)(x)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert result.shape == expected.shape
    assert (result.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 96), (512, 1536), (1536, 512), (250, 77), (2048, 256)])
def test_a_row_is_its_own(dtype: torch.dtype, in_size: int, out_size: int, num_threads: int) -> None:
    linear = linear_of(torch.randn(out_size, in_size).to(dtype), torch.randn(out_size).to(dtype))
    row = torch.randn(1, in_size).to(dtype)
    alone = linear(row)[0]
    for num_rows in (1, 2, 3, 8, 17, 64):
        place = int(torch.randint(0, num_rows, ()))
        neighbours = torch.randn(num_rows, in_size).to(dtype) * 10
        neighbours[place] = row
        assert torch.equal(linear(neighbours)[place], alone), f"{num_rows} rows, {num_threads} threads"


def test_the_packed_form_is_what_runs_and_the_other_says_why_not() -> None:
    key = Key("cpu", torch.float32)
    LINEAR.resolve(key)
    chosen = {choice.key: choice.chosen for choice in LINEAR.choices()}
    assert chosen[key] == "onednn_packed"
    LINEAR.force("onednn_packed")
    try:
        with pytest.raises(KernelError, match=r"packs float32 and bfloat16, not torch.float64"):
            LINEAR.resolve(Key("cpu", torch.float64))
    finally:
        LINEAR.force(None)


def test_a_weight_is_not_kept_beside_its_packed_form() -> None:
    linear = linear_of(torch.randn(8, 8))
    assert linear._weight is None
