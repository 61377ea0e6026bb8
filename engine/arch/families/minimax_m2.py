"""MiniMax-M2: experts in every layer, by DeepSeek's router without groups. All heads of q, and of k, have one norm.
Rope turns the first part of each head."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.experts import with_experts, with_sigmoid_router
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope
from inferd.engine.arch.tensors import TensorNames

NAMES = TensorNames(mlp="block_sparse_moe", score_bias="e_score_correction_bias", gate_up=("w1", "w3"), down="w2")


def describe(architecture: str, fields: Fields) -> Arch:
    head_dim = fields.integer("head_dim", default=128)
    fields = fields.with_defaults(head_dim=head_dim, num_key_value_heads=8, rope_theta=5_000_000.0)
    fields.choice("qk_norm_type", {"per_layer": None}, default="per_layer")
    if fields.has("rotary_dim"):
        fraction = fields.integer("rotary_dim", maximum=head_dim) / head_dim
        fields = fields.with_defaults(partial_rotary_factor=fraction)
    rope = read_rope(fields, head_dim, has_partial_rotation=True)
    arch = dataclasses.replace(base(architecture, fields, rope=rope), qk_norm=QKNorm.PROJECTION)
    arch = with_experts(arch, fields, count="num_local_experts", size="intermediate_size", normalizes=True)
    return with_sigmoid_router(arch, fields)
