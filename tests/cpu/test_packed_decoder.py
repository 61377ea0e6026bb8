"""Decoders whose tokens see those behind them give the hidden states of transformers, which has a switch for that.

As for encoders, our error against fp64 may be little above that of transformers' own run in the dtype.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.wire.params import Pooling
from inferd.engine.arch.description import ArchError
from inferd.engine.arch.registry import describe, is_body, sees_behind
from inferd.engine.models.loader import load
from inferd.engine.models.packed_decoder import PackedDecoder
from inferd.engine.quant.recipe import RECIPES, UNQUANTIZED, Recipe
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import Case, load_transformers, read_config
from tests.cpu.sentence_modules import write_modules
from tests.cpu.test_encoder_worker import Served

LENGTHS = (7, 1, 120, 33)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
RATIO = {torch.float32: 1.5, torch.bfloat16: 2.0}
"""Largest error of hidden states, in errors of transformers. In bfloat16 a router may choose another expert."""


def first(model_type: str) -> Case:
    return next(case for case in CASES if case.model_type == model_type)


def with_config(case: Case, name: str, **changes: Any) -> Case:
    return replace(case, name=name, config={**case.config, **changes})


OTHERS = ("gemma2", "gpt_oss")
"""Families with parts that this kind of attention does not have."""
SWITCHED = [
    with_config(case, case.name, is_causal=False)
    for case in CASES
    if case.model_type not in OTHERS and case.name != "phi 3, long factors"  # they depend on a text's length
]
GEMMA = with_config(first("gemma3_text"), "embedding gemma", use_bidirectional_attention=True, sliding_window=20)
BOTH_SIDES = [GEMMA, *SWITCHED]


def load_packed(directory: Path, dtype: torch.dtype, recipe: Recipe = UNQUANTIZED, **changes: Any) -> PackedDecoder:
    checkpoint = Checkpoint.read(directory)
    arch = describe(checkpoint.config | changes)
    decoder = PackedDecoder(arch, dtype, "cpu", 160, recipe)
    load(decoder, checkpoint.tensors_of(arch))
    return decoder


def hidden_of(directory: Path, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """transformers' states of each sequence, computed alone."""
    model = load_transformers(directory, dtype, AutoModel)
    with torch.inference_mode():
        return torch.cat([model(input_ids=own[None]).last_hidden_state[0] for own in ids.split(LENGTHS)])


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize("dtype", RATIO)
@pytest.mark.parametrize("case", BOTH_SIDES, ids=lambda case: case.name)
def test_hidden_states_are_as_near_to_fp64_as_transformers_own(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    case.save(tmp_path, dtype, AutoModel)
    assert sees_behind(read_config(tmp_path)) and is_body(read_config(tmp_path))
    ids = torch.randint(0, 211, (sum(LENGTHS),))
    ours = load_packed(tmp_path, dtype).forward(ids, STARTS)
    exact = hidden_of(tmp_path, torch.float64, ids)
    allowed = RATIO[dtype] * rms(hidden_of(tmp_path, dtype, ids) - exact)
    assert rms(ours - exact) < allowed
    if dtype is torch.float32 and case.broken:
        broken = load_packed(tmp_path, dtype, **case.broken).forward(ids, STARTS)
        assert rms(broken - exact) > 20 * allowed


def test_half_of_embedding_gemmas_window_lies_on_each_side(tmp_path: Path) -> None:
    GEMMA.save(tmp_path, auto=AutoModel)
    config = read_config(tmp_path)
    assert config["sliding_window"] == 20 and config["architectures"] == ["Gemma3TextModel"]
    assert set(describe(config).windows) == {10, None}
    ids = torch.randint(0, 211, (sum(LENGTHS),))
    exact = hidden_of(tmp_path, torch.float64, ids)
    wrong = rms(load_packed(tmp_path, torch.float32, sliding_window=22).forward(ids, STARTS) - exact)
    assert wrong > 1000 * rms(load_packed(tmp_path, torch.float32).forward(ids, STARTS) - exact)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", RATIO)
@pytest.mark.parametrize("case", [GEMMA, SWITCHED[0]], ids=lambda case: case.name)
def test_a_sequence_has_the_same_bits_whatever_it_is_packed_with(
    case: Case, dtype: torch.dtype, quantization: str, tmp_path: Path
) -> None:
    with_config(case, case.name, intermediate_size=128).save(tmp_path, torch.float32, AutoModel)
    decoder = load_packed(tmp_path, dtype, RECIPES[quantization])
    ids = torch.randint(0, 211, (sum(LENGTHS),))
    hidden = decoder.forward(ids, STARTS)
    torch.set_num_threads(3)
    assert torch.equal(decoder.forward(ids, STARTS), hidden)
    torch.set_num_threads(1)
    for start, length in zip(STARTS.tolist(), LENGTHS, strict=False):
        alone = decoder.forward(ids[start : start + length], torch.tensor([0, length], dtype=torch.int32))
        assert torch.equal(alone, hidden[start : start + length])


# -- by their names ----------------------------------------------------------------------------------------------------

LLAMA = SWITCHED[0]


def rename(directory: Path, **changes: Any) -> None:
    """Write other fields into config.json, and remove those that are `...`."""
    config = {**read_config(directory), **changes}
    config = {name: value for name, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))


