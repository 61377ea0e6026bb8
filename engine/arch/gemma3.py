"""Gemma 3, text only: Gemma 2 without soft caps on scores, and with a norm over each head of q and k. Five windowed
layers come before each full one, and the two kinds have different ropes."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch, QKNorm, Rope
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.gemma2 import NAMES, gemma
from inferd.engine.arch.rope import rope_of
from inferd.engine.arch.windows import windowed_layers, windows_of

__all__ = ["NAMES", "describe"]

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(head_dim=256, sliding_window=4096, sliding_window_pattern=6)
    if fields.has("attn_logit_softcapping"):
        raise fields.refuse("attn_logit_softcapping", "must be null in this family")
    full, local = _ropes(fields)
    arch = gemma(architecture, fields, full)
    pattern = fields.integer("sliding_window_pattern")
    windowed = windowed_layers(fields, arch.num_layers, default=lambda layer: (layer + 1) % pattern != 0)
    return dataclasses.replace(
        arch,
        qk_norm=QKNorm.HEAD,
        windows=windows_of(fields, windowed, arch.max_positions),
        ropes=tuple(local if is_windowed else full for is_windowed in windowed),
    )


def _ropes(fields: Fields) -> tuple[Rope, Rope]:
    """(rope of full layers, rope of windowed layers). In the older spelling, scaling is for full layers only."""
    head_dim = fields.integer("head_dim")
    nothing = Fields({}, fields.owner)
    sections = fields.section("rope_parameters")
    if sections is not None:
        if sections.has("rope_type") or sections.has("rope_theta"):
            raise fields.refuse("rope_parameters", "must hold full_attention and sliding_attention in this family")
        full = sections.section("full_attention") or nothing
        local = sections.section("sliding_attention") or nothing
    else:
        full, local = fields.section("rope_scaling") or nothing, nothing
    full_theta = full.positive("rope_theta", fields.positive("rope_theta", _GLOBAL_THETA))
    local_theta = local.positive("rope_theta", fields.positive("rope_local_base_freq", _LOCAL_THETA))
    return rope_of(full, fields, full_theta, head_dim), rope_of(local, fields, local_theta, head_dim)
