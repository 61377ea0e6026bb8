"""Compares encoders with transformers on random checkpoints: hidden states, and logits of classifiers.

The measure is the error against transformers in fp64 on the same rounded weights. Ours may be at most `RATIO` times the
error of transformers' own run in the checkpoint's dtype. With one detail changed, it must be far above.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.encoder_registry import describe_encoder, is_encoder
from inferd.engine.models import encoder as encoder_module
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.loader import load
from inferd.engine.quant.recipe import recipes
from tests.cpu.checkpoints import read_config
from tests.cpu.encoder_cases import CASES, VOCAB, EncoderCase, load_encoder, load_transformers

RECIPES = recipes(of_encoder=True)
RATIO = {torch.float32: 1.5, torch.bfloat16: 1.2}
"""Largest error of hidden states, in errors of transformers."""
LOGITS_RATIO = 2.5
"""The same of logits, of which there are few."""
LARGEST = 1e-5
"""Largest difference of a component from transformers in fp32, of numbers near one. Measured: 2e-6 to 7e-6."""
LENGTHS = (7, 1, 120, 33)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
CLASSIFIES = "ForSequenceClassification"
LOSSES = {"int8": 0.998, "int4": 0.9}
"""Least mean cosine of hidden states with those of the unquantized model. Rows of 64 random weights lose far more than
those of real models."""


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> EncoderCase:
    found: EncoderCase = request.param
    return found


def random_inputs(case: EncoderCase) -> tuple[Tensor, Tensor | None]:
    """Ids without the padding token's, and token types of pairs. No family has more than one padding token below 4."""
    ids = torch.randint(4, VOCAB, (sum(LENGTHS),))
    num_types = case.config.get("type_vocab_size", 2)
    return ids, torch.randint(0, num_types, ids.shape) if case.has_token_types else None


def by_transformers(model: Any, ids: Tensor, types: Tensor | None) -> Sequence[Any]:
    """The output for each sequence, computed alone."""
    parts = zip(ids.split(LENGTHS), (torch.zeros_like(ids) if types is None else types).split(LENGTHS), strict=True)
    return [
        model(input_ids=own[None], **({} if types is None else {"token_type_ids": own_types[None]}))
        for own, own_types in parts
    ]


