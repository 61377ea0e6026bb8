"""Linear layers give the right product. A row's bits do not depend on the number or content of other rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inferd.engine.arch.matrix import Component, LinearWeight
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.placement import Placement
from inferd.engine.quant.fp8 import Fp8
from inferd.engine.quant.integer import Int4, Int8
from inferd.engine.quant.recipe import Recipe
from inferd.engine.quant.scheme import DENSE, Dense, QuantizationError, Scheme
from inferd.kernels.cpu import native
from inferd.kernels.ops.linear import LINEAR, LINEAR_16BIT, Key, NarrowKey
from inferd.kernels.registry import KernelError

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Tolerance relative to the largest result."""


def placement(dtype: torch.dtype, scheme: Scheme) -> Placement:
    return Placement(dtype, CPU, Recipe(scheme, scheme))


def matrix(in_size: int, out_size: int, has_bias: bool = False) -> LinearWeight:
    return LinearWeight.whole("matrix", Component.MLP, (out_size, in_size), has_bias)


def fill(place: Placement, weight: Tensor, bias: Tensor | None) -> None:
    place.parameters["matrix.weight"].write(0, weight)
    if bias is not None:
        place.parameters["matrix.bias"].write(0, bias)


def linear_of(
    weight: Tensor, bias: Tensor | None = None, scheme: Scheme = DENSE, out_dtype: torch.dtype | None = None
) -> Linear:
    place = placement(weight.dtype, scheme)
    linear = Linear(matrix(weight.shape[1], weight.shape[0], bias is not None), place, out_dtype)
    fill(place, weight, bias)
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


@pytest.mark.parametrize("scheme", [DENSE, Int8(), Int4(), Fp8()], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_results_in_fp32_are_those_before_the_rounding(scheme: Scheme, has_bias: bool, num_rows: int) -> None:
    weight, bias = torch.randn(77, 320).bfloat16(), torch.randn(77).bfloat16() if has_bias else None
    x = torch.randn(num_rows, 320).bfloat16()
    wide = linear_of(weight, bias, scheme, torch.float32)(x)
    assert wide.dtype == torch.float32
    expected = linear_of(weight.float(), None if bias is None else bias.float(), scheme)(x.float())
    assert (wide - expected).abs().max() < 8e-6 * expected.abs().max()
    assert (wide.bfloat16() - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 96), (512, 1536), (1536, 512), (250, 77), (2048, 256)])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_a_row_is_its_own(
    dtype: torch.dtype, out_dtype: torch.dtype | None, in_size: int, out_size: int, num_threads: int
) -> None:
    weight, bias = torch.randn(out_size, in_size).to(dtype), torch.randn(out_size).to(dtype)
    linear = linear_of(weight, bias, out_dtype=out_dtype)
    row = torch.randn(1, in_size).to(dtype)
    alone = linear(row)[0]
    for num_rows in (1, 2, 3, 8, 17, 64):
        place = int(torch.randint(0, num_rows, ()))
        neighbours = torch.randn(num_rows, in_size).to(dtype) * 10
        neighbours[place] = row
        assert torch.equal(linear(neighbours)[place], alone), f"{num_rows} rows, {num_threads} threads"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 96), (33, 7), (1, 5), (250, 77), (2048, 256)])
def test_weights_of_16_bits_give_the_bits_of_wide_ones(
    dtype: torch.dtype, has_bias: bool, in_size: int, out_size: int, num_threads: int
) -> None:
    weight, bias = torch.randn(out_size, in_size), torch.randn(out_size) if has_bias else None
    weight[:, ::3] *= 1e-6  # many are subnormal in float16
    weight = weight.to(dtype)
    place = placement(torch.float32, Dense(narrow=dtype))
    narrow = Linear(matrix(in_size, out_size, has_bias), place)
    taken = {name: parameter.dtype for name, parameter in place.parameters.items()}
    assert taken == {"matrix.weight": dtype, **({"matrix.bias": torch.float32} if has_bias else {})}
    fill(place, weight, bias)
    wide = linear_of(weight.float(), bias)
    for num_rows in (1, 2, 3, 4, 9, 64):
        x = torch.randn(num_rows, in_size + 2)[:, 1:-1]
        assert torch.equal(narrow(x), wide(x)), num_rows


def test_a_packed_form_is_what_runs_and_the_others_say_why_not(kernels: str) -> None:
    key = Key("cpu", torch.float32)
    LINEAR.resolve(key)
    narrow = NarrowKey("cpu", torch.float16)
    LINEAR_16BIT.resolve(narrow)
    is_cpp = kernels == "cpp" and native.level() != "portable"
    assert LINEAR_16BIT.choice(narrow).chosen == ("cpp" if is_cpp else "widened")
    chosen = {choice.key: choice.chosen for choice in LINEAR.choices()}
    assert chosen[key] == ("cpp" if is_cpp else "onednn_packed")
    LINEAR.force("onednn_packed")
    try:
        with pytest.raises(KernelError, match=r"packs float32 and bfloat16, not torch.float64"):
            LINEAR.resolve(Key("cpu", torch.float64))
    finally:
        LINEAR.force(None)


@pytest.mark.parametrize("scheme", [DENSE, Int8(), Int4(), Fp8()], ids=lambda scheme: scheme.name)
def test_a_weight_is_not_kept_beside_its_packed_form(scheme: Scheme) -> None:
    weight = torch.randn(64, 32)
    held = weakref.ref(weight)
    linear = Linear(matrix(32, 64), placement(torch.float32, scheme))
    linear.take_weight(weight)
    del weight
    assert held() is None
    assert linear(torch.ones(1, 32)).shape == (1, 64)


QUANTIZED_ERROR = {"int8": 0.02, "int4": 0.12, "fp8": 0.045}
"""Root mean square error relative to the results', for normal weights and activations. 1, 8 and 3.7% are expected."""


@pytest.mark.parametrize("scheme", [Int8(), Int4(), Fp8()], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_quantized_layer_is_near_the_product(scheme: Scheme, has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(77, 320).to(dtype), torch.randn(77).to(dtype) * 10
    x = torch.randn(50, 320).to(dtype)
    linear = linear_of(weight, bias if has_bias else None, scheme)
    exact = x.double() @ weight.double().T
    error = linear(x).double() - exact - (bias.double() if has_bias else 0)
    assert error.square().mean().sqrt() < QUANTIZED_ERROR[scheme.name] * exact.square().mean().sqrt()


def test_a_shape_that_a_scheme_cannot_keep_is_refused_before_its_weight_comes() -> None:
    with pytest.raises(
        QuantizationError, match=r"groups of 32, and a layer of 8 x 104 has 8 left over: serve it in int8"
    ):
        Linear(matrix(104, 8), placement(torch.float32, Int4()))
    with pytest.raises(QuantizationError, match=r"at most 65536 inputs"):
        Linear(matrix(65537, 8), placement(torch.float32, Int8()))
    Linear(matrix(104, 8), placement(torch.float32, Int8()))
