"""Writes tiny random checkpoints of any family with transformers, which parity tests compare with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.description import NormKind
from inferd.engine.arch.registry import describe
from inferd.engine.layers.collectives import ALONE, Ranks
from inferd.engine.layers.placement import NO_LORAS, Lora
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe

SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """One shape of one family. `broken` holds config fields; changing one must change the logits."""

    name: str
    model_type: str
    config: dict[str, Any]
    broken: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "5GB"
    embedding_std: float = 0.15
    """Standard deviation of the embedding: small for large tied embeddings, which make a model repeat its last
    token."""
    max_positions: int | None = None
    """Number of positions served; None: all of the config's."""

    def save(self, directory: Path, dtype: torch.dtype = torch.float32, auto: Any = AutoModelForCausalLM) -> None:
        """Write a checkpoint with random weights, norms and biases included, for which every option matters. `auto`:
        transformers' class that makes the model."""
        config = self._transformers_config()
        torch.manual_seed(1)
        model: Any = auto.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.normal_(self._mean(name), 0.2)
                else:
                    # If rounding makes a router choose another expert, that one shall have a small weight.
                    is_sharp = "lm_head" in name or name.endswith(
                        (".gate.weight", ".router.weight", "router.proj.weight")
                    )
                    std = 0.5 if is_sharp else self.embedding_std if "embed" in name else 0.15
                    parameter.normal_(0.0, std)
            for name, buffer in model.named_buffers():
                if name.endswith(("e_score_correction_bias", "expert_bias")):
                    buffer.normal_()  # sums with scores are seldom near one another
                if name.endswith("layer_scalar"):
                    buffer.normal_(1.0, 0.2)
        if model.can_generate():
            model.generation_config.eos_token_id = None
        model.to(dtype).save_pretrained(directory, max_shard_size=self.max_shard_size)

    def _mean(self, name: str) -> float:
        """Mean of a random vector: factors are near 1, but that of a router's norm makes its logits differ."""
        if name.endswith("router.scale"):
            return 8.0
        is_norm = "norm" in name and name.endswith(".weight") and not self.model_type.startswith(("gemma2", "gemma3"))
        return 1.0 if is_norm or name.endswith("per_expert_scale") else 0.0

    def config_json(self) -> dict[str, Any]:
        """The config.json that `save` writes."""
        config = self._transformers_config()
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        architecture = classes[type(config)].__name__
        return {**config.to_dict(), "architectures": [architecture]}

    def _transformers_config(self) -> Any:
        return AutoConfig.for_model(self.model_type, **{**SMALL, **self.config})


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def load_transformers(directory: Path, dtype: torch.dtype, auto: Any = AutoModelForCausalLM) -> Any:
    """The checkpoint in transformers' own model, made by `auto`. It is loaded and not cast, because a cast would round
    its rotary frequencies."""
    model: Any = auto.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def load_decoder(
    directory: Path,
    dtype: torch.dtype,
    changes: dict[str, Any] | None = None,
    max_positions: int | None = None,
    recipe: Recipe = UNQUANTIZED,
    ranks: Ranks = ALONE,
) -> Decoder:
    """The checkpoint in our decoder, with the fields of its config in `changes` replaced."""
    arch = describe(read_config(directory) | (changes or {}))
    decoder = Decoder(arch, dtype, "cpu", max_positions, recipe=recipe, ranks=ranks)
    load(decoder, Checkpoint.read(directory).tensors_of(arch))
    return decoder


def random_decoder(
    case: Case,
    dtype: torch.dtype,
    recipe: Recipe = UNQUANTIZED,
    ranks: Ranks = ALONE,
    loras: Mapping[str, Lora] = NO_LORAS,
    change: Callable[[str, Tensor], Tensor] = lambda _, weight: weight,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder of the case's shape with random weights, made without a checkpoint. `change` gets each parameter's name
    and values, and returns those to load."""
    decoder = Decoder(describe(case.config_json()), dtype, device, recipe=recipe, ranks=ranks, loras=loras)
    generator = torch.Generator().manual_seed(2)
    for parameter_name, parameter in decoder.parameters.items():
        is_factor = (
            parameter_name.endswith(("norm.weight", "scalar.weight")) and decoder.arch.norm is not NormKind.RMS_ONE_PLUS
        )
        weight = change(parameter_name, _random_weight(parameter_name, parameter.shape, generator))
        parameter.write(0, parameter.cut(weight + 1.0 if is_factor else weight))
    return decoder


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise * 0.2
    return noise * (0.5 if "lm_head" in name else 0.15 if "embed" in name else shape[1] ** -0.5)
