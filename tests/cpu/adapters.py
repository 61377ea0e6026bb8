"""Writes random LoRA adapters in PEFT's format, and merges them into checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_modules(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices of a checkpoint's layers, by module."""
    found = {
        name: tensor.shape for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    return {
        name.removesuffix(".weight"): tuple(shape)
        for name, shape in found.items()
        if len(shape) == 2 and ".layers." in name
    }


def write_adapter(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    rank: int = 4,
    names: tuple[str, ...] | None = None,
    strength: float = 1.0,
    **config: Any,
) -> dict[str, Tensor]:
    """Write an adapter for the modules whose last name is in `names`; None: all. Returns what it adds to each
    weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = dict[str, Tensor](), dict[str, Tensor]()
    stated = {"peft_type": "LORA", "base_model_name_or_path": "base", "bias": "none", "lora_alpha": 8, **config}
    for module, (out_size, in_size) in sorted(shapes.items()):
        if names is not None and module.rpartition(".")[2] not in names:
            continue
        own = next((r for name, r in stated.get("rank_pattern", {}).items() if module.endswith(name)), rank)
        alpha = next((a for name, a in stated.get("alpha_pattern", {}).items() if module.endswith(name)), 8)
        a = torch.randn(own, in_size, generator=generator) * in_size**-0.5
        b = torch.randn(out_size, own, generator=generator) * strength
        tensors[f"base_model.model.{module}.lora_A.weight"], tensors[f"base_model.model.{module}.lora_B.weight"] = a, b
        deltas[module] = alpha / (own**0.5 if stated.get("use_rslora") else own) * (b @ a)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": list(MODULES), **stated}))
    return deltas


def merge(checkpoint: Path, deltas: Mapping[str, Tensor], path: Path) -> Path:
    """A copy of a checkpoint in float32 with `deltas` added to its weights."""
    path.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        for module, delta in deltas.items():
            if f"{module}.weight" in tensors:
                tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + delta
        save_file(tensors, path / file.name, metadata={"format": "pt"})
    return path
