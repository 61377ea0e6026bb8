"""Quantized layers with AMX: bit for bit the dense layer with the dequantized weights, each rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inferd.kernels import native, quantized_tiles
from inferd.kernels.linear import linear
from inferd.kernels.linear_int4 import linear_int4
from inferd.kernels.linear_int8 import LINEAR_INT8, linear_int8
from inferd.kernels.quantized import Key, Matrix
from tests.conftest import KERNEL_CACHE
from tests.kernels.test_quantized import cases, matrix, same_bits

ROWS = (1, 2, 16, 17, 32, 33, 70)


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    if "amx" not in native.runnable_levels():
        pytest.skip("this processor or system has no tiles")
    built = native.prepare(KERNEL_CACHE, "amx")
    if built.path is None:
        pytest.skip(built.reason)
    yield
    torch.set_num_threads(1)


def dequantized(of: Matrix) -> Tensor:
    """The weights in bfloat16. They are exact in float32, or rounded to it once."""
    return of.dequantized().float().bfloat16()


@pytest.mark.sampled(keep=24)
@pytest.mark.parametrize(("bits", "layout", "group_size", "scales"), list(cases()))
@pytest.mark.parametrize("num_threads", [1, 3])
def test_equals_the_dense_layer(bits: int, layout: str, group_size: int, scales: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    in_size = 48 if group_size == 16 else 2304 if group_size else 389
    of = matrix(bits, layout, group_size, scales, in_size)
    if layout == "zeros":  # a zero point times a scale is exact with 16 bits alone
        of = replace(of, scales=of.scales.bfloat16().to(scales))
    assert of.bias is not None
    x = torch.randn(ROWS[-1], in_size).bfloat16()
    x[1, 40], x[20, -1], x[33, 0] = torch.nan, torch.inf, -torch.inf
    ordered = x if of.order is None else x[:, of.order.long()]
    expected = linear(dequantized(of), None, out_dtype=torch.float32)(ordered) + of.bias
    wide, narrow = quantized_tiles.bind(of, torch.float32), quantized_tiles.bind(of, torch.bfloat16)
    for num_rows in ROWS:
        assert same_bits(wide(x[:num_rows]), expected[:num_rows]), num_rows
        assert same_bits(narrow(x[:num_rows]), expected[:num_rows].bfloat16()), num_rows


@pytest.mark.parametrize(("bits", "in_size"), [(4, 64), (8, 64), (4, 4500), (8, 4500)])
@pytest.mark.parametrize("out_size", [1, 16, 40])
def test_other_sizes(bits: int, in_size: int, out_size: int) -> None:
    q = torch.randint(0, 16, (out_size, in_size))
    of = Matrix(q.to(torch.uint8 if bits == 4 else torch.int8), torch.rand(out_size, 1).bfloat16(), None)
    x = torch.randn(300, in_size + 7).bfloat16()[:, 3:-4]
    expected = linear(dequantized(of), None)(x)
    layer = quantized_tiles.bind(of, torch.bfloat16)
    assert all(torch.equal(layer(x[:num_rows]), expected[:num_rows]) for num_rows in (0, 1, 64, 65, 300))


def test_numbers_of_the_ends_and_scales_of_every_size() -> None:
    numbers = torch.arange(-128, 128, dtype=torch.int8).repeat(3, 1)
    for scale in (1.0, -3e-28, 1e30):
        of = Matrix(numbers, torch.full((3, 1), scale), None)
        assert torch.equal(
            quantized_tiles.bind(of, torch.float32)(torch.eye(256).bfloat16()).T, dequantized(of).float()
        )
    of = Matrix(numbers, torch.tensor([[torch.nan], [1.0], [torch.inf]]), None)
    assert torch.equal(
        quantized_tiles.bind(of, torch.float32)(torch.eye(256).bfloat16()).isfinite().all(0),
        torch.tensor([False, True, False]),
    )


def test_it_is_chosen_for_bfloat16_alone() -> None:
    q, scales = torch.ones(5, 64, dtype=torch.int8), torch.ones(5, 1)
    for dtype, chosen in ((torch.bfloat16, "tiles"), (torch.float32, "cpp")):
        for layer in (linear_int8(q, scales, None, dtype), linear_int4(q.to(torch.uint8), scales, None, dtype)):
            assert torch.equal(layer(torch.ones(2, 64, dtype=dtype)).abs() > 1, torch.ones(2, 5, dtype=torch.bool))
        assert LINEAR_INT8.choice(Key("cpu", dtype)).chosen == chosen


def test_it_says_why_it_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "takes activations in bfloat16" in (quantized_tiles.refuses(Key("cpu", torch.float32)) or "")
    monkeypatch.setattr(native, "level", lambda: "avx2")
    assert "compiled for avx2" in (quantized_tiles.refuses(Key("cpu", torch.bfloat16)) or "")
