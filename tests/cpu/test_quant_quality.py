"""The cost of 8 and 4 bits on text, in the embedded model. It is bounded, and the bounds are shown to catch broken
quantization.

Int8 and int4 are integers, fp8 is floating-point.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from inferd.engine.quant.fp8 import Fp8
from inferd.engine.quant.integer import Int4, Int8
from inferd.engine.quant.recipe import RECIPES, Recipe
from inferd.engine.quant.scheme import DENSE, Apply
from inferd.kernels.ops.linear_fp8 import FP8, linear_fp8, quantize_weight
from inferd.kernels.ops.linear_int4 import GROUP_SIZE, linear_int4, quantize_int4
from inferd.kernels.ops.linear_int8 import linear_int8, quantize_int8
from tests.cpu.divergence import Divergence, Text, divergence, embedded_decoder, held_out_texts, log_probs

INT8_KL, INT4_KL = 6e-5, 3.2e-3
"""Nats a token. Measured on 20 conversations: 0.00003 and 0.0024."""
FP8_KL = {"cpp": 4e-4, "reference": 7e-4}
"""By kernels, because only the plain PyTorch quantizes activations. Measured: 0.00027 and 0.00055."""
NUM_CONVERSATIONS = 20

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Change4 = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@cache
def texts() -> list[Text]:
    return held_out_texts(NUM_CONVERSATIONS)


@cache
def exact() -> Tensor:
    return log_probs(embedded_decoder(RECIPES["none"]), texts())


def measured(recipe: Recipe) -> Divergence:
    return divergence(exact(), log_probs(embedded_decoder(recipe), texts()))


class BrokenInt8(Int8):
    def __init__(self, change: Change) -> None:
        self._change = change

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        return linear_int8(*self._change(*quantize_int8(weight)), bias, weight.dtype)


class BrokenInt4(Int4):
    def __init__(self, change: Change4) -> None:
        self._change = change

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        q, scales, minimums = self._change(*quantize_int4(weight))
        return linear_int4(q, scales, bias, weight.dtype, minimums=minimums)


class BrokenFp8(Fp8):
    def __init__(self, change: Change) -> None:
        self._change = change

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        return linear_fp8(*self._change(*quantize_weight(weight)), bias, weight.dtype)


def test_8_bits_are_near_the_exact_distribution() -> None:
    found = measured(RECIPES["int8"])
    assert found.mean_kl < INT8_KL, found
    assert found.top_1 > 0.998, found


def test_4_bits_are_near_the_exact_distribution() -> None:
    found = measured(RECIPES["int4"])
    assert found.mean_kl < INT4_KL, found
    assert found.top_1 > 0.99, found


def test_floating_8_bits_are_near_the_exact_distribution(kernels: str) -> None:
    found = measured(RECIPES["fp8"])
    assert found.mean_kl < FP8_KL[kernels], found
    assert found.top_1 > 0.995, found


FP8_CHANGES: dict[str, Change] = {
    "the scale of the next row": lambda q, scales: (q, scales.roll(1, 0)),
    "scales 6% too large": lambda q, scales: (q, scales * 1.06),
    "two bits of mantissa": lambda q, scales: (q.to(torch.float8_e5m2).to(torch.float32).to(FP8), scales),
}
INT8_CHANGES: dict[str, Change] = {
    "the scale of the next row": lambda q, scales: (q, scales.roll(1, 0)),
    "6 bits": lambda q, scales: (q // 4 * 4, scales),
}
INT4_CHANGES: dict[str, Change4] = {
    "the scales of the next group": lambda q, scales, minimums: (q, scales.roll(1, 1), minimums),
    "the minimums of the next group": lambda q, scales, minimums: (q, scales, minimums.roll(1, 1)),
    "scales 10% too large": lambda q, scales, minimums: (q, scales * 1.1, minimums),
    "3 bits": lambda q, scales, minimums: ((q // 2 * 2 + 1).to(torch.uint8), scales, minimums),
    "minimums half a step too large": lambda q, scales, minimums: (q, scales, minimums + scales / 2),
}


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("change", INT8_CHANGES)
def test_the_bound_sees_broken_8_bits(change: str) -> None:
    scheme = BrokenInt8(INT8_CHANGES[change])
    assert measured(Recipe(scheme, scheme)).mean_kl > INT8_KL


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("change", FP8_CHANGES)
def test_the_bound_sees_broken_floating_8_bits(change: str, kernels: str) -> None:
    assert measured(Recipe(BrokenFp8(FP8_CHANGES[change]), DENSE)).mean_kl > FP8_KL[kernels]


class SymmetricInt4(Int4):
    """Int4 without minimums and with the usual scale: max |w| / 7."""

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        groups = weight.unflatten(1, (-1, GROUP_SIZE))
        scales = (groups.abs().amax(2) / 7).to(torch.bfloat16)
        q = (groups / scales.unsqueeze(2)).round().clamp(-8, 7) + 8
        return linear_int4(q.flatten(1).to(torch.uint8), scales, bias, weight.dtype)


def test_the_bound_sees_missing_minimums() -> None:
    assert measured(Recipe(SymmetricInt4(), Int8())).mean_kl > INT4_KL


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("change", INT4_CHANGES)
def test_the_bound_sees_broken_4_bits(change: str) -> None:
    assert measured(Recipe(BrokenInt4(INT4_CHANGES[change]), Int8())).mean_kl > INT4_KL
