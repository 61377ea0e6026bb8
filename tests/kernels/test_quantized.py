"""Every layout of a quantized matrix gives the product of the dequantized matrix with the quantized activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops import int_dot, quantized
from inferd.kernels.ops.linear_int4 import linear_int4
from inferd.kernels.ops.linear_int8 import linear_int8
from inferd.kernels.ops.quantized import GROUP_SIZES, ROW_OF_BYTES, SCALE_DTYPES, WIDE_ROW, Apply, Matrix

pytestmark = pytest.mark.usefixtures("implementation")
HAS_TRITON = False
"""Triton keeps activations as they are: see `test_linear_integers_triton`."""

IN_SIZE, OUT_SIZE = 384, 77
LAYOUTS = ("symmetric", "zeros", "minimums", "e2m1", "iq4nl", "order")
"""Variants of 4 bits; 8 bits have the same without tables."""


def matrix(bits: int, layout: str, group_size: int, dtype: torch.dtype, in_size: int = IN_SIZE) -> Matrix:
    """A random matrix. A group size of 0 is one scale a row."""
    shape = (OUT_SIZE, 1 if group_size == 0 else in_size // group_size)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    q = torch.randint(low, high, (OUT_SIZE, in_size)).to(torch.uint8 if bits == 4 else torch.int8)
    scales = (torch.rand(shape) * 0.1 + 0.01).to(dtype)
    bias = torch.randn(OUT_SIZE)
    if layout == "zeros":
        return Matrix(q, scales, bias, zeros=torch.randint(low, high + 1 if bits == 8 else high, shape).to(torch.int16))
    if layout == "minimums":
        return Matrix(q, scales, bias, minimums=(torch.randn(shape) * (high - low) * 0.05).to(dtype))
    if layout == "order":
        return Matrix(q, scales, bias, order=torch.randperm(in_size).to(torch.int32))
    return Matrix(q, scales, bias, table="centred" if layout == "symmetric" else layout)  # type: ignore[arg-type]


def bound(of: Matrix, dtype: torch.dtype) -> Apply:
    linear = partial(linear_int4, table=of.table) if of.q.dtype == torch.uint8 else linear_int8
    return linear(
        of.q,
        of.scales,
        of.bias,
        dtype,
        zeros=of.zeros,
        minimums=of.minimums,
        order=of.order,
        x_group_size=of.x_group_size,
    )


def cases() -> Iterator[tuple[int, str, int, torch.dtype]]:
    for bits in (4, 8):
        for layout in LAYOUTS if bits == 4 else [name for name in LAYOUTS if name not in ("e2m1", "iq4nl")]:
            for group_size in (*GROUP_SIZES, 0):
                for dtype in SCALE_DTYPES:
                    yield bits, layout, group_size, dtype


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def rounded(x: Tensor, group_size: int) -> Tensor:
    """x as the layer sees it, in fp64."""
    if group_size == ROW_OF_BYTES:
        group_size = x.shape[1]
    if group_size == WIDE_ROW:
        (high, high_scale), (low, low_scale) = int_dot.quantize_wide(x)
        return high.double() * high_scale.double() + low.double() * low_scale.double()
    q, scales = int_dot.quantize(x, group_size)
    return q.double() * scales.double().repeat_interleave(group_size, 1)[:, : x.shape[1]]


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize(("bits", "layout", "group_size", "scales"), list(cases()))
def test_a_layout_is_the_product_of_its_dequantized_matrix(
    bits: int, layout: str, group_size: int, scales: torch.dtype
) -> None:
    weight = matrix(bits, layout, group_size, scales)
    assert weight.bias is not None
    x = torch.randn(5, IN_SIZE) * torch.rand(5, 1) * 10
    x[2, 7] = 1000.0
    x_group_size = min(group_size or IN_SIZE, 32)
    if bits == 8 and layout in ("symmetric", "order") and group_size == 0 and quantized.has_wide_rows("cpu"):
        x_group_size = 0
    ordered = x if weight.order is None else x[:, weight.order.long()]
    near, wide = rounded(ordered, x_group_size), weight.dequantized()
    expected = near @ wide.T + weight.bias.double()
    largest = near.abs() @ wide.abs().T + weight.bias.double().abs()
    error = (bound(weight, torch.float32)(x).double() - expected).abs()
    assert (error <= 2e-6 * largest).all()
    assert ((near @ wide.roll(1, 1).T + weight.bias.double() - expected).abs() > 100 * error).any()


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize(("bits", "layout", "group_size", "scales"), list(cases()))
def test_equals_the_reference(bits: int, layout: str, group_size: int, scales: torch.dtype) -> None:
    in_size = IN_SIZE if group_size else IN_SIZE + 5
    weight = matrix(bits, layout, group_size, scales, in_size)
    narrower = replace(weight, bias=None, x_group_size=16)
    for of, dtype in ((weight, torch.float32), (weight, torch.bfloat16), (narrower, torch.bfloat16)):
        layer, exact = bound(of, dtype), quantized.bind(of)
        for num_threads, num_rows in enumerate((1, 5, 67), 1):
            torch.set_num_threads(num_threads)
            x = torch.randn(num_rows, in_size).to(dtype)
            if num_rows > 1:
                x[1, 40], x[3, -1] = torch.nan, torch.inf
            assert same_bits(layer(x), exact(x)), (dtype, num_rows)


@pytest.mark.parametrize(("bits", "layout"), [(4, "zeros"), (4, "minimums"), (8, "symmetric"), (4, "symmetric")])
def test_every_number_of_rows_equals_the_reference(bits: int, layout: str) -> None:
    weight = matrix(bits, layout, 64, torch.float16)
    layer, x = bound(weight, torch.float32), torch.randn(71, IN_SIZE)
    exact = quantized.bind(weight)(x)
    assert all(same_bits(layer(x[:num_rows]), exact[:num_rows]) for num_rows in (*range(27), *range(65, 72)))


@pytest.mark.parametrize("layout", ["symmetric", "order", "zeros", "minimums"])
@pytest.mark.parametrize(("group_size", "x_group_size"), [(64, 64), (128, 128), (128, 64), (0, 128)])
def test_long_groups_of_activations_equal_the_reference(layout: str, group_size: int, x_group_size: int) -> None:
    """Rows in blocks of every size, and columns in pairs of tiles, in a tile alone and in a part of one."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = replace(matrix(8, layout, group_size, torch.float32, 384), x_group_size=x_group_size)
        for out_size in (OUT_SIZE, 32, 53):
            rows = slice(0, out_size)
            kept = {name: getattr(weight, name) for name in ("q", "scales", "bias", "zeros", "minimums")}
            of = replace(weight, **{name: None if one is None else one[rows] for name, one in kept.items()})
            x = torch.randn(49, 384).to(dtype)
            x[1, 40], x[3, -1], x[5], x[6] = torch.nan, torch.inf, 0.0, 1e-36
            layer, exact = bound(of, dtype), quantized.bind(of)(x)
            for num_rows in (*range(1, 27), 49):
                assert same_bits(layer(x[:num_rows]), exact[:num_rows]), (dtype, out_size, num_rows)


