"""The weights of a real model as quantizers get them: not on the grid of the file that they came from.

The weights of `smollm2` come from a file of 4 bits in groups of 32. A format with such groups would find every weight
again. So the numbers of the model are put into a random order: those of the residual stream, of each MLP and of each
head. The products stay the same, and a group holds weights of several groups of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.quant.checkpoints import gguf

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
_READ = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Matrices whose inputs are the residual stream."""
_WRITE = ("self_attn.o_proj", "mlp.down_proj")
"""Matrices whose outputs are added to the residual stream."""
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Weights:
    """A Llama with tied embeddings: its config.json, and its tensors in fp32."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Weights:
        """From a GGUF file. The embedding is rounded to bfloat16, because files of most formats keep it so."""
        checkpoint = Checkpoint.read(path)
        found: dict[str, Tensor] = {}
        for name, info in checkpoint.tensors.items():
            assert info.gguf is not None
            found[name] = torch.cat([values for _, values in gguf.parts(info.gguf)])
        found[EMBEDDING] = found[EMBEDDING].to(torch.bfloat16).float()
        config = {name: value for name, value in checkpoint.config.items() if name != "rope_theta"}
        rope = {"rope_type": "default", "rope_theta": float(checkpoint.config["rope_theta"])}
        return cls({**config, "rope_parameters": rope, "dtype": "bfloat16"}, found)

    def save(self, directory: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
        """Write config.json and the tensors, or other tensors in their place."""
        directory.mkdir(parents=True, exist_ok=True)
        own = self.tensors if tensors is None else tensors
        save_file({name: tensor.contiguous() for name, tensor in own.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({**self.config, **config}), encoding="utf-8")
        return directory

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Matrices of the layers, by their modules' names."""
        ends = tuple(f"{module}.weight" for module in (*_READ, *_WRITE))
        return {name.removesuffix(".weight"): weight for name, weight in self.tensors.items() if name.endswith(ends)}


def shuffled(weights: Weights) -> Weights:
    """The same model with its numbers in a random order. Rotary positions leave q and k their order inside a head."""
    config, g = weights.config, torch.Generator().manual_seed(0)
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    stream = torch.randperm(config["hidden_size"], generator=g)
    found = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    found[EMBEDDING], found[NORM] = found[EMBEDDING][:, stream], found[NORM][stream]
    for layer in range(config["num_hidden_layers"]):
        names = {part: f"model.layers.{layer}.{part}.weight" for part in (*_READ, *_WRITE, *_NORMS)}
        inner = torch.randperm(config["intermediate_size"], generator=g)
        values = torch.stack([torch.randperm(head_dim, generator=g) for _ in range(kv_heads)])
        rows = values + torch.arange(kv_heads)[:, None] * head_dim
        sharing = values.repeat_interleave(config["num_attention_heads"] // kv_heads, 0)
        columns = sharing + torch.arange(config["num_attention_heads"])[:, None] * head_dim
        for part in _READ:
            found[names[part]] = found[names[part]][:, stream]
        for part in _NORMS:
            found[names[part]] = found[names[part]][stream]
        for part, order in (("mlp.gate_proj", inner), ("mlp.up_proj", inner), ("self_attn.v_proj", rows.flatten())):
            found[names[part]] = found[names[part]][order]
        for part, order in (("mlp.down_proj", inner), ("self_attn.o_proj", columns.flatten())):
            found[names[part]] = found[names[part]][stream][:, order]
    return replace(weights, tensors=found)


def widened(weights: Weights, multiple: int = 256) -> Weights:
    """The same model with more inputs and heads, all zero, so that every matrix has a multiple of `multiple` inputs.

    Blocks of the K types have 256 values. The sum of squares in a norm stays the same, so its mean shrinks.
    """
    config = weights.config
    old, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    hidden = -(-old // multiple) * multiple
    own_heads, head_dim = heads // kv_heads, config["head_dim"]
    more_kv = next(
        count for count in range(kv_heads, multiple + kv_heads) if count * own_heads * head_dim % multiple == 0
    )
    assert config["intermediate_size"] % multiple == 0
    sizes = {
        "self_attn.q_proj": (more_kv * own_heads * head_dim, hidden),
        "self_attn.k_proj": (more_kv * head_dim, hidden),
        "self_attn.v_proj": (more_kv * head_dim, hidden),
        "self_attn.o_proj": (hidden, more_kv * own_heads * head_dim),
        "mlp.gate_proj": (config["intermediate_size"], hidden),
        "mlp.up_proj": (config["intermediate_size"], hidden),
        "mlp.down_proj": (hidden, config["intermediate_size"]),
        "embed_tokens": (config["vocab_size"], hidden),
    }
    found = {}
    for name, tensor in weights.tensors.items():
        if tensor.dim() == 1:
            wide = torch.zeros(hidden)
            wide[:old] = tensor * (old / hidden) ** 0.5
        else:
            wide = torch.zeros(next(size for part, size in sizes.items() if f".{part}." in name))
            wide[: tensor.shape[0], : tensor.shape[1]] = tensor
        found[name] = wide
    changed = {
        "hidden_size": hidden, "num_attention_heads": more_kv * own_heads, "num_key_value_heads": more_kv,
        "rms_norm_eps": config["rms_norm_eps"] * old / hidden,
    }  # fmt: skip
    return Weights({**config, **changed}, found)
