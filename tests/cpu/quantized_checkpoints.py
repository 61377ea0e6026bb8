"""Writes tiny random Llamas as quantized checkpoints, by the definition of each format, and the same weights in fp32.

The numbers are random integers and scales, so nothing is rounded: the weights are exactly what the files hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor

from inferd.engine.arch.registry import describe, weights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 216,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip

Tensors = dict[str, Tensor]
Module = tuple[Tensors, Tensor]
"""(the stored tensors of a module by their suffixes, its weight in fp32)."""
Write = Callable[[Generator, int, int], Module]
"""Makes a module [out, in]."""

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(values: Tensor, bits: int) -> Tensor:
    """[R, C] as [R, C * bits / 32] int32, the first value in the lowest bits."""
    per = 32 // bits
    shifted = values.long().unflatten(1, (-1, per)) << (torch.arange(per) * bits)
    return shifted.sum(2).to(torch.int32)


def random_integers(
    g: Generator, out_size: int, in_size: int, bits: int, size: int, dtype: torch.dtype, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(q unsigned [out, in], zero points, scales), the latter [out, groups]. Rows and groups differ in size."""
    groups, middle = (out_size, in_size // size), 2 ** (bits - 1)
    q = (torch.randn((out_size, in_size), generator=g) * middle / 3 + middle).round().clamp(0, 2 * middle - 1)
    zeros = torch.full(groups, middle)
    if not is_symmetric:
        zeros = zeros + torch.randint(-middle // 4, middle // 4 + 1, groups, generator=g)
    scales = (torch.rand(groups, generator=g) + 0.3) * (torch.rand((out_size, 1), generator=g) + 0.3)
    return q.long(), zeros.long(), (scales * 3 * in_size**-0.5 / middle).to(dtype)


def weight_of(q: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Tensor:
    size = q.shape[1] // scales.shape[1]
    groups = torch.arange(q.shape[1]) // size if g_idx is None else g_idx.long()
    return (q - zeros[:, groups]).float() * scales.float()[:, groups]


def packed(bits: int, size: int | None, is_symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Write:
    def write(g: Generator, out_size: int, in_size: int) -> Module:
        q, zeros, scales = random_integers(g, out_size, in_size, bits, size or in_size, dtype, is_symmetric)
        tensors = {
            "weight_packed": words(q, bits), "weight_scale": scales, "weight_shape": torch.tensor([out_size, in_size]),
        }  # fmt: skip
        if not is_symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        return tensors, weight_of(q, zeros, scales)

    return write


def in_bytes(g: Generator, out_size: int, in_size: int) -> Module:
    q, zeros, scales = random_integers(g, out_size, in_size, 8, in_size, torch.bfloat16, True)
    return {"weight": (q - 128).to(torch.int8), "weight_scale": scales}, weight_of(q, zeros, scales)


def gptq(bits: int, size: int, is_symmetric: bool, version: int = 1, order: int | None = None) -> Write:
    """`order`: seed of the order of inputs, 0 for one of its own for each module; None: their own order."""

    def write(g: Generator, out_size: int, in_size: int) -> Module:
        q, zeros, scales = random_integers(g, out_size, in_size, bits, size, torch.float16, is_symmetric)
        g_idx = torch.arange(in_size) // size
        if order is not None:
            own = g if order == 0 else Generator().manual_seed(order)
            g_idx = g_idx[torch.randperm(in_size, generator=own)]
        tensors = {
            "qweight": words(q, bits).T,
            "qzeros": words(zeros.T - (2 - version), bits),
            "scales": scales.T,
            "g_idx": g_idx.to(torch.int32),
            "bias": torch.zeros(out_size, dtype=torch.float16),
        }  # fmt: skip
        return tensors, weight_of(q, zeros, scales, g_idx)

    return write


def awq(size: int) -> Write:
    def write(g: Generator, out_size: int, in_size: int) -> Module:
        q, zeros, scales = random_integers(g, out_size, in_size, 4, size, torch.float16, False)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the output in each place of a word

        def in_order(values: Tensor) -> Tensor:
            return words(values.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

        tensors = {"qweight": in_order(q.T), "qzeros": in_order(zeros.T), "scales": scales.T}
        return tensors, weight_of(q, zeros, scales)

    return write


def nvfp4(is_modelopt: bool) -> Write:
    def write(g: Generator, out_size: int, in_size: int) -> Module:
        q = torch.randint(0, 16, (out_size, in_size), generator=g)
        scales = (torch.rand((out_size, in_size // 16), generator=g) * 100 + 20).to(torch.float8_e4m3fn)
        whole = torch.tensor(100 * 3 * in_size**0.5)
        pairs = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
        weight = E2M1[q] * (scales.float() / whole).repeat_interleave(16, 1)
        if not is_modelopt:
            names = {"weight_packed": pairs, "weight_global_scale": whole.reshape(1)}
            return {**names, "weight_scale": scales, "input_global_scale": torch.ones(1)}, weight
        weight = E2M1[q] * (scales.float() * (1 / whole)).repeat_interleave(16, 1)
        return {"weight": pairs, "weight_scale": scales, "weight_scale_2": 1 / whole, "input_scale": whole}, weight

    return write


def mxfp4(g: Generator, out_size: int, in_size: int) -> Module:
    q = torch.randint(0, 16, (out_size, in_size), generator=g)
    exponents = torch.randint(120, 124, (out_size, in_size // 32), generator=g)
    pairs = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    weight = E2M1[q] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight_packed": pairs, "weight_scale": exponents.to(torch.uint8)}, weight


def compressed(*groups: dict[str, Any], kind: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    numbered = {
        f"group_{number}": {"targets": ["Linear"], "input_activations": None, "output_activations": None} | group
        for number, group in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": numbered, "ignore": ["lm_head"],
        "quantization_status": "compressed",
    } | changes  # fmt: skip


def group(size: int, **changes: Any) -> dict[str, Any]:
    own = {"strategy": "group", "group_size": size, "num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    return {"weights": own | changes}


CHANNEL_8 = {"weights": {"strategy": "channel", "num_bits": 8, "type": "int", "symmetric": False, "dynamic": False}}
W8A8 = {
    "weights": CHANNEL_8["weights"] | {"symmetric": True},
    "input_activations": {"strategy": "token", "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}


@dataclass(frozen=True)
class Checkpoint:
    """One row: a quantization_config, and the writers of the modules."""

    name: str
    rounding: float
    """Distance by which rounding activations to 8 bits moves the logits (`error` of the tests; an AMD Zen 3,
    2026-11-23)."""
    quantization: dict[str, Any]
    write: Write
    others: dict[str, Write | None] = field(default_factory=dict)
    """Writers of modules whose names hold the key, instead of `write`; None: the module is not quantized."""
    has_head: bool = False

    def writer(self, module: str) -> Write | None:
        if module == "lm_head" and not self.has_head:
            return None
        return next((write for text, write in self.others.items() if text in module), self.write)

    def config_json(self) -> dict[str, Any]:
        return CONFIG | {"quantization_config": self.quantization}


CHECKPOINTS = (
    Checkpoint("W4A16", 0.018, compressed(group(32)), packed(4, 32, True)),
    Checkpoint(
        "W4A16, asymmetric, with the head", 0.021, compressed(group(64, symmetric=False), ignore=[]),
        packed(4, 64, False, torch.float16), has_head=True,
    ),
    Checkpoint("W8A16, a channel, asymmetric", 0.016, compressed(CHANNEL_8), packed(8, None, False)),
    Checkpoint("W8A8", 0.014, compressed(W8A8, kind="int-quantized"), in_bytes),
    Checkpoint(
        "mixed", 0.017,
        compressed(
            group(32) | {"format": "pack-quantized", "targets": ["Linear"]},
            CHANNEL_8 | {"format": "pack-quantized", "targets": ["re:.*v_proj$", "re:.*0.mlp.(down|up)_proj"]},
            kind="mixed-precision",
            ignore=["lm_head", "model.layers.1.self_attn.k_proj", "re:.*1.mlp.down.*"],
        ),
        packed(4, 32, True),
        {
            "1.self_attn.k_proj": None, "1.mlp.down": None, "v_proj": packed(8, None, False),
            "0.mlp.down_proj": packed(8, None, False), "0.mlp.up_proj": packed(8, None, False),
        },
    ),
    Checkpoint("GPTQ", 0.018, GPTQ, gptq(4, 32, True)),
    Checkpoint(
        "GPTQ, an order for each module", 0.016, GPTQ | {"desc_act": True, "sym": False}, gptq(4, 32, False, order=0)
    ),
    Checkpoint("GPTQ, one order", 0.017, GPTQ | {"desc_act": True}, gptq(4, 32, True, order=9)),
    Checkpoint(
        "GPTQ v2, dynamic", 0.021,
        GPTQ | {
            "sym": False, "checkpoint_format": "gptq_v2",
            "dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}, r"-:model\.layers\.1\..*[kv]_proj": {}},
        },
        gptq(4, 32, False, version=2),
        {"down_proj": gptq(8, 64, False, version=2), "1.self_attn.k_proj": None, "1.self_attn.v_proj": None},
    ),
    Checkpoint("AWQ", 0.021, AWQ | {"modules_to_not_convert": ["1.mlp"]}, awq(32), {"1.mlp": None}),
    Checkpoint(
        "AutoRound", 0.018,
        ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}, ".*o_proj.*": {"bits": 8}}},
        gptq(4, 32, True), {"0.mlp.up_proj": None, "o_proj": gptq(8, 32, True)},
    ),
    Checkpoint(
        "NVFP4", 0.012,
        compressed(group(16, strategy="tensor_group", type="float"), kind="nvfp4-pack-quantized"), nvfp4(False),
    ),
    Checkpoint(
        "NVFP4 of ModelOpt", 0.010,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.mlp*"]},
        nvfp4(True), {"0.mlp": None},
    ),
    Checkpoint("MXFP4", 0.026, compressed(group(32, type="float"), kind="mxfp4-pack-quantized"), mxfp4),
)  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """Results of `save`."""

    plain: Tensors
    """The model's own tensors in fp32, with matrices dequantized."""
    tensors: Tensors
    """The tensors as stored."""


def save(checkpoint: Checkpoint, directory: Path, **sizes: int) -> Saved:
    """Write config.json and model.safetensors. `sizes` replaces those of `CONFIG`."""
    directory.mkdir(parents=True, exist_ok=True)
    g = Generator().manual_seed(3)
    plain: Tensors = {}
    stored: Tensors = {}
    for source in weights(describe(CONFIG | sizes)).sources:
        module, is_norm = source.tensor.removesuffix(".weight"), len(source.shape) == 1
        write = None if is_norm or "embed" in module else checkpoint.writer(module)
        if write is not None:
            tensors, plain[source.tensor] = write(g, *source.shape)
            stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
            continue
        weight = torch.randn(source.shape, generator=g) * (0.2 if is_norm else source.shape[-1] ** -0.5)
        stored[source.tensor] = (weight + 1 if is_norm else weight).to(torch.bfloat16)
        plain[source.tensor] = stored[source.tensor].float()
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(checkpoint.config_json() | sizes))
    return Saved(plain, stored)