@pytest.mark.parametrize(("bits", "layout"), list(dict.fromkeys(case[:2] for case in cases())))
def test_the_largest_sums_are_exact(bits: int, layout: str) -> None:
    """No intermediate number may saturate or overflow."""
    x = torch.full((5, 128), 127.0)
    x[1], x[2, ::2], x[3, ::4], x[4, 32:] = -127.0, -127.0, -127.0, -127.0
    long_groups = [(128, 128), (0, 64)] if bits == 8 else []
    for group_size, x_group_size in [(16, 16), (32, 32), (128, 16), (128, 32), (0, None), *long_groups]:
        weight = matrix(bits, layout, group_size, torch.float32, 128)
        for values in extremes(weight):
            of = replace(values, scales=torch.ones_like(weight.scales), bias=None, x_group_size=x_group_size)
            ordered = x if of.order is None else x[:, of.order.long()]
            assert torch.equal(bound(of, torch.float32)(x).double(), ordered.double() @ of.dequantized().T)


def extremes(of: Matrix) -> Iterator[Matrix]:
    """The matrix with only its lowest and highest numbers, and zero points far from them."""
    low, high = (0, 15) if of.q.dtype == torch.uint8 else (-128, 127)
    if of.table == "e2m1":
        low, high = 7, 15
    for value, other in ((low, high), (high, low), (low, low), (high, high)):
        q = torch.full_like(of.q, value)
        q[:, ::2] = other
        zeros = None if of.zeros is None else torch.full_like(of.zeros, high + 1 if value == low else low)
        minimums = None if of.minimums is None else torch.full_like(of.minimums, 3.0)
        yield replace(of, q=q, zeros=zeros, minimums=minimums)


