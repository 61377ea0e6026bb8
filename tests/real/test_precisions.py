"""The cost of each precision on the real model: bounds on the divergence from float32, which wrong versions break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.quality.material import Material
from benchmarks.quality.measure import Model, Quality, Reference
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.quant.integer import Int8
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe
from tests.cpu.test_fp8_kv import change_pools, two_bits_of_mantissa
from tests.cpu.test_quant_quality import FP8_CHANGES, INT4_CHANGES, INT8_CHANGES, BrokenFp8, BrokenInt4, BrokenInt8
from tests.real.conftest import Recording

FP8 = torch.float8_e4m3fn
NUM_TOKENS = 256
BOUNDS = {"bfloat16": 0.001, "int8": 0.065, "int4": 0.42, "fp8": 0.065, "KV in fp8": 0.008}
"""Nats a token, of the KL divergence from float32 on the first tokens of the text. Measured: 0.0005, 0.047, 0.33, 0.048
and 0.0056."""

Load = Callable[[Checkpoint], Model]


def quantized(recipe: str | Recipe, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> Load:
    return lambda checkpoint: Model.load(checkpoint, dtype, recipe, kv_dtype)


RIGHT: dict[str, Load] = {
    "bfloat16": quantized("none", torch.bfloat16),
    "int8": quantized("int8"),
    "int4": quantized("int4"),
    "fp8": quantized("fp8"),
    "KV in fp8": quantized("none", kv_dtype=FP8),
}
_int8 = BrokenInt8(INT8_CHANGES["6 bits"])
_fp8 = BrokenFp8(FP8_CHANGES["the scale of the next row"])
WRONG: dict[str, Load] = {
    "bfloat16": quantized(Recipe(UNQUANTIZED.layers, Int8()), torch.bfloat16),
    "int8": quantized(Recipe(_int8, _int8)),
    "int4": quantized(Recipe(BrokenInt4(INT4_CHANGES["scales 10% too large"]), Int8())),
    "fp8": quantized(Recipe(_fp8, _fp8)),
    "KV in fp8": quantized("none", kv_dtype=FP8),
}


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint, recording: Recording) -> Reference:
    with torch.inference_mode():
        return Reference(checkpoint, Material([recording.windows[0].ids[:NUM_TOKENS]], [], frozenset()), _nothing)


def _nothing() -> None:
    pass


def measured(reference: Reference, checkpoint: Checkpoint, load: Load) -> Quality:
    return reference.compare(load(checkpoint), _nothing)


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("name", RIGHT)
def test_a_precision_is_near_float32(reference: Reference, checkpoint: Checkpoint, name: str) -> None:
    found = measured(reference, checkpoint, RIGHT[name])
    assert found.kl < BOUNDS[name], found


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("name", WRONG)
def test_the_bound_sees_a_wrong_version(
    reference: Reference, checkpoint: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "KV in fp8":
        change_pools(monkeypatch, two_bits_of_mantissa)
    found = measured(reference, checkpoint, WRONG[name])
    assert found.kl > BOUNDS[name], found
