"""The formats of quantized checkpoints that are read: one row for each of the table in docs/quantization.md.

Tests write each row as a random model, and `benchmarks.quality.formats` as a real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.quality.packing import (
    Write,
    awq,
    fp8,
    gptq,
    in_bytes,
    mxfp4,
    nvfp4,
    of_blocks,
    of_rows,
    of_tensor,
    packed,
)


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
class Format:
    """One row: a quantization_config, and the writers of the modules."""

    name: str
    quantization: dict[str, Any]
    write: Write
    others: dict[str, Write | None] = field(default_factory=dict)
    """Writers of modules whose names hold the key, instead of `write`; None: the module is not quantized."""
    has_head: bool = False

    def writer(self, module: str) -> Write | None:
        if module == "lm_head" and not self.has_head:
            return None
        return next((write for text, write in self.others.items() if text in module), self.write)


FORMATS = (
    Format("W4A16", compressed(group(32)), packed(4, 32, True)),
    Format(
        "W4A16, asymmetric, with the head", compressed(group(64, symmetric=False), ignore=[]),
        packed(4, 64, False, torch.float16), has_head=True,
    ),
    Format("W8A16, a channel, asymmetric", compressed(CHANNEL_8), packed(8, None, False)),
    Format("W8A8", compressed(W8A8, kind="int-quantized"), in_bytes),
    Format(
        "mixed",
        compressed(
            group(32) | {"format": "pack-quantized", "targets": ["Linear"]},
            CHANNEL_8 | {"format": "pack-quantized", "targets": ["re:.*v_proj$", "re:.*0.mlp.(down|up)_proj"]},
            kind="mixed-precision",
            ignore=["lm_head", "model.layers.1.self_attn.k_proj", "re:.*1.mlp.down.*"],
        ),
        packed(4, 32, True),
        {
            "layers.1.self_attn.k_proj": None, "1.mlp.down": None, "v_proj": packed(8, None, False),
            "0.mlp.down_proj": packed(8, None, False), "0.mlp.up_proj": packed(8, None, False),
        },
    ),
    Format("GPTQ", GPTQ, gptq(4, 32, True)),
    Format(
        "GPTQ, an order for each module", GPTQ | {"desc_act": True, "sym": False}, gptq(4, 32, False, order=0)
    ),
    Format("GPTQ, one order", GPTQ | {"desc_act": True}, gptq(4, 32, True, order=9)),
    Format(
        "GPTQ v2, dynamic",
        GPTQ | {
            "sym": False, "checkpoint_format": "gptq_v2",
            "dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}, r"-:model\.layers\.1\..*[kv]_proj": {}},
        },
        gptq(4, 32, False, version=2),
        {
            "down_proj": gptq(8, 64, False, version=2), "layers.1.self_attn.k_proj": None,
            "layers.1.self_attn.v_proj": None,
        },
    ),
    Format("AWQ", AWQ | {"modules_to_not_convert": ["1.mlp"]}, awq(32), {"1.mlp": None}),
    Format(
        "AutoRound",
        ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}, ".*o_proj.*": {"bits": 8}}},
        gptq(4, 32, True), {"layers.0.mlp.up_proj": None, "o_proj": gptq(8, 32, True)},
    ),
    Format(
        "NVFP4",
        compressed(group(16, strategy="tensor_group", type="float"), kind="nvfp4-pack-quantized"), nvfp4(False),
    ),
    Format(
        "NVFP4 of ModelOpt",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.mlp*"]},
        nvfp4(True), {"layers.0.mlp": None},
    ),
    Format("MXFP4", compressed(group(32, type="float"), kind="mxfp4-pack-quantized"), mxfp4),
)  # fmt: skip


def compressed_fp8(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    part = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    own = {"weights": part | weights, "input_activations": part | {"dynamic": True} | inputs}
    return compressed(own, kind="float-quantized")


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}

FP8_FORMATS = (
    Format("FP8, one scale", FP8, fp8(of_tensor)),
    Format("FP8, a row", compressed_fp8({"strategy": "channel"}, {"strategy": "token"}), fp8(of_rows, torch.bfloat16)),
    Format("FP8, blocks", FP8 | {"weight_block_size": [128, 128]}, fp8(of_blocks, suffix="weight_scale_inv")),
    Format(
        "FP8, blocks, of llm-compressor",
        compressed_fp8({"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}),
        fp8(of_blocks),
    ),
)
"""Those whose activations have a scale for each token. The scales of others come from calibration."""
