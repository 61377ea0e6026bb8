"""OLMo 2: norms come after attention and MLP, not before them. A norm of q and of k runs over all heads together."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rotary import Rope
from inferd.engine.arch.tensors import TensorNames

NAMES = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def describe(architecture: str, fields: Fields, rope: Rope | None = None) -> Arch:
    """With one rope in all layers: `rope`, or the config's."""
    has_bias = fields.boolean("attention_bias", default=False)
    return dataclasses.replace(
        base(architecture, fields, rope=rope),
        has_pre_norms=False,
        has_post_norms=True,
        qk_norm=QKNorm.PROJECTION,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
    )
