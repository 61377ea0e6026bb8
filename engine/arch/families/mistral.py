"""Mistral: Llama without biases, and with one window for all layers unless `sliding_window` is null."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.windows import in_every_layer


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(sliding_window=4096, num_key_value_heads=8)
    if fields.has("layer_types"):
        raise fields.refuse("layer_types", "is not supported in this family: every layer has the same window")
    arch = base(architecture, fields)
    return dataclasses.replace(arch, windows=in_every_layer(fields, arch.num_layers, arch.max_positions))
