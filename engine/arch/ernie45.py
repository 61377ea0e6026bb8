"""ERNIE 4.5, dense: Llama with an explicit head size, whose rope turns neighbours in a head."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=2, rope_theta=500_000.0, tie_word_embeddings=True)
    rope = dataclasses.replace(read_rope(fields, fields.integer("head_dim")), turns_neighbours=True)
    has_bias = fields.boolean("use_bias", default=False)
    return dataclasses.replace(
        base(architecture, fields, rope=rope), has_qkv_bias=has_bias, has_o_bias=has_bias, has_mlp_bias=has_bias
    )
