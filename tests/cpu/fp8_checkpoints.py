"""Writes tiny random Llamas as FP8 checkpoints in every supported convention, and the same numbers in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quality.packing import in_e4m3, of_blocks, of_rows, of_tensor
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import describe, weights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 192, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 211,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
"""Sizes with 192 and 256 inputs: the last block is a half one or a whole one."""

Scale = Callable[[Tensor], Tensor]
"""weight [out, in] -> its scales in the stored shape."""


def compressed(weights: dict[str, Any], inputs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    part = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"], "weights": part | weights, "input_activations": part | inputs,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    } | changes  # fmt: skip


TOKEN = {"strategy": "token", "dynamic": True}
MODULES = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))


@dataclass(frozen=True)
class Format:
    """One convention: its quantization_config and its tensors."""

    name: str
    quantization: dict[str, Any]
    scale: Scale
    weight_scale: str = "weight_scale"
    input_scale: str | None = None
    has_head: bool = False
    scale_dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    """Modules of the layers that are not quantized."""

    def config_json(self) -> dict[str, Any]:
        return CONFIG | self.config | {"quantization_config": self.quantization}


FORMATS = (
    Format(
        "blocks",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]},
        of_blocks,
        "weight_scale_inv",
        scale_dtype=torch.bfloat16,
    ),
    Format(
        "static",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        of_tensor,
        input_scale="input_scale",
    ),
    Format("dynamic, tied", {"quant_method": "fp8", "activation_scheme": "dynamic"}, of_tensor,
           config={"tie_word_embeddings": True}),
    Format("compressed rows", compressed({"strategy": "channel"}, TOKEN, ignore=["re:.*lm_head"]), of_rows,
           scale_dtype=torch.bfloat16),
    Format("compressed rows, head too", compressed({"strategy": "channel"}, TOKEN, ignore=[]), of_rows, has_head=True),
    Format("compressed tensors, static",
           compressed({"strategy": "tensor"}, {"strategy": "tensor"}, format="naive-quantized"),
           of_tensor, input_scale="input_scale"),
    Format(
        "compressed blocks",
        compressed({"strategy": "block", "block_structure": [128, 128]},
                   {"strategy": "group", "group_size": 128, "dynamic": True}),
        of_blocks,
    ),
    Format("compressed rows but the first layer",
           compressed({"strategy": "channel"}, TOKEN, ignore=["lm_head", "re:.*layers\\.0\\..*"]), of_rows,
           plain=tuple(f"model.layers.0.{name}" for name in MODULES)),
    Format("compressed rows but k and up", compressed({"strategy": "channel"}, TOKEN,
           ignore=["lm_head", "re:.*0.*k_proj", "model.layers.1.mlp.up_proj"]), of_rows,
           plain=("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj")),
    Format(
        "some blocks",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate", "o_proj"]},
        of_blocks,
        "weight_scale_inv",
        plain=("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
    ),
    Format("static but the last MLP",
           {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "model.layers.1.mlp"]},
           of_tensor, input_scale="input_scale",
           plain=tuple(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))),
)  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """Results of `save`."""

    plain: dict[str, Tensor]
    """The model's own tensors in fp32, with matrices multiplied by their scales."""
    tensors: dict[str, Tensor]
    """The tensors as stored."""


def save(form: Format, directory: Path) -> Saved:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    plain: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for source in weights(plain_arch(form)).sources:
        is_norm = len(source.shape) == 1
        weight = torch.randn(source.shape, generator=generator) * (0.2 if is_norm else source.shape[-1] ** -0.5)
        weight = weight + 1 if is_norm else weight
        name = source.tensor
        module = name.removesuffix(".weight")
        if module in form.plain or is_norm or "embed" in name or (name == "lm_head.weight" and not form.has_head):
            plain[name] = stored[name] = weight.to(torch.bfloat16)
            continue
        # Rows and blocks differ in size, so that a scale in the wrong place shows.
        weight *= torch.rand((source.shape[0], 1), generator=generator) * 4 + 0.3
        scales = form.scale(weight).to(form.scale_dtype)
        q, plain[name] = in_e4m3(weight, scales)
        stored[name], stored[f"{module}.{form.weight_scale}"] = q, scales
        if form.input_scale is not None:
            at = 0.01 + 0.002 * torch.rand((), generator=generator)
            stored[f"{module}.{form.input_scale}"] = at
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(form.config_json()))
    return Saved(plain, stored)


def plain_arch(form: Format) -> Arch:
    """The model without its quantization."""
    return describe(CONFIG | form.config)
