"""Llama 2 and 3.x, and other models that are saved as Llama."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    has_bias = fields.boolean("attention_bias", default=False)
    return dataclasses.replace(
        base(architecture, fields),
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_mlp_bias=fields.boolean("mlp_bias", default=False),
    )
