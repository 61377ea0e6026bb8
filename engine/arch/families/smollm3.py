"""SmolLM3: Llama with no position embedding in every fourth layer, and optional windows in those layers."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch
from inferd.engine.arch.families import llama
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.windows import if_used

_HAS_ROPE = {0: False, 1: True}


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(
        num_key_value_heads=4, rope_theta=2_000_000.0, tie_word_embeddings=True, no_rope_layer_interval=4
    )
    arch = llama.describe(architecture, fields)
    has_rope = _layers_with_rope(fields, arch.num_layers)
    return dataclasses.replace(
        arch,
        ropes=tuple(rope if has else None for rope, has in zip(arch.ropes, has_rope, strict=True)),
        windows=if_used(fields, arch.num_layers, arch.max_positions, default=lambda layer: not has_rope[layer]),
    )


def _layers_with_rope(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has rope. In `no_rope_layers`, despite the name, 1 means that a layer has rope."""
    if fields.has("no_rope_layers"):
        return fields.choices("no_rope_layers", _HAS_ROPE, num_layers)
    interval = fields.integer("no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
