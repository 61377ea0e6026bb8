"""The Triton products by integer weights equal the product of the dequantized matrix in every layout, by tiles and by
copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.gpu import integers
from inferd.kernels.gpu.packed_integers import Packed
from inferd.kernels.ops.linear_int4 import LINEAR_INT4, linear_int4
from inferd.kernels.ops.linear_int8 import LINEAR_INT8, linear_int8
from inferd.kernels.ops.quantized import GROUP_SIZES, Matrix
from tests.kernels import interpreter
from tests.kernels.conftest import is_on_gpu
from tests.kernels.test_quantized import LAYOUTS, OUT_SIZE, matrix

pytest.importorskip("triton")

IN_SIZE = 192
"""A step of 128 inputs and half of one."""
SUMMED = 2e-6
"""Error of a sum in fp32, relative to the sum of its products' magnitudes."""
ROUNDED = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 0.0}


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    if not is_on_gpu(request.config):
        gpu.interpret(True)
        interpreter.repair()
    yield
    gpu.interpret(False)


def cases() -> Iterator[tuple[int, str, int]]:
    for bits in (4, 8):
        for layout in LAYOUTS if bits == 4 else [name for name in LAYOUTS if name not in ("e2m1", "iq4nl")]:
            yield from ((bits, layout, group_size) for group_size in (*GROUP_SIZES, 0))


def sized(bits: int, layout: str, group_size: int, scales: torch.dtype = torch.bfloat16) -> Matrix:
    """Two complete groups at least; a row with one scale has inputs that fill no 16 bytes."""
    return matrix(
        bits, layout, group_size, scales, {0: IN_SIZE + 5, 16: IN_SIZE + 16, 128: 256}.get(group_size, IN_SIZE)
    )


def product(x: Tensor, weight: Tensor, of: Matrix) -> tuple[Tensor, Tensor]:
    """(x W^T + b, the same of magnitudes), in fp64."""
    x = (x if of.order is None else x[:, of.order.long()]).double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if of.bias is None else of.bias.double()
    return x @ weight.T + bias, x.abs() @ weight.abs().T + bias.abs()


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize(("bits", "layout", "group_size"), list(cases()))
def test_a_layout_is_the_product_of_its_dequantized_matrix(bits: int, layout: str, group_size: int) -> None:
    of = sized(bits, layout, group_size)
    for dtype, num_rows in ((torch.bfloat16, 5), (torch.float32, 17), (torch.float16, 2)):
        weight = of.dequantized()
        if layout == "minimums":
            weight = weight.float().to(dtype).double()
        x = torch.randn(num_rows, of.q.shape[1]).to(dtype)
        expected, largest = product(x, weight, of)
        wide = integers.bind(of, torch.float32)(x)
        assert wide.dtype == torch.float32
        assert ((wide.double() - expected).abs() <= SUMMED * largest).all(), dtype
        assert ((wide.double() - product(x, weight.roll(1, 1), of)[0]).abs() > 100 * SUMMED * largest).any()
        result = integers.bind(of, dtype)(x)
        assert result.dtype == dtype
        assert ((result.double() - wide.double()).abs() <= ROUNDED[dtype] * wide.double().abs() + 1e-12).all()


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize(("bits", "layout", "group_size"), list(cases()))
def test_copies_are_the_dequantized_matrix(bits: int, layout: str, group_size: int) -> None:
    of = sized(bits, layout, group_size)
    packed, expected = Packed.pack(of), of.dequantized().to(torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        piece = torch.full((40, of.q.shape[1]), torch.nan, dtype=dtype)
        for first, end in ((0, 40), (40, OUT_SIZE)):
            copied = integers.copy(packed, slice(first, end), piece)
            assert torch.equal(copied, expected[first:end].to(dtype)), (dtype, first)


@pytest.mark.parametrize("scales", [torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "layout"), [(4, "minimums"), (4, "zeros"), (8, "symmetric")])
def test_scales_of_other_dtypes(bits: int, layout: str, scales: torch.dtype) -> None:
    of = sized(bits, layout, 32, scales)
    x = torch.randn(3, IN_SIZE)
    expected, largest = product(x, of.dequantized(), of)
    assert ((integers.bind(of, torch.float32)(x).double() - expected).abs() <= SUMMED * largest).all()


def test_many_rows_are_multiplied_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the last piece is shorter."""
    monkeypatch.setattr(integers, "_PIECE", 30 * IN_SIZE)
    of = replace(sized(4, "zeros", 64), bias=torch.randn(OUT_SIZE))
    x = torch.randn(129, IN_SIZE)
    expected, largest = product(x, of.dequantized(), of)
    made = []
    monkeypatch.setattr(integers, "copy", lambda *args, do=integers.copy: made.append(do(*args)) or made[-1])
    result = integers.bind(of, torch.float32)(x)
    assert [len(piece) for piece in made] == [30, 30, OUT_SIZE - 60]
    assert ((result.double() - expected).abs() <= SUMMED * largest).all()
    integers.bind(of, torch.float32)(x[:128])
    integers.bind_invariant(of, torch.float32)(x)
    assert len(made) == 3


@pytest.mark.parametrize(("bits", "layout", "group_size"), [(4, "minimums", 32), (4, "e2m1", 16), (8, "zeros", 0)])
def test_a_row_is_its_own(bits: int, layout: str, group_size: int) -> None:
    of = sized(bits, layout, group_size)
    layer = integers.bind_invariant(of, torch.bfloat16)
    row = torch.randn(1, of.q.shape[1]).to(torch.bfloat16)
    alone = layer(row)[0]
    for num_rows in (2, 17, 70, 130):
        neighbours = torch.randn(num_rows, of.q.shape[1]).to(torch.bfloat16) * 10
        neighbours[num_rows // 2] = row
        if num_rows > 2:
            neighbours[0], neighbours[1, 3] = torch.nan, torch.inf
        assert torch.equal(layer(neighbours)[num_rows // 2], alone), num_rows
    assert layer(row[:0]).shape == (0, OUT_SIZE)


@pytest.mark.parametrize("is_invariant", [False, True])
def test_the_ops_run_it_on_a_gpu(is_invariant: bool) -> None:
    name = "triton_invariant" if is_invariant else "triton"
    of, short = sized(4, "zeros", 32), sized(8, "symmetric", 64)
    x = torch.randn(2, IN_SIZE).to(torch.bfloat16)
    for op, bits in ((LINEAR_INT4, of), (LINEAR_INT8, short)):
        choice = op.choice(bits.key(torch.bfloat16, is_invariant=is_invariant)._replace(device_type="cuda"))
        assert choice.chosen == name
        assert bool(choice.varies) != is_invariant
        op.force(name)
    try:
        narrow = linear_int4(of.q, of.scales, None, x.dtype, zeros=of.zeros, is_invariant=is_invariant)(x)
        assert torch.equal(narrow, integers.bind(replace(of, bias=None), x.dtype)(x))
        wide = linear_int8(short.q, short.scales, None, x.dtype, out_dtype=torch.float32, is_invariant=is_invariant)(x)
        assert torch.equal(wide, integers.bind(replace(short, bias=None), torch.float32)(x))
    finally:
        LINEAR_INT4.force(None)
        LINEAR_INT8.force(None)
