"""OLMoE: Llama with experts in every layer. A norm of q and of k runs over all heads together."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    if fields.has("clip_qkv"):
        raise fields.refuse("clip_qkv", "must be null: limits of q, k and v are not supported")
    has_bias = fields.boolean("attention_bias", default=False)
    normalizes = fields.boolean("norm_topk_prob", default=False)
    arch = base(architecture, fields)
    arch = dataclasses.replace(arch, qk_norm=QKNorm.PROJECTION, has_qkv_bias=has_bias, has_o_bias=has_bias)
    return with_experts(arch, fields, count="num_experts", size="intermediate_size", normalizes=normalizes)