@pytest.mark.parametrize(
    ("bits", "group_size", "x_group_size"),
    [
        (8, 0, 16),
        (8, 0, 32),
        (8, 0, 128),
        (8, 128, 64),
        (8, 0, WIDE_ROW),
        (8, 0, ROW_OF_BYTES),
        (8, 128, 16),
        (4, 0, 16),
        (4, 32, 16),
    ],
)
def test_activations_have_the_groups_that_were_asked_for(bits: int, group_size: int, x_group_size: int) -> None:
    weight = replace(matrix(bits, "symmetric", group_size, torch.float32), bias=None, x_group_size=x_group_size)
    x = torch.randn(3, IN_SIZE)
    x[:, 40] = 1000.0
    expected = {size: rounded(x, size) @ weight.dequantized().T for size in (WIDE_ROW, ROW_OF_BYTES, 16, 32, 64, 128)}
    errors = {size: (bound(weight, torch.float32)(x) - product).abs().max() for size, product in expected.items()}
    assert errors.pop(x_group_size) * 1000 < min(errors.values())


def test_values_of_every_table() -> None:
    q, scales = torch.arange(16, dtype=torch.uint8)[None], torch.full((1, 1), 2.0)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert Matrix(q, scales, None).dequantized().tolist() == [[2.0 * (n - 8) for n in range(16)]]
    assert Matrix(q, scales, None, table="e2m1").dequantized().tolist() == [
        [2.0 * value for value in e2m1] + [-2.0 * value for value in e2m1]
    ]
    zeros, minimums = torch.full((1, 1), 3), torch.full((1, 1), -1.5)
    assert Matrix(q, scales, None, zeros=zeros).dequantized().tolist() == [[2.0 * (n - 3) for n in range(16)]]
    assert Matrix(q, scales, None, minimums=minimums).dequantized().tolist() == [[2.0 * n - 1.5 for n in range(16)]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scales": torch.ones(4, 4)}, r"96 inputs in 4 groups"),
        ({"scales": torch.ones(4, 5)}, r"96 inputs in 5 groups"),
        ({"zeros": torch.ones(4, 2)}, "zeros"),
        ({"zeros": torch.ones(4, 3), "minimums": torch.ones(4, 3)}, "zeros"),
        ({"minimums": torch.ones(4, 3).bfloat16()}, "minimums"),
        ({"table": "e2m1", "zeros": torch.ones(4, 3)}, "table"),
        ({"order": torch.arange(95, dtype=torch.int32)}, "order"),
        ({"x_group_size": WIDE_ROW}, "x_group_size"),
        ({"x_group_size": ROW_OF_BYTES}, "x_group_size"),
        ({"x_group_size": 48, "scales": torch.ones(4, 1)}, "x_group_size"),
        ({"x_group_size": 64, "scales": torch.ones(4, 1), "q": torch.zeros((4, 96), dtype=torch.int8)}, "x_group_size"),
        (
            {"x_group_size": 64, "scales": torch.ones(4, 1), "q": torch.zeros((4, 128), dtype=torch.uint8)},
            "x_group_size",
        ),
        ({"x_group_size": 32, "q": torch.zeros((4, 48), dtype=torch.uint8)}, "x_group_size"),
    ],
)
def test_what_is_no_layout_is_refused(changes: dict[str, Tensor], words: str) -> None:
    given = {"q": torch.zeros((4, 96), dtype=torch.uint8), "scales": torch.ones(4, 3), "bias": None} | changes
    with pytest.raises(AssertionError, match=words):
        Matrix(**given)  # type: ignore[arg-type]
