"""The formats of quantized checkpoints that are read: one row for each of the table in docs/quantization.md.

Tests write each row as a random model, and `benchmarks.quality.formats` as a real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.quality.packing import Write, awq, gptq, in_bytes, mxfp4, nvfp4, packed


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


FORMATS = (
    Format("W4A16", 0.018, compressed(group(32)), packed(4, 32, True)),
    Format(
        "W4A16, asymmetric, with the head", 0.021, compressed(group(64, symmetric=False), ignore=[]),
        packed(4, 64, False, torch.float16), has_head=True,
    ),
    Format("W8A16, a channel, asymmetric", 0.016, compressed(CHANNEL_8), packed(8, None, False)),
    Format("W8A8", 0.014, compressed(W8A8, kind="int-quantized"), in_bytes),
    Format(
        "mixed", 0.017,
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
    Format("GPTQ", 0.018, GPTQ, gptq(4, 32, True)),
    Format(
        "GPTQ, an order for each module", 0.016, GPTQ | {"desc_act": True, "sym": False}, gptq(4, 32, False, order=0)
    ),
    Format("GPTQ, one order", 0.017, GPTQ | {"desc_act": True}, gptq(4, 32, True, order=9)),
    Format(
        "GPTQ v2, dynamic", 0.021,
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
    Format("AWQ", 0.021, AWQ | {"modules_to_not_convert": ["1.mlp"]}, awq(32), {"1.mlp": None}),
    Format(
        "AutoRound", 0.018,
        ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}, ".*o_proj.*": {"bits": 8}}},
        gptq(4, 32, True), {"layers.0.mlp.up_proj": None, "o_proj": gptq(8, 32, True)},
    ),
    Format(
        "NVFP4", 0.012,
        compressed(group(16, strategy="tensor_group", type="float"), kind="nvfp4-pack-quantized"), nvfp4(False),
    ),
    Format(
        "NVFP4 of ModelOpt", 0.010,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.mlp*"]},
        nvfp4(True), {"layers.0.mlp": None},
    ),
    Format("MXFP4", 0.026, compressed(group(32, type="float"), kind="mxfp4-pack-quantized"), mxfp4),
)  # fmt: skip
