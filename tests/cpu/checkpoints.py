"""Tiny random checkpoints of every family, written by transformers: the other side of every parity test.

Adding a family adds one row to `CASES`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import StoredTensor, load

SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """One shape of one family. `broken` are config fields whose change must show in the logits."""

    name: str
    model_type: str
    config: dict[str, Any]
    broken: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "5GB"

    def save(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a checkpoint with random weights, norms and biases included, for which every option matters."""
        config = AutoConfig.for_model(self.model_type, **{**SMALL, **self.config})
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
                else:
                    parameter.normal_(0.0, 0.5 if "lm_head" in name else 0.15)
        model.generation_config.eos_token_id = None
        model.to(dtype).save_pretrained(directory, max_shard_size=self.max_shard_size)


CASES = (
    Case(
        "llama3, grouped heads, shards",
        "llama",
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        max_shard_size="100KB",
    ),
    Case(
        "llama, one kv head, biases",
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 0.1},
    ),
    Case(
        "llama 2, all heads, tied",
        "llama",
        {"num_key_value_heads": 8, "tie_word_embeddings": True},
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
    Case(
        "llama, head size of its own, linear rope",
        "llama",
        {"head_dim": 24, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    Case(
        "qwen3, tied",
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    Case(
        "qwen3, biases, late windows",
        "qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
        {"sliding_window": 21},
    ),
)


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def load_transformers(directory: Path, dtype: torch.dtype) -> Any:
    """The checkpoint in transformers' own model. Loaded, not cast: a cast would round its rotary frequencies too."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


def load_decoder(directory: Path, dtype: torch.dtype, changes: dict[str, Any] | None = None) -> Decoder:
    """The checkpoint in our decoder, with fields of its config changed where `changes` says so."""
    decoder = Decoder(describe(read_config(directory) | (changes or {})), dtype, "cpu")
    load(decoder, stored_in(directory))
    return decoder


def stored_in(directory: Path) -> dict[str, StoredTensor]:
    """Where each tensor lies, as the worker tells the loader."""
    tensors = Checkpoint.read(directory).tensors.values()
    return {info.name: StoredTensor(info.file, info.dtype, info.shape) for info in tensors}


def random_decoder(case: Case, dtype: torch.dtype) -> Decoder:
    """A decoder of the case's shape with random weights, and no checkpoint in between."""
    config = AutoConfig.for_model(case.model_type, **{**SMALL, **case.config}).to_dict()
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[case.model_type]
    decoder = Decoder(describe(config | {"architectures": [name]}), dtype, "cpu")
    generator = torch.Generator().manual_seed(2)
    for parameter_name, parameter in decoder.parameters().items():
        parameter.write(0, _random_weight(parameter_name, parameter.shape, generator))
    return decoder


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise * 0.2 + (1.0 if "norm" in name else 0.0)
    return noise * (0.5 if "lm_head" in name else 0.15 if "embed" in name else shape[1] ** -0.5)
