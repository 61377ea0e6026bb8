"""Qwen3, dense: Llama with a norm over each head of q and k, an explicit head size, optional windows in late layers."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch import llama
from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    if not fields.has("head_dim"):
        raise fields.refuse("head_dim", "must be given")
    arch = llama.describe(architecture, fields)
    return dataclasses.replace(arch, has_qk_norm=True, windows=_windows(fields, arch.num_layers))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on see a window, where `use_sliding_window` holds."""
    if not fields.boolean("use_sliding_window", default=False):
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    first = fields.integer("max_window_layers", minimum=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))
