"""Granite 3.x, dense: Llama with four multipliers: for embeddings, scores, branches and logits."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch
from inferd.engine.arch.families import llama
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    return dataclasses.replace(
        llama.describe(architecture, fields),
        attention_scale=fields.positive("attention_multiplier", 1.0),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )
