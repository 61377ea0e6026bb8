"""Decoders that classify give the logits of transformers, in chunks, among other requests and after prefix hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from inferd.engine.api.checkpoint import Checkpoint, has_head
from inferd.engine.api.wire.params import Pooling
from inferd.engine.arch.registry import describe
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import Case, load_decoder, load_transformers, read_config
from tests.cpu.test_pooling import numbers, pooled, runner_of

LABELS = {"llama": 1, "mistral": 3, "qwen2": 1, "qwen3": 3, "gemma2": 2, "gemma3_text": 1, "qwen3_moe": 2}
"""Number of labels of the first case of each family. Reward models and rerankers have one."""
FIRSTS = [
    replace(case, config={**case.config, "num_labels": count})
    for name, count in LABELS.items()
    for case in [next(case for case in CASES if case.model_type == name)]
]
RATIO = {torch.float32: 1.5, torch.bfloat16: 2.0}
"""Our error may be so many times that of transformers' own run in the dtype."""
AS_LOGITS = Pooling(gives="logits")


def theirs(directory: Path, dtype: torch.dtype, inputs: Sequence[Sequence[int]]) -> Tensor:
    model: Any = load_transformers(directory, dtype, AutoModelForSequenceClassification)
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([ids])).logits[0].double() for ids in inputs])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", RATIO)
@pytest.mark.parametrize("case", FIRSTS, ids=lambda case: case.model_type)
def test_logits_are_as_near_to_fp64_as_transformers_own(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    case.save(tmp_path, dtype, AutoModelForSequenceClassification)
    inputs = [torch.randint(0, 211, (length,)).tolist() for length in (1, 5, 18, 31, 33, 40, 64, 100)]
    runner = runner_of(load_decoder(tmp_path, dtype, max_positions=case.max_positions))
    ours = torch.stack([numbers(pooled(runner, ids, AS_LOGITS).embedding) for ids in inputs])
    assert ours.shape == (8, case.config["num_labels"])
    exact = theirs(tmp_path, torch.float64, inputs)
    allowed = RATIO[dtype] * error(theirs(tmp_path, dtype, inputs), exact)
    assert error(ours, exact) < allowed
    assert error(ours, theirs(tmp_path, torch.float64, [[*ids, 7] for ids in inputs])) > 2 * allowed, "one token more"
    for chunks in ((1, 99), (33, 33, 34)):
        assert torch.equal(numbers(pooled(runner, inputs[-1], AS_LOGITS, chunks).embedding), ours[-1])


def test_a_classifier_has_no_other_head(tmp_path: Path) -> None:
    case = replace(CASES[0], config={**CASES[0].config, "num_labels": 5})
    case.save(tmp_path, auto=AutoModelForSequenceClassification)
    config = read_config(tmp_path)
    assert config["architectures"] == ["LlamaForSequenceClassification"] and not has_head(config)
    checkpoint = Checkpoint.read(tmp_path)
    arch = describe(checkpoint.config)
    assert arch.num_labels == 5 and arch.architecture == "LlamaForCausalLM"
    assert not arch.has_head and not arch.tie_embeddings
    # The vector of an embedding is the same as without a classifier.
    runner = runner_of(load_decoder(tmp_path, torch.float32))
    assert numbers(pooled(runner, [1, 2, 3], Pooling()).embedding).shape == (64,)
