"""Ministral 3: Mistral with YaRN, and with queries that grow with their position."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch
from inferd.engine.arch.families import mistral
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rotary import QueryGrowth


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(sliding_window=None, head_dim=128)
    section = fields.section("rope_parameters")
    if section is None:
        raise fields.refuse("rope_parameters", "must be given in this family")
    arch = mistral.describe(architecture, fields)
    growth = None
    if section.has("llama_4_scaling_beta"):
        original = section.integer("original_max_position_embeddings")
        growth = QueryGrowth(section.positive("llama_4_scaling_beta"), original)
    ropes = (rope and dataclasses.replace(rope, query_growth=growth) for rope in arch.ropes)
    return dataclasses.replace(arch, ropes=tuple(ropes))
