"""The text parts of models that also see, compared with transformers' whole models on texts. Their other weights are
left out, and said to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load
from tests.cpu.checkpoints import SMALL
from tests.cpu.paging import prompt_logits

VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
CHUNKS = (20, 1, 14)


@dataclass(frozen=True)
class Case:
    model_type: str
    text_type: str
    vision_type: str | None
    text: dict[str, Any]
    broken: dict[str, Any]
    """Fields of the text part; with them the logits must differ."""

    def save(self, directory: Path) -> None:
        text = {**SMALL, "head_dim": 16, "model_type": self.text_type, **self.text}
        vision = {**VISION, **({} if self.vision_type is None else {"model_type": self.vision_type})}
        config = AutoConfig.for_model(self.model_type, text_config=text, vision_config=vision)
        torch.manual_seed(1)
        model: Any = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.15)
        model.save_pretrained(directory)


CASES = (
    Case(
        "gemma3", "gemma3_text", "siglip_vision_model",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"sliding_window": 21},
    ),
    Case(
        "gemma4", "gemma4_text", None,
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
         "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 0, "pad_token_id": 0},
        {"sliding_window": 21},
    ),
    Case(
        "gemma4_unified", "gemma4_unified_text", None,
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
         "head_dim": 32, "global_head_dim": 64, "pad_token_id": 0},
        {"sliding_window": 21},
    ),
    Case("mistral3", "mistral", "pixtral", {"sliding_window": None}, {"sliding_window": 20}),
    Case(
        "qwen2_5_vl", "qwen2_5_vl_text", None,
        {"head_dim": 8, "rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}},
        {"rope_parameters": MROPE | {"rope_theta": 5e3}},
    ),
    Case(
        "qwen3_vl", "qwen3_vl_text", None,
        {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        {"rope_parameters": MROPE | {"rope_theta": 5e3}},
    ),
    Case(
        "qwen3_5", "qwen3_5_text", None,
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16,
         "rope_parameters": MROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.25}},
        {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5}},
    ),
    Case(
        "qwen3_5_moe", "qwen3_5_moe_text", None,
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72,
         "num_experts": 6, "num_experts_per_tok": 2,
         "rope_parameters": MROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.25}},
        {"num_experts_per_tok": 1},
    ),
)  # fmt: skip


def decoder_of(checkpoint: Checkpoint, **changes: Any) -> Decoder:
    decoder = Decoder(describe(checkpoint.config | changes), torch.float32, "cpu")
    load(decoder, checkpoint.tensors_of(decoder.arch))
    return decoder


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model_type)
def test_logits_of_a_text(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    checkpoint, ids = Checkpoint.read(tmp_path), torch.randint(0, 211, (sum(CHUNKS),))
    ours = prompt_logits(decoder_of(checkpoint), ids.tolist(), CHUNKS)
    theirs, exact = (_logits(tmp_path, dtype, ids) for dtype in (torch.float32, torch.float64))
    allowed = 1.5 * rms(theirs - exact)
    assert rms(ours - exact) < allowed
    assert rms(prompt_logits(decoder_of(checkpoint, **case.broken), ids.tolist(), CHUNKS) - exact) > 2 * allowed


def _logits(directory: Path, dtype: torch.dtype, ids: Tensor) -> Tensor:
    model: Any = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    logits: Tensor = model.eval()(input_ids=ids[None]).logits[0]
    return logits.detach()


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gemma3")
    CASES[0].save(folder)
    return folder


def test_the_parts_that_are_not_loaded_are_said_with_their_bytes(gemma3: Path) -> None:
    facts = ModelFacts.of(Checkpoint.read(gemma3))
    stored = load_file(gemma3 / "model.safetensors")
    others = {name: tensor for name, tensor in stored.items() if not name.startswith("language_model.")}
    assert facts.wrapper == "Gemma3ForConditionalGeneration"
    assert sum(facts.left_out_bytes.values()) == sum(tensor.nbytes for tensor in others.values())
    assert facts.num_params == sum(tensor.numel() for name, tensor in stored.items() if name not in others)
    assert facts.scope.startswith(
        "the text part of Gemma3ForConditionalGeneration alone; not loaded: multi_modal_projector ("
    )
    assert ", vision_tower (" in facts.scope


@pytest.mark.parametrize(
    ("lost", "added", "message"),
    [
        ("language_model.model.norm.weight", "speech_tower.weight", "missing: model.norm.weight; 1 unexpected: speech"),
        ("vision_tower.post_layernorm.weight", "model.language_model.norm.weight", "two tensors are model.norm.weight"),
    ],
)
def test_tensors_that_contradict_the_config(gemma3: Path, lost: str, added: str, message: str, tmp_path: Path) -> None:
    tensors = load_file(gemma3 / "model.safetensors")
    tensors[added] = tensors.pop(lost)
    (tmp_path / "config.json").write_text((gemma3 / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        ModelFacts.of(Checkpoint.read(tmp_path))
