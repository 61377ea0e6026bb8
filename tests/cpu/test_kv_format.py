"""The cost of a KV cache in 8 bits, on text in the embedded model and compared with transformers. It is bounded, and
the bounds are shown to catch a worse cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.layers import attention
from inferd.engine.quant.recipe import RECIPES
from inferd.kernels.ops.kv_format import KV_FORMATS
from tests.cpu.checkpoints import Case, load_decoder, load_transformers
from tests.cpu.divergence import Divergence, Text, divergence, embedded_decoder, held_out_texts, log_probs
from tests.cpu.paging import prompt_logits

FP8, INT8 = KV_FORMATS
KL = {FP8: 6e-4, INT8: 8e-6}
"""Nats a token. Measured on 20 conversations: 0.00041 and 0.000005; with a bit less 0.0022 and 0.000016
(2026-11-23)."""
ERROR = {FP8: 0.08, INT8: 0.024}
"""Share of the logits' norm, with random weights."""

Change = Callable[[Tensor, Tensor], None]
"""A layer's pool and scales after they were written: [blocks, 2, G, block_size, D], [blocks, 2, G, block_size, groups].
"""


def one_bit_less(kv: Tensor, scales: Tensor) -> None:
    """Floats lose a bit of mantissa, integers their last bit."""
    if kv.dtype == FP8:
        kv.copy_(kv.float().to(torch.float8_e5m2).float().clamp(-448, 448).to(FP8))
    else:
        kv.copy_(((kv.float() / 2).round() * 2).clamp(-126, 126).to(INT8))


def scales_of_another_head(kv: Tensor, scales: Tensor) -> None:
    scales.copy_(scales.roll(1, 2))


def scales_of_another_group(kv: Tensor, scales: Tensor) -> None:
    scales.copy_(scales.roll(1, 4))


def values_with_the_scales_of_keys(kv: Tensor, scales: Tensor) -> None:
    scales[:, 1] = scales[:, 0]


CHANGES = (one_bit_less, scales_of_another_head, scales_of_another_group, values_with_the_scales_of_keys)


def change_pools(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    write = attention.rope_and_cache

    def write_and_change(*arguments: Any, **keywords: Any) -> Tensor:
        q, kv, kv_scales = write(*arguments, **keywords), arguments[6], arguments[-1]
        change(kv, kv_scales)
        return q

    monkeypatch.setattr(attention, "rope_and_cache", write_and_change)


@cache
def texts() -> list[Text]:
    return held_out_texts(20)


@cache
def exact() -> Tensor:
    return log_probs(embedded_decoder(RECIPES["none"]), texts())


@pytest.fixture(autouse=True, scope="module")
def _exact_before_any_patch() -> None:
    """`exact` is kept for all tests, so none may compute it with a patched format."""
    exact()


def measured(kv_dtype: torch.dtype) -> Divergence:
    return divergence(exact(), log_probs(embedded_decoder(RECIPES["none"]), texts(), kv_dtype))


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_it_is_near_the_exact_distribution(kv_dtype: torch.dtype) -> None:
    found = measured(kv_dtype)
    assert found.mean_kl < KL[kv_dtype], found
    assert found.top_1 > 0.998, found


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("change", CHANGES)
def test_the_bound_sees_a_worse_cache(kv_dtype: torch.dtype, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    change_pools(monkeypatch, change)
    assert measured(kv_dtype).mean_kl > KL[kv_dtype]


def error(path: Path, dtype: torch.dtype, kv_dtype: torch.dtype) -> float:
    """Error of our logits with K and V in 8 bits, from transformers' logits in fp32, over a prompt in one step."""
    ids = torch.randint(0, 211, (120,), generator=torch.Generator().manual_seed(3))
    theirs = load_transformers(path, torch.float32)(ids[None]).logits[0]
    ours = prompt_logits(load_decoder(path, dtype), ids.tolist(), [len(ids)], kv_dtype)
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    Case("qwen3", "qwen3", {"head_dim": 40}).save(path)
    return path


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_near_transformers_own(checkpoint: Path, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    assert 1e-3 < error(checkpoint, dtype, kv_dtype) < ERROR[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("change", CHANGES)
def test_the_tolerance_sees_a_worse_cache(
    checkpoint: Path, change: Change, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_pools(monkeypatch, change)
    assert error(checkpoint, torch.float32, kv_dtype) > ERROR[kv_dtype]
