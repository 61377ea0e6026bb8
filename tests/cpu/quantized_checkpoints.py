"""Writes tiny random Llamas as quantized checkpoints, by the definition of each format, and the same weights in fp32.

The numbers are random integers and scales, so nothing is rounded: the weights are exactly what the files hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator

from benchmarks.quality.checkpoint_formats import Format
from benchmarks.quality.packing import RandomNumbers, Tensors
from inferd.engine.arch.registry import describe, weights

DOCS = Path(__file__).resolve().parents[2] / "docs" / "quantization.md"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 216,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def config_json(form: Format) -> dict[str, Any]:
    return CONFIG | {"quantization_config": form.quantization}


@dataclass(frozen=True)
class Saved:
    """Results of `save`."""

    plain: Tensors
    """The model's own tensors in fp32, with matrices dequantized."""
    tensors: Tensors
    """The tensors as stored."""


def save(form: Format, directory: Path, **sizes: Any) -> Saved:
    """Write config.json and model.safetensors. `sizes` and other fields replace those of `CONFIG`."""
    directory.mkdir(parents=True, exist_ok=True)
    g = Generator().manual_seed(3)
    plain: Tensors = {}
    stored: Tensors = {}
    for source in weights(describe(CONFIG | sizes)).sources:
        module, is_norm = source.tensor.removesuffix(".weight"), len(source.shape) == 1
        is_router = module.endswith("mlp.gate")
        write = None if is_norm or is_router or "embed" in module else form.writer(module)
        if write is not None:
            tensors, plain[source.tensor] = write(RandomNumbers(g), *source.shape)
            stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
            continue
        weight = torch.randn(source.shape, generator=g) * (0.2 if is_norm else source.shape[-1] ** -0.5)
        stored[source.tensor] = (weight + 1 if is_norm else weight).to(torch.bfloat16)
        plain[source.tensor] = stored[source.tensor].float()
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config_json(form) | sizes))
    return Saved(plain, stored)


def table_of_the_docs(first_column: str) -> dict[str, dict[str, str]]:
    """The rows of the table in docs/quantization.md that begins with this column: cells by their columns."""
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start:]]
    table = rows[: next(index for index, row in enumerate(rows) if not row)]
    return {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}
