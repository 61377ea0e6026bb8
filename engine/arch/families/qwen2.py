"""Qwen 1.5, 2 and 2.5, dense: Llama with biases on q, k and v only, and optional windows in late layers."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.windows import Windows, if_used


def describe(architecture: str, fields: Fields) -> Arch:
    arch = base(architecture, fields)
    return dataclasses.replace(arch, has_qkv_bias=True, windows=late_windows(fields, arch))


def late_windows(fields: Fields, arch: Arch) -> Windows:
    """If `use_sliding_window` is true, layers from `max_window_layers` on have a window."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)

    def is_windowed(layer: int) -> bool:
        return layer >= fields.integer("max_window_layers", minimum=0)

    return if_used(fields, arch.num_layers, arch.max_positions, is_windowed)
