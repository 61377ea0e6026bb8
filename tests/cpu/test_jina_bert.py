"""Jina BERT v2, which transformers does not have: hidden states and logits are those of its published formulas in fp64,
from a folder, and from GGUF files of both layouts that llama.cpp's converter has had.

The formulas are those of `modeling_bert.py` in jinaai/jina-bert-implementation.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from benchmarks.quality.gguf_blocks import as_f32
from benchmarks.quality.gguf_files import write
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.loader import load

HEADS, EPS, LARGEST = 6, 1e-6, 2e-5
CONFIG: dict[str, Any] = {
    "architectures": ["JinaBertForSequenceClassification"], "position_embedding_type": "alibi", "layer_norm_eps": EPS,
    "feed_forward_type": "geglu", "hidden_act": "gelu", "hidden_size": 96, "intermediate_size": 128, "num_labels": 3,
    "max_position_embeddings": 150, "num_attention_heads": HEADS, "num_hidden_layers": 2, "vocab_size": 101,
}  # fmt: skip
LENGTHS = (7, 1, 120, 33)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def tensors() -> dict[str, Tensor]:
    """Random weights by their names in the published checkpoints."""
    linear = {"classifier": (3, 96), "pooler.dense": (96, 96)}
    plain = {"embeddings.word_embeddings": (101, 96), "embeddings.token_type_embeddings": (2, 96)}
    norms = ["embeddings.LayerNorm"]
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        linear |= {f"{layer}.attention.self.{name}": (96, 96) for name in ("query", "key", "value")}
        linear |= {f"{layer}.attention.output.dense": (96, 96), f"{layer}.mlp.wo": (96, 128)}
        plain |= {f"{layer}.mlp.gated_layers": (256, 96)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.mlp.layernorm"]
    torch.manual_seed(3)
    found = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in {**linear, **plain}.items()}
    found |= {f"{name}.bias": torch.randn(shape[0]) * 0.2 for name, shape in linear.items()}
    found |= {f"{name}.weight": 1 + torch.randn(96) * 0.2 for name in norms}
    return found | {f"{name}.bias": torch.randn(96) * 0.2 for name in norms}


def slopes_of(num_heads: int) -> list[float]:
    """As published."""

    def of_a_power(size: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(size) - 3)))
        return [start * start**index for index in range(size)]

    if math.log2(num_heads).is_integer():
        return of_a_power(num_heads)
    closest = 2 ** math.floor(math.log2(num_heads))
    return of_a_power(closest) + slopes_of(2 * closest)[0::2][: num_heads - closest]


def published(ids: Tensor, types: Tensor, slopes: list[float]) -> tuple[Tensor, Tensor]:
    """(hidden states, logits) of one text in fp64."""
    w = {name: tensor.double() for name, tensor in tensors().items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))

    def norm(name: str, x: Tensor) -> Tensor:
        return layer_norm(x, (96,), w[f"{name}.weight"], w[f"{name}.bias"], EPS)

    rows = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][types]
    x = norm("embeddings.LayerNorm", rows)
    positions = torch.arange(len(ids))
    alibi = -(positions[:, None] - positions).abs() * torch.tensor(slopes, dtype=torch.float64)[:, None, None]
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        q, k, v = (
            linear(f"{layer}.attention.self.{name}", x).view(-1, HEADS, 16).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        weights = (q @ k.mT / 4 + alibi).softmax(-1)
        attended = linear(f"{layer}.attention.output.dense", (weights @ v).transpose(0, 1).flatten(1))
        x = norm(f"{layer}.attention.output.LayerNorm", attended + x)
        gated, plain = linear(f"{layer}.mlp.gated_layers", x).chunk(2, dim=-1)
        x = norm(f"{layer}.mlp.layernorm", linear(f"{layer}.mlp.wo", gelu(gated) * plain) + x)
    return x, linear("classifier", torch.tanh(linear("pooler.dense", x[0])))


def write_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), folder / "model.safetensors")
    return folder


GGUF_NAMES = {
    "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm", "attention.self.query": "attn_q", "attention.self.key": "attn_k",
    "attention.self.value": "attn_v", "attention.output.dense": "attn_output", "mlp.gated_layers": "ffn_up",
    "attention.output.LayerNorm": "attn_output_norm", "mlp.wo": "ffn_down", "mlp.layernorm": "layer_output_norm",
}  # fmt: skip


def write_gguf(folder: Path, *, splits_gate: bool) -> Path:
    """Without the classifier, which the converter leaves out in part."""
    stored = {}
    for name, tensor in tensors().items():
        module, _, kind = name.rpartition(".")
        if module in ("classifier", "pooler.dense"):
            continue
        layer = module.removeprefix("encoder.layer.")[0] if module.startswith("encoder.layer.") else ""
        own = f"blk.{layer}." if layer else ""
        theirs = GGUF_NAMES[module.removeprefix(f"encoder.layer.{layer}.") if layer else module]
        if theirs == "ffn_up" and splits_gate:
            halves = zip(("ffn_gate", "ffn_up"), tensor.chunk(2), strict=True)
            stored |= {f"{own}{part}.{kind}": as_f32(half.contiguous()) for part, half in halves}
        else:
            stored[f"{own}{theirs}.{kind}"] = as_f32(tensor)
    sizes = {"block_count": 2, "context_length": 150, "embedding_length": 96, "feed_forward_length": 128,
             "attention.head_count": HEADS, "attention.layer_norm_epsilon": EPS, "attention.causal": False,
             "pooling_type": 1}  # fmt: skip
    metadata = {"general.architecture": "jina-bert-v2", **{f"jina-bert-v2.{key}": own for key, own in sizes.items()}}
    return write(folder / "model.gguf", metadata, stored)


def encoder_of(path: Path) -> Encoder:
    checkpoint = Checkpoint.read(path)
    facts = EncoderFacts.of(checkpoint)
    encoder = Encoder(facts.arch, torch.float32, "cpu")
    load(encoder, checkpoint.tensors_of(facts.arch))
    return encoder


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randint(0, 101, (sum(LENGTHS),)), torch.randint(0, 2, (sum(LENGTHS),))


def expected(slopes: list[float]) -> tuple[Tensor, Tensor]:
    parts = [published(*own, slopes) for own in zip(*(one.split(LENGTHS) for one in inputs()), strict=True)]  # type: ignore[no-untyped-call]
    return torch.cat([hidden for hidden, _ in parts]), torch.stack([logits for _, logits in parts])


def test_states_and_logits_are_those_of_the_published_formulas(tmp_path: Path) -> None:
    encoder, (ids, types) = encoder_of(write_folder(tmp_path)), inputs()
    hidden, logits = expected(slopes_of(HEADS))
    ours = encoder.forward(ids, STARTS, types)
    assert float((ours - hidden).abs().max()) < LARGEST
    assert float((encoder.logits(ours, STARTS) - logits).abs().max()) < LARGEST
    for slopes in ([0.0] * HEADS, slopes_of(HEADS)[::-1]):
        assert float((ours - expected(slopes)[0]).abs().max()) > 100 * LARGEST
    for start, length in zip(STARTS.tolist(), LENGTHS, strict=False):
        own, alone = slice(start, start + length), torch.tensor([0, length], dtype=torch.int32)
        assert torch.equal(encoder.forward(ids[own], alone, types[own]), ours[own])


@pytest.mark.parametrize("splits_gate", [False, True])
def test_gguf_files_may_have_gate_and_up_in_one_tensor_or_two(splits_gate: bool, tmp_path: Path) -> None:
    ids, types = inputs()
    ours = encoder_of(write_gguf(tmp_path, splits_gate=splits_gate)).forward(ids, STARTS, types)
    assert torch.equal(ours, encoder_of(write_folder(tmp_path)).forward(ids, STARTS, types))
