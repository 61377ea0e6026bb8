"""A head that a GGUF file stores beside the embedding, and whether it is the embedding once more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.quality import gguf_blocks, gguf_files
from benchmarks.quality.gguf_blocks import Stored
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.model import ModelFacts

SIZES = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
FORMATS = {
    "f32": gguf_blocks.as_f32, "f16": gguf_blocks.as_f16, "q8_0": gguf_blocks.as_q8_0, "q5_0": gguf_blocks.as_q5_0,
    "q4_0": gguf_blocks.as_q4_0, "q2_k": gguf_blocks.as_q2_k, "q3_k": gguf_blocks.as_q3_k,
    "q4_k": gguf_blocks.as_q4_k, "q6_k": gguf_blocks.as_q6_k,
}  # fmt: skip


def file_of(folder: Path, embedding: Callable[[Tensor], Stored], head: Callable[[Tensor], Stored], like: float) -> Path:
    """A GGUF file of which the head is `like` times the embedding, plus as much noise as is left."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, **heads, tie_word_embeddings=False))
    shared = model.model.embed_tokens.weight.data
    model.lm_head.weight.data = like * shared + (1 - like) * model.lm_head.weight.data
    model.save_pretrained(folder)
    packs = {"token_embd.weight": embedding, "output.weight": head}
    return gguf_files.convert(folder, folder / "model.gguf", lambda name: packs.get(name, gguf_blocks.as_f32))


@pytest.mark.parametrize("name", FORMATS)
def test_a_head_that_is_stored_twice_counts_once(tmp_path: Path, name: str) -> None:
    twice, own = (tmp_path / kind for kind in ("twice", "own"))
    counts = []
    for folder, like in ((twice, 1.0), (own, 0.0)):
        file = file_of(folder, FORMATS[name], gguf_blocks.as_q8_0, like)
        counts.append(ModelFacts.of(Checkpoint.read(file, keeps_blocks=True)).num_params)
    assert counts[1] - counts[0] == SIZES["vocab_size"] * SIZES["hidden_size"]
