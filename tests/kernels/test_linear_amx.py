"""Products of bfloat16 with AMX: bit for bit those of a plain loop in the order of the instruction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inferd.kernels.cpu import library, native
from inferd.kernels.ops.linear import linear
from tests.conftest import KERNEL_CACHE

STEP = 32
SHAPES = [(1, 1), (17, 33), (40, 64), (96, 576), (77, 250), (35, 2100), (80, 4500)]
"""(out, in), with incomplete tiles, panels and steps, and longer rows than the caches take at once."""


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    if "amx" not in library.runnable_levels():
        pytest.skip("this processor or system has no tiles")
    built = native.prepare(KERNEL_CACHE, "amx")
    if built.path is None:
        pytest.skip(built.reason)
    yield
    torch.set_num_threads(1)


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Even and odd inputs of each step in a chain of their own, from 0; then both to the sum so far. fp32 holds a
    product of two bfloat16 exactly, so adding it rounds once, as the instruction does."""
    pad = (0, -x.shape[1] % STEP)
    wide, columns = torch.nn.functional.pad(x.float(), pad), torch.nn.functional.pad(weight.float(), pad).T
    total = torch.zeros(x.shape[0], weight.shape[0])
    for step in range(0, wide.shape[1], STEP):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for i in range(step, step + STEP, 2):
            even += wide[:, i, None] * columns[i]
            odd += wide[:, i + 1, None] * columns[i + 1]
        total += even + odd
    return total


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_equals_the_plain_loop(out_size: int, in_size: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    weight, bias = torch.randn(out_size, in_size).bfloat16(), torch.randn(out_size).bfloat16()
    x = torch.randn(300, in_size + 3).bfloat16()[:, 1:-2]
    expected = in_order(x, weight)
    wide, narrow = linear(weight, None, out_dtype=torch.float32), linear(weight, bias)
    for num_rows in (1, 2, 15, 16, 17, 32, 40, 63, 64, 97, 300):
        assert torch.equal(wide(x[:num_rows]), expected[:num_rows]), num_rows
        rounded = (expected[:num_rows] + bias.float()).bfloat16()
        assert torch.equal(narrow(x[:num_rows]), rounded), num_rows


def test_another_order_gives_other_bits() -> None:
    x, weight = torch.randn(4, 320).bfloat16(), torch.randn(20, 320).bfloat16()
    assert not torch.equal(in_order(x, weight), x.float() @ weight.float().T)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, 1e-40])
def test_special_numbers_stay_in_their_row(value: float) -> None:
    weight, x = torch.randn(50, 70).bfloat16(), torch.randn(40, 70).bfloat16()
    apply = linear(weight, None, out_dtype=torch.float32)
    before = apply(x)
    x[21, 69] = value
    after = apply(x)
    others = torch.arange(40) != 21
    assert torch.equal(after[others], before[others])
    assert after[21].isfinite().all() == (abs(value) < 1e38)
    assert torch.equal(after[21:22].view(torch.int32), apply(x[21:22]).view(torch.int32))


def test_subnormal_numbers_count_as_zero() -> None:
    weight = torch.full((3, 5), 1e3).bfloat16()
    apply = linear(weight, None, out_dtype=torch.float32)
    assert apply(torch.full((2, 5), 1e-40).bfloat16()).eq(0).all()
    assert apply(torch.full((2, 5), 1e-37).bfloat16()).ne(0).all()
