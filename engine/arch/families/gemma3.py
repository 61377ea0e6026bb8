"""Gemma 3, text only: Gemma 2 without soft caps on scores, and with a norm over each head of q and k. Five windowed
layers come before each full one, and the two kinds have different ropes. EmbeddingGemma is one whose tokens see those
behind them too: half of its window lies on each side."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.families.gemma2 import NAMES, gemma
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import ropes_by_layer_type
from inferd.engine.arch.windows import windowed_layers, windows_of

__all__ = ["NAMES", "describe"]

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(head_dim=256, sliding_window=4096, sliding_window_pattern=6)
    if fields.has("attn_logit_softcapping"):
        raise fields.refuse("attn_logit_softcapping", "must be null in this family")
    full_theta = fields.positive("rope_theta", _GLOBAL_THETA)
    local_theta = fields.positive("rope_local_base_freq", _LOCAL_THETA)
    full, local = ropes_by_layer_type(fields, fields.integer("head_dim"), full_theta, local_theta)
    arch = gemma(architecture, fields, full)
    pattern = fields.integer("sliding_window_pattern")
    windowed = windowed_layers(fields, arch.num_layers, default=lambda layer: (layer + 1) % pattern != 0)
    windows = windows_of(fields, windowed, arch.max_positions)
    is_bidirectional = fields.boolean("use_bidirectional_attention", default=False)
    if is_bidirectional and any(windowed):
        half = fields.integer("sliding_window", minimum=2) // 2
        windows = tuple(half if is_windowed else None for is_windowed in windowed)
    return dataclasses.replace(
        arch,
        qk_norm=QKNorm.HEAD,
        windows=windows,
        is_bidirectional=is_bidirectional,
        ropes=tuple(local if is_windowed else full for is_windowed in windowed),
    )
