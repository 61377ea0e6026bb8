"""EXAONE 4: norms come after attention and MLP, and a norm runs over each head of q and k. If the config has a window,
three of four layers have it, and the others have no rope."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.families.olmo2 import NAMES
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.windows import windowed_layers, windows_of

__all__ = ["NAMES", "describe"]


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(sliding_window=4096, sliding_window_pattern=4)
    arch, has_window = base(architecture, fields), fields.has("sliding_window")

    def is_windowed(layer: int) -> bool:
        return has_window and (layer + 1) % fields.integer("sliding_window_pattern") != 0

    windowed = windowed_layers(fields, arch.num_layers, is_windowed)
    has_rope = windowed if has_window else (True,) * arch.num_layers
    return dataclasses.replace(
        arch,
        has_pre_norms=False,
        has_post_norms=True,
        qk_norm=QKNorm.HEAD,
        windows=windows_of(fields, windowed, arch.max_positions),
        ropes=tuple(rope if has else None for rope, has in zip(arch.ropes, has_rope, strict=True)),
    )
