"""Seed-OSS: Llama with an explicit head size, with biases on q, k and v, and with an option for one on o."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch
from inferd.engine.arch.families import llama
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(attention_bias=True, head_dim=128, num_key_value_heads=8)
    has_o_bias = fields.boolean("attention_out_bias", default=False)
    return dataclasses.replace(llama.describe(architecture, fields), has_o_bias=has_o_bias)
