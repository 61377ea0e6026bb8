"""GLM-4: Llama with gate and up in one stored matrix, and with biases on q, k and v. Rope turns half of each head, as
neighbours. The models of 2025 (`Glm4ForCausalLM`) also have norms after attention and MLP."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope
from inferd.engine.arch.tensors import TensorNames

NAMES = TensorNames(gate_up=("gate_up_proj",))
NAMES_WITH_POST_NORMS = dataclasses.replace(
    NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=2, partial_rotary_factor=0.5)
    rope = read_rope(fields, fields.integer("head_dim"), has_partial_rotation=True)
    arch = base(architecture, fields, rope=dataclasses.replace(rope, turns_neighbours=True))
    return dataclasses.replace(arch, has_qkv_bias=fields.boolean("attention_bias", default=True))


def describe_with_post_norms(architecture: str, fields: Fields) -> Arch:
    return dataclasses.replace(describe(architecture, fields), has_post_norms=True)
