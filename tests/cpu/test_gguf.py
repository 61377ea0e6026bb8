"""GGUF files: blocks are dequantized as the reference does, and a converted checkpoint is the same model, in each
family.

`gguf_blocks.safetensors` holds random blocks of each type, and their values by the package `gguf` 0.19 (quants.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.description import Arch
from inferd.engine.arch.gguf.types import PLAIN, TYPES
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load
from inferd.engine.quant.checkpoints.gguf import dequantize
from tests.cpu.cases import GEMMA3_ROPES, LLAMA3_ROPE, LONG_ROPE, YARN_ROPE
from tests.cpu.checkpoints import Case, read_config
from tests.cpu.paging import prompt_logits
from tests.gguf_files import Pack, as_bf16, as_f16, as_f32, as_q4_0, as_q4_1, as_q8_0, convert, convert_in_parts

VECTORS = load_file(Path(__file__).parent / "gguf_blocks.safetensors")
BLOCKED = [kind for kind in TYPES.values() if kind.name not in PLAIN]


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_values_are_those_of_the_reference(kind: Any) -> None:
    blocks, expected = VECTORS[f"{kind.name}.blocks"], VECTORS[f"{kind.name}.values"]
    assert blocks.shape[1] == kind.block_bytes and expected.shape[1] == kind.block_size
    assert torch.equal(dequantize(blocks, kind.name), expected)
    wrong = blocks.clone()
    wrong[:, -3] ^= 1
    assert not torch.equal(dequantize(wrong, kind.name), expected)


CASES = (
    Case("llama, all heads, tied", "llama", {"tie_word_embeddings": True}),
    Case("llama, biases", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    Case("llama 3", "llama", {"rope_parameters": LLAMA3_ROPE}),
    Case("llama, linear rope", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    Case("llama, yarn", "llama", {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    Case("mistral, window", "mistral", {"head_dim": 16, "sliding_window": 20}),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", "qwen3", {"head_dim": 16}),
    Case(
        "gemma 2",
        "gemma2",
        {"hidden_size": 96, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "tie_word_embeddings": True},
    ),
    Case(
        "gemma 3",
        "gemma3_text",
        {"hidden_size": 96, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20, "num_hidden_layers": 7,
         "rope_parameters": {
             **GEMMA3_ROPES, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
         }},
        embedding_std=0.02,
    ),
    Case(
        "phi 3, long factors",
        "phi3",
        {"hidden_size": 128, "original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE},
    ),
    Case("phi 3, window", "phi3", {"hidden_size": 128, "sliding_window": 20}),
    Case("olmo 2", "olmo2", {}),
    Case("smollm3", "smollm3", {"num_hidden_layers": 5}),
    Case(
        "granite",
        "granite",
        {"embedding_multiplier": 3.5, "attention_multiplier": 0.25, "residual_multiplier": 0.75,
         "logits_scaling": 1.5},
    ),
    Case("starcoder2, window", "starcoder2", {"sliding_window": 20}),
)  # fmt: skip
"""Shapes that GGUF files can state. They leave out windows and ropes by layer that llama.cpp does not write."""

SAME_ROPE_OTHERWISE = ("llama 3", "phi 3, long factors")
"""Files that state the rope by a factor for each frequency, in 32 bits."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_converted_checkpoint_is_the_same_model(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path, torch.bfloat16)
    checkpoint = Checkpoint.read(convert(tmp_path, tmp_path / "model.gguf"))
    arch, original = ModelFacts.of(checkpoint).arch, describe(read_config(tmp_path))
    ids = torch.randint(0, 211, (40,)).tolist()
    ours, expected = (logits(path, ids) for path in (checkpoint.path, tmp_path))
    if case.name in SAME_ROPE_OTHERWISE:
        assert plain(arch, with_ropes=False) == plain(original, with_ropes=False)
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)
    else:
        assert plain(arch) == plain(original)
        assert torch.equal(ours, expected)
    wrong = logits(checkpoint.path, [ids[1], *ids[1:]])
    assert not torch.allclose(wrong, expected, rtol=1e-2, atol=1e-2)


def plain(arch: Arch, with_ropes: bool = True) -> Arch:
    """The description without what a conversion may change: the dtype, and another name of the same architecture."""
    return dataclasses.replace(arch, dtype="float32", ropes=arch.ropes if with_ropes else (None,) * arch.num_layers)


def decoder_of(path: Path) -> Decoder:
    checkpoint = Checkpoint.read(path)
    decoder = Decoder(describe(checkpoint.config), torch.float32, "cpu")
    load(decoder, checkpoint.tensors)
    return decoder


def logits(path: Path, ids: list[int]) -> Tensor:
    return prompt_logits(decoder_of(path), ids, (len(ids),))


@pytest.mark.parametrize("pack", [as_f32, as_f16, as_bf16, as_q8_0, as_q4_0, as_q4_1], ids=lambda pack: pack.__name__)
def test_a_quantized_file_is_the_model_of_its_dequantized_weights(pack: Pack, tmp_path: Path) -> None:
    """The oracle is the same file in F32, with the values that the blocks of the other one hold."""
    case = Case("llama", "llama", {"tie_word_embeddings": True, "intermediate_size": 128})
    case.save(tmp_path)
    file = convert(tmp_path, tmp_path / "quantized.gguf", lambda _: pack)
    info = Checkpoint.read(file).tensors["model.layers.0.mlp.down_proj.weight"]
    assert info.dtype == pack.__name__.removeprefix("as_").upper()

    def unpacked(values: Tensor) -> Any:
        shape, code, content = pack(values)
        kind = TYPES[code]
        blocks = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, kind.block_bytes)
        return as_f32(dequantize(blocks, kind.name).view(shape))

    whole = convert(tmp_path, tmp_path / "whole.gguf", lambda _: unpacked)
    ids = torch.randint(0, 211, (20,)).tolist()
    assert torch.equal(logits(file, ids), logits(whole, ids))


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    Case("llama", "llama", {"tie_word_embeddings": True}).save(tmp_path)
    whole = convert(tmp_path, tmp_path / "whole.gguf")
    parts = convert_in_parts(tmp_path, "model", 3)
    ids = torch.randint(0, 211, (20,)).tolist()
    assert torch.equal(logits(parts[0], ids), logits(whole, ids))
    with pytest.raises(ModelError, match=r"is one of 3 parts, .* give the first, model-00001-"):
        Checkpoint.read(parts[1])
    with pytest.raises(ModelError, match=r"is part 1 of 3, counted from 0; by its name it is part 0 of 1"):
        Checkpoint.read(parts[1].rename(tmp_path / "other.gguf"))
    with pytest.raises(ModelError, match=r"has 3 parts, of which 1 are missing: model-00002-of-00003.gguf"):
        Checkpoint.read(parts[0])
