"""gpt-oss: experts with biases and a limited gate in every layer, attention with sinks and biases, and a sliding window
in every second layer, the first one included.

A checkpoint holds a layer's experts in one tensor: [experts, inputs, outputs], or in MXFP4. Outputs of gates and of ups
alternate in it.
"""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, GateLimit
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.tensors import TensorNames
from inferd.engine.arch.windows import windowed_layers, windows_of

NAMES = TensorNames(router="router", alternates_experts=True)
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(head_dim=64, sliding_window=128, rope_theta=150000.0)
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        fields = fields.with_defaults(rope_parameters=_YARN)
    arch = base(architecture, fields)
    has_bias = fields.boolean("attention_bias", default=True)
    windowed = windowed_layers(fields, arch.num_layers, default=lambda layer: layer % 2 == 0)
    arch = dataclasses.replace(
        arch,
        has_sinks=True,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        windows=windows_of(fields, windowed, arch.max_positions),
    )
    return with_experts(
        arch,
        fields,
        count="num_local_experts",
        size="intermediate_size",
        normalizes=True,
        limit=GateLimit(fields.positive("swiglu_limit", 7.0), fields.positive("swiglu_alpha", 1.702)),
        has_bias=True,
    )