def test_llama_bidirectional(tmp_path: Path) -> None:
    """A class of its own says so, and no field."""
    LLAMA.save(tmp_path, auto=AutoModel)
    ids = torch.randint(0, 211, (sum(LENGTHS),))
    exact = hidden_of(tmp_path, torch.float64, ids)
    assert rms(load_packed(tmp_path, torch.float32).forward(ids, STARTS) - exact) < 1e-5
    rename(
        tmp_path, architectures=["LlamaBidirectionalModel"], model_type="llama_bidirec", is_causal=..., pooling="avg"
    )
    assert rms(load_packed(tmp_path, torch.float32).forward(ids, STARTS) - exact) < 1e-5
    rename(tmp_path, architectures=["LlamaModel"])
    assert not sees_behind(read_config(tmp_path)) and is_body(read_config(tmp_path))


@pytest.mark.parametrize("pooling", ["avg", "last"])
def test_a_classifier_reads_the_mean_or_the_last_state(pooling: str, tmp_path: Path) -> None:
    case = with_config(LLAMA, "classifier", num_labels=3)
    case.save(tmp_path, auto=AutoModelForSequenceClassification)
    ids = torch.randint(0, 211, (sum(LENGTHS),))
    model = load_transformers(tmp_path, torch.float64, AutoModelForSequenceClassification)
    with torch.inference_mode():
        texts = [model.model(input_ids=own[None]).last_hidden_state[0] for own in ids.split(LENGTHS)]
        exact = model.score(torch.stack([own.mean(0) if pooling == "avg" else own[-1] for own in texts]))
    rename(tmp_path, architectures=["LlamaBidirectionalForSequenceClassification"], is_causal=..., pooling=pooling)
    decoder = load_packed(tmp_path, torch.float32)
    hidden = decoder.forward(ids, STARTS)
    found = decoder.logits(hidden, STARTS)
    assert found.shape == (len(LENGTHS), 3) and rms(found - exact) < 1e-5 < 0.01 < rms(exact - exact.roll(1, 0))
    alone = decoder.logits(hidden[8:128], torch.tensor([0, 120], dtype=torch.int32))
    assert torch.equal(alone, found[2:3])


def test_a_head_that_is_stored_is_not_read(tmp_path: Path) -> None:
    """As gte-Qwen2 is stored: a model that could generate, whose config says that it does not look ahead alone."""
    case = with_config(first("qwen2"), "gte", is_causal=False, tie_word_embeddings=False)
    case.save(tmp_path)
    assert read_config(tmp_path)["architectures"] == ["Qwen2ForCausalLM"] and is_body(read_config(tmp_path))
    ids = torch.randint(0, 211, (sum(LENGTHS),))
    exact = hidden_of(tmp_path, torch.float64, ids)
    decoder = load_packed(tmp_path, torch.float32)
    assert "lm_head.weight" in Checkpoint.read(tmp_path).tensors and "lm_head.weight" not in decoder.parameters
    assert rms(decoder.forward(ids, STARTS) - exact) < 1e-5


@pytest.mark.parametrize("model_type", OTHERS)
def test_parts_that_this_attention_does_not_have_are_refused(model_type: str) -> None:
    with pytest.raises(ArchError, match="tokens that see those behind them are not supported"):
        describe(with_config(first(model_type), "other", is_causal=False).config_json())


def test_a_temperature_is_refused() -> None:
    config = {**LLAMA.config_json(), "architectures": ["LlamaBidirectionalForSequenceClassification"]}
    with pytest.raises(ArchError, match="temperature must be 1"):
        describe({**config, "temperature": 0.02})


# -- served ------------------------------------------------------------------------------------------------------------


def test_embedding_gemma_is_served_with_its_dense_layers(tmp_path: Path) -> None:
    GEMMA.save(tmp_path, auto=AutoModel)
    dense = [nn.Sequential(nn.Linear(*sizes, bias=False), nn.Identity()) for sizes in ((96, 256), (256, 64))]
    write_modules(tmp_path, ["mean", *dense, "Normalize"])
    served = Served(tmp_path, dtype="float32")
    inputs = torch.randint(0, 211, (sum(LENGTHS),)).split(LENGTHS)
    asks = {str(i): (ids.tolist(), Pooling("mean")) for i, ids in enumerate(inputs)}
    exact = hidden_of(tmp_path, torch.float64, torch.cat(inputs)).split(LENGTHS)
    found = served.vectors(asks)
    with torch.inference_mode():
        for i, states in enumerate(exact):
            theirs = nn.Sequential(*dense).double()(states.mean(0))
            assert 1 - float(torch.cosine_similarity(found[str(i)].double(), theirs, dim=0)) < 1e-10
    assert all(torch.equal(served.vectors({key: ask})[key], found[key]) for key, ask in asks.items())
    chat = served.answers({"chat": ([1, 2], None)})["chat"]
    assert chat.failure is not None and chat.finish_reason == "error"


def test_a_classifier_is_served(tmp_path: Path) -> None:
    case = with_config(LLAMA, "classifier", num_labels=2)
    case.save(tmp_path, auto=AutoModelForSequenceClassification)
    model, ids = load_transformers(tmp_path, torch.float64, AutoModelForSequenceClassification), [5, 6, 7, 8]
    served = Served(tmp_path, dtype="float32")
    assert served.ready.num_labels == 2 and not served.ready.generates
    with torch.inference_mode():
        exact = model(torch.tensor([ids])).logits[0]
    found = served.vectors({"a": (ids, Pooling(gives="logits"))})["a"]
    assert float((found - exact).abs().max()) < 1e-5
