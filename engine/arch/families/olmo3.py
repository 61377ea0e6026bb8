"""OLMo 3: OLMo 2 with windows in three of four layers. Only the layers without a window have scaled ropes."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch
from inferd.engine.arch.families import olmo2
from inferd.engine.arch.families.olmo2 import NAMES
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import ropes_by_layer_type
from inferd.engine.arch.windows import windowed_layers, windows_of

__all__ = ["NAMES", "describe"]

_THETA = 500_000.0


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(sliding_window=4096, rope_theta=_THETA)
    num_heads, _ = fields.heads()
    theta = fields.positive("rope_theta")
    full, local = ropes_by_layer_type(fields, fields.head_dim(num_heads), theta, theta)
    arch = olmo2.describe(architecture, fields, full)
    windowed = windowed_layers(fields, arch.num_layers, default=lambda layer: (layer + 1) % 4 != 0)
    return dataclasses.replace(
        arch,
        windows=windows_of(fields, windowed, arch.max_positions),
        ropes=tuple(local if is_windowed else full for is_windowed in windowed),
    )