def hidden_by_transformers(model: Any, ids: Tensor, types: Tensor | None) -> Tensor:
    return torch.cat([output.last_hidden_state[0] for output in by_transformers(model, ids, types)])


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", RATIO)
def test_hidden_states_are_as_near_to_fp64_as_transformers_own(
    case: EncoderCase, dtype: torch.dtype, tmp_path: Path
) -> None:
    case.save(tmp_path, dtype)
    ids, types = random_inputs(case)
    ours = load_encoder(tmp_path, dtype).forward(ids, STARTS, types)
    theirs = hidden_by_transformers(load_transformers(tmp_path, dtype), ids, types)
    exact = hidden_by_transformers(load_transformers(tmp_path, torch.float64), ids, types)
    allowed = RATIO[dtype] * rms(theirs - exact)
    assert rms(ours - exact) < allowed
    if dtype is torch.float32:
        assert float((ours - theirs).abs().max()) < LARGEST
        broken = load_encoder(tmp_path, dtype, case.broken).forward(ids, STARTS, types)
        assert rms(broken - exact) > 100 * allowed


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "mpnet"])
def test_a_padding_token_inside_a_text_has_the_position_that_transformers_gives_it(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    case.save(tmp_path)
    ids, types = random_inputs(case)
    padding_id = case.config.get("pad_token_id", 0)
    starts = STARTS.tolist()
    for place in (starts[0], starts[1] + 1, starts[1] + 2, starts[2] - 1, *range(starts[2], starts[3])):
        ids[place] = padding_id
    encoder = load_encoder(tmp_path, torch.float32)
    theirs = hidden_by_transformers(load_transformers(tmp_path, torch.float32), ids, types)
    assert float((encoder.forward(ids, STARTS, types) - theirs).abs().max()) < LARGEST
    positions = encoder.arch.positions
    assert positions is not None and (positions.padding_id is None) == (name == "bert")
    if name != "bert":
        plain = replace(encoder.arch, positions=replace(positions, padding_id=None))
        other = Encoder(plain, torch.float32, "cpu")
        load(other, Checkpoint.read(tmp_path).tensors_of(plain))
        assert float((other.forward(ids, STARTS, types) - theirs).abs().max()) > 1_000 * LARGEST


@pytest.mark.parametrize("dtype", RATIO)
def test_logits_are_as_near_to_fp64_as_transformers_own(case: EncoderCase, dtype: torch.dtype, tmp_path: Path) -> None:
    case.save(tmp_path, dtype, CLASSIFIES)
    ids, types = random_inputs(case)
    encoder = load_encoder(tmp_path, dtype)
    ours = encoder.logits(encoder.forward(ids, STARTS, types), STARTS)
    theirs, exact = (
        torch.cat([output.logits for output in by_transformers(load_transformers(tmp_path, one), ids, types)])
        for one in (dtype, torch.float64)
    )
    assert ours.shape == (len(LENGTHS), 3) and ours.dtype == torch.float32
    assert rms(ours - exact) < max(LOGITS_RATIO * rms(theirs - exact), LARGEST)
    assert rms(exact - exact.roll(1, 0)) > 10 * rms(ours - exact), "the texts have nearly the same logits"


def test_the_names_of_jinas_own_code(tmp_path: Path) -> None:
    """jina-reranker-v2 is an XLM-RoBERTa with q, k and v in one tensor, whose config calls it one."""
    case = next(case for case in CASES if case.name == "xlm-roberta")
    case.save(tmp_path, end=CLASSIFIES)
    ids, types = random_inputs(case)
    plain = load_encoder(tmp_path, torch.float32)
    names = {
        "attention.output.dense": "mixer.out_proj", "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "output.LayerNorm": "norm2",
        "embeddings.LayerNorm": "emb_ln", "encoder.layer.": "encoder.layers.",
    }  # fmt: skip
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        own = name
        for theirs, jinas in names.items():
            own = own.replace(theirs, jinas)
        found[own] = tensor
    for query in [name for name in found if ".self.query." in name]:
        parts = [found.pop(query.replace("query", part)) for part in ("query", "key", "value")]
        found[query.replace("attention.self.query", "mixer.Wqkv")] = torch.cat(parts)
    save_file(found, tmp_path / "model.safetensors")
    config = read_config(tmp_path) | {"use_flash_attn": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_encoder(config) and describe_encoder(config).architecture == "XLMRobertaFlashForSequenceClassification"
    hidden, jinas_own = plain.forward(ids, STARTS, types), load_encoder(tmp_path, torch.float32)
    assert torch.equal(jinas_own.forward(ids, STARTS, types), hidden)
    assert torch.equal(jinas_own.logits(hidden, STARTS), plain.logits(hidden, STARTS))


def test_dropped_token_types_show(tmp_path: Path) -> None:
    case = CASES[0]
    case.save(tmp_path)
    ids, types = random_inputs(case)
    encoder = load_encoder(tmp_path, torch.float32)
    theirs = hidden_by_transformers(load_transformers(tmp_path, torch.float32), ids, types)
    assert rms(encoder.forward(ids, STARTS, types) - theirs) < LARGEST
    assert rms(encoder.forward(ids, STARTS) - theirs) > 1000 * LARGEST
    zeros = encoder.forward(ids, STARTS, torch.zeros_like(ids))
    assert torch.equal(encoder.forward(ids, STARTS), zeros)


def test_the_direction_of_distances_shows(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.family == "MPNet")
    case.save(tmp_path)
    ids, _ = random_inputs(case)
    encoder = load_encoder(tmp_path, torch.float32)
    theirs = hidden_by_transformers(load_transformers(tmp_path, torch.float32), ids, None)
    assert rms(encoder.forward(ids, STARTS) - theirs) < LARGEST
    bias = encoder._layers[0]._attention._bias
    assert bias is not None
    bias.distances = bias.distances.flip(1).contiguous()
    assert rms(encoder.forward(ids, STARTS) - theirs) > 1000 * LARGEST


@pytest.mark.parametrize("dtype", RATIO)
@pytest.mark.parametrize("quantization", ["none", *LOSSES])
def test_a_sequence_has_the_same_bits_whatever_it_is_packed_with(
    case: EncoderCase, dtype: torch.dtype, quantization: str, tmp_path: Path
) -> None:
    case.save(tmp_path, torch.float32, CLASSIFIES)
    encoder = load_encoder(tmp_path, dtype, recipe=RECIPES[quantization])
    ids, types = random_inputs(case)
    hidden = encoder.forward(ids, STARTS, types)
    logits = encoder.logits(hidden, STARTS)
    torch.set_num_threads(3)
    assert torch.equal(encoder.forward(ids, STARTS, types), hidden)
    torch.set_num_threads(1)
    for index, (first, length) in enumerate(zip(STARTS.tolist(), LENGTHS, strict=False)):
        own, own_types = ids[first : first + length], None if types is None else types[first : first + length]
        starts = torch.tensor([0, length], dtype=torch.int32)
        alone = encoder.forward(own, starts, own_types)
        assert torch.equal(alone, hidden[first : first + length])
        assert torch.equal(encoder.logits(alone, starts), logits[index : index + 1])


@pytest.mark.parametrize("most_tokens", [1, sum(LENGTHS) // 2])
def test_a_batch_computed_in_parts_has_the_same_bits(
    case: EncoderCase, most_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.save(tmp_path)
    encoder = load_encoder(tmp_path, torch.float32)
    ids, types = random_inputs(case)
    whole = encoder.forward(ids, STARTS, types)
    monkeypatch.setattr(encoder_module, "_TOKENS_TOGETHER", most_tokens)
    assert torch.equal(encoder.forward(ids, STARTS, types), whole)


@pytest.mark.parametrize("quantization", LOSSES)
def test_quantized_weights_lose_little(case: EncoderCase, quantization: str, tmp_path: Path) -> None:
    case.save(tmp_path)
    ids, types = random_inputs(case)
    exact = load_encoder(tmp_path, torch.float32).forward(ids, STARTS, types)
    quantized = load_encoder(tmp_path, torch.float32, recipe=RECIPES[quantization]).forward(ids, STARTS, types)
    cosine = float(torch.cosine_similarity(exact, quantized).mean())
    assert LOSSES[quantization] < cosine < 1 - 1e-6


def test_weights_of_16_bits_give_the_bits_of_wide_ones(case: EncoderCase, tmp_path: Path) -> None:
    case.save(tmp_path, torch.float16, CLASSIFIES)
    ids, types = random_inputs(case)
    wide = load_encoder(tmp_path, torch.float32)
    narrow = load_encoder(tmp_path, torch.float32, recipe=recipes(narrow=torch.float16)["none"])
    hidden = wide.forward(ids, STARTS, types)
    assert torch.equal(narrow.forward(ids, STARTS, types), hidden)
    assert torch.equal(narrow.logits(hidden, STARTS), wide.logits(hidden, STARTS))
    sizes = [sum(p.dtype.itemsize * prod(p.shape) for p in one.parameters.values()) for one in (narrow, wide)]
    assert sizes[0] < 0.6 * sizes[1]


def test_heads_of_other_classes_are_not_read(case: EncoderCase, tmp_path: Path) -> None:
    """A model for masked tokens has a prefix in its names and a head; its hidden states are those of the plain one."""
    case.save(tmp_path, end="ForMaskedLM")
    ids, types = random_inputs(case)
    masked = load_transformers(tmp_path, torch.float32)
    theirs = hidden_by_transformers(masked.base_model, ids, types)
    assert float((load_encoder(tmp_path, torch.float32).forward(ids, STARTS, types) - theirs).abs().max()) < LARGEST


def test_an_encoder_without_sequences_gives_nothing(tmp_path: Path) -> None:
    CASES[0].save(tmp_path)
    encoder: Encoder = load_encoder(tmp_path, torch.float32)
    nothing = torch.tensor([0], dtype=torch.int32)
    assert encoder.forward(torch.empty(0, dtype=torch.int64), nothing).shape == (0, 64)
