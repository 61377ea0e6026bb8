"""Dequantizes files of each format without the daemon's readers: by the packages `compressed-tensors` and `gguf`, and
by the formulas of AutoAWQ, AutoGPTQ and ModelOpt.

The packages are needed only for this: `pip install --no-deps compressed-tensors loguru gguf`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality.gguf_files import architecture_of, name_of

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantized(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint in fp32, by the names of the model without quantization."""
    section = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config", {})
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    found = {}
    for module, tensors in modules.items():
        is_quantized = set(tensors) != {"weight"}
        found[f"{module}.weight"] = _weight(module, tensors, section) if is_quantized else tensors["weight"].float()
    return found


def _weight(module: str, tensors: Mapping[str, Tensor], section: Mapping[str, Any]) -> Tensor:
    match section["quant_method"]:
        case "compressed-tensors":
            return by_compressed_tensors(module, tensors, section)
        case "awq":
            return awq(tensors)
        case "gptq" | "auto-round":
            return gptq(tensors, 0 if section.get("checkpoint_format") == "gptq_v2" else 1)
        case "modelopt":
            return nvfp4(tensors)
        case "fp8":
            return fp8(tensors)
    raise AssertionError(section["quant_method"])


def by_compressed_tensors(module: str, tensors: Mapping[str, Tensor], section: Mapping[str, Any]) -> Tensor:
    compressors = import_module("compressed_tensors.compressors")
    is_match = import_module("compressed_tensors.utils.match").is_match
    config = import_module("compressed_tensors.quantization").QuantizationConfig.model_validate(dict(section))
    kind = torch.nn.Linear(1, 1)
    schemes = [one for one in config.config_groups.values() if is_match(module, kind, one.targets, config.ignore)]
    # A group that names a module wins over one of all linear modules.
    scheme = min(schemes, key=lambda one: "Linear" in one.targets)
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format or config.format)
    # The package rounds weights to the dtype of their scales. Wider scales leave the products exact.
    wide = {
        name: tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        for name, tensor in tensors.items()
    }
    weight: Tensor = compressor.decompress(wide, scheme)["weight"]
    return weight.float()


def awq(tensors: Mapping[str, Tensor]) -> Tensor:
    """(q - z) s, with 8 outputs in a word."""

    def outputs(words: Tensor) -> Tensor:
        return torch.stack([(words >> (4 * place)) & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)], 2).flatten(1)

    scales = tensors["scales"].float()
    size = len(tensors["qweight"]) // len(scales)
    zeros, wide = outputs(tensors["qzeros"]).repeat_interleave(size, 0), scales.repeat_interleave(size, 0)
    return ((outputs(tensors["qweight"]) - zeros) * wide).T.contiguous()


def gptq(tensors: Mapping[str, Tensor], added: int) -> Tensor:
    """(q - z) s by the group of each input. `added`: what version 1 of the format takes from a stored zero point."""
    groups, scales = tensors["g_idx"].long(), tensors["scales"].float()
    bits = 32 * len(tensors["qweight"]) // len(groups)
    shifts, mask = torch.arange(0, 32, bits), 2**bits - 1
    q = ((tensors["qweight"][:, None, :] >> shifts[:, None]) & mask).flatten(0, 1)
    zeros = ((tensors["qzeros"][:, :, None] >> shifts) & mask).flatten(1) + added
    weight: Tensor = (q - zeros[groups]) * scales[groups]
    return weight.T.contiguous()


def nvfp4(tensors: Mapping[str, Tensor]) -> Tensor:
    """ModelOpt: E2M1 times an e4m3 scale for 16 inputs, times one number for the matrix."""
    pairs = torch.stack([tensors["weight"] & 15, tensors["weight"] >> 4], 2).flatten(1).long()
    numbers = torch.tensor(_E2M1)[pairs & 7] * torch.where(pairs > 7, -1.0, 1.0)
    scales = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    return numbers * scales.repeat_interleave(16, 1)


def fp8(tensors: Mapping[str, Tensor]) -> Tensor:
    """AutoFP8: numbers times one scale; DeepSeek-V3: one for each block of 128 x 128."""
    numbers = tensors["weight"].float()
    if "weight_scale" in tensors:
        return numbers * tensors["weight_scale"].float()
    rows, columns = (torch.arange(size) // 128 for size in numbers.shape)
    return numbers * tensors["weight_scale_inv"].float()[rows][:, columns]


def gguf_values(path: Path, config: Mapping[str, Any], names: list[str]) -> dict[str, Tensor]:
    """The tensors `names` of a GGUF file in fp32, by the package `gguf`. Rows of q and k get their own order again."""
    dequantize = import_module("gguf.quants").dequantize
    stored = {tensor.name: tensor for tensor in import_module("gguf").GGUFReader(path).tensors}
    found = {}
    for name in names:
        tensor = stored[name_of(name, architecture_of(config))]
        shape = [int(size) for size in reversed(tensor.shape)]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float().reshape(shape)
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        count = heads.get(name.split(".")[-2])
        if count is not None:
            values = values.reshape(count, len(values) // count // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        found[name] = values
    return found
