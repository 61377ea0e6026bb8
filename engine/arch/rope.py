"""Reads rotary embedding from a config, in both spellings: `rope_parameters`, or the older `rope_theta` with
`rope_scaling`.

It knows the scalings and their defaults, which are those of transformers, but no family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from inferd.engine.arch.description import ArchError
from inferd.engine.arch.fields import MAX_WHOLE, Fields
from inferd.engine.arch.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

ROPE_TYPES: Mapping[str, str] = {name: name for name in ("default", "linear", "dynamic", "yarn", "longrope", "llama3")}
PROPORTIONAL: Mapping[str, str] = {**ROPE_TYPES, "proportional": "proportional"}
"""The types of a family that may turn the first part of each head alone."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(
    fields: Fields, head_dim: int, *, types: Mapping[str, str] = ROPE_TYPES, has_partial_rotation: bool = False
) -> Rope:
    """The one rope of a model. `types` maps each `rope_type` that the family knows to one of `ROPE_TYPES`."""
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise fields.refuse("rope_scaling", "must not stand beside rope_parameters")
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.owner)
    if any(section.has(layer_type) for layer_type in _LAYER_TYPES):
        raise ArchError(f"{section.owner}: parameters that differ by layer type are not supported in this family")
    holder = section if section.has("partial_rotary_factor") else fields
    fraction = holder.positive("partial_rotary_factor", 1.0)
    if fraction != 1.0 and not has_partial_rotation:
        raise holder.refuse("partial_rotary_factor", "must be 1 in this family")
    rotary_dim = int(head_dim * fraction) if fraction <= 1 else 0
    if not 4 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise holder.refuse(
            "partial_rotary_factor", f"must rotate an even number of elements, at least 4, of head_dim {head_dim}"
        )
    theta = (section if section.has("rope_theta") else fields).positive("rope_theta", 10000.0)
    return rope_of(section, fields, theta, rotary_dim, types)


def rope_of(
    section: Fields, fields: Fields, theta: float, rotary_dim: int, types: Mapping[str, str] = ROPE_TYPES
) -> Rope:
    """The rope that `section` describes, in a model with `fields`."""
    if theta <= 1:
        raise ArchError(f"{section.owner}: rope_theta must be above 1, but it is {theta}")
    rope_type = section.choice("rope_type" if section.has("rope_type") else "type", types, default="default")
    match rope_type:
        case "linear":
            return Rope(theta, rotary_dim, LinearScaling(section.positive("factor")))
        case "dynamic":
            original = fields.integer("max_position_embeddings")
            return Rope(theta, rotary_dim, DynamicScaling(_stretch(section, original), original))
        case "llama3":
            return Rope(theta, rotary_dim, _llama3(section, fields))
        case "yarn":
            return Rope(theta, rotary_dim, _yarn(section, fields), _yarn_attention_factor(section))
        case "proportional":
            num_turned = int(rotary_dim * section.positive("partial_rotary_factor", 1.0) // 2)
            if not 1 <= num_turned <= rotary_dim // 2:
                raise section.refuse("partial_rotary_factor", f"must turn 1 to {rotary_dim // 2} pairs of elements")
            return Rope(theta, rotary_dim, ProportionalScaling(num_turned, section.positive("factor", 1.0)))
        case "longrope":
            return _longrope(section, fields, theta, rotary_dim)
        case _:
            return Rope(theta, rotary_dim)


def ropes_by_layer_type(fields: Fields, head_dim: int, full_theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """(rope of full layers, rope of windowed layers). In the older spelling, scaling is for full layers only. The
    arguments are the thetas of sections that state none."""
    nothing = Fields({}, fields.owner)
    sections = fields.section("rope_parameters")
    if sections is not None:
        if sections.has("rope_type") or sections.has("rope_theta"):
            raise fields.refuse("rope_parameters", "must hold full_attention and sliding_attention in this family")
        full, local = (sections.section(layer_type) or nothing for layer_type in _LAYER_TYPES)
    else:
        full, local = fields.section("rope_scaling") or nothing, nothing
    full_theta, local_theta = full.positive("rope_theta", full_theta), local.positive("rope_theta", local_theta)
    return rope_of(full, fields, full_theta, head_dim), rope_of(local, fields, local_theta, head_dim)


def max_positions(fields: Fields, scaling: RopeScaling | None) -> int:
    """Number of positions that the model was trained for. YaRN and dynamic scaling may stretch the number in the
    config."""
    stated = fields.integer("max_position_embeddings")
    match scaling:
        case YarnScaling() | DynamicScaling():
            return max(stated, int(scaling.factor * scaling.original_max_positions))
        case _:
            return stated


def _stretch(section: Fields, original: int) -> float:
    """`factor` of a scaling, which multiplies the `original` number of positions."""
    factor = section.positive("factor")
    if factor * original > MAX_WHOLE:
        raise section.refuse("factor", f"must make at most {MAX_WHOLE} positions of {original}")
    return factor


def _original_max_positions(section: Fields, fields: Fields) -> int:
    """`original_max_position_embeddings`. As in transformers, the model's own field wins over the rope section's."""
    name = "original_max_position_embeddings"
    holder = section if section.has(name) and not fields.has(name) else fields
    return holder.integer(name, default=fields.integer("max_position_embeddings"), minimum=2)


def _llama3(section: Fields, fields: Fields) -> Llama3Scaling:
    low = section.positive("low_freq_factor")
    high = section.positive("high_freq_factor")
    if high <= low:
        raise section.refuse("high_freq_factor", f"must be above low_freq_factor ({low})")
    return Llama3Scaling(section.positive("factor"), low, high, _original_max_positions(section, fields))


def _yarn(section: Fields, fields: Fields) -> YarnScaling:
    fast, slow = section.positive("beta_fast", 32.0), section.positive("beta_slow", 1.0)
    if fast <= slow:
        raise section.refuse("beta_fast", f"must be above beta_slow ({slow})")
    original = _original_max_positions(section, fields)
    return YarnScaling(_stretch(section, original), original, fast, slow, section.boolean("truncate", default=True))


def _yarn_attention_factor(section: Fields) -> float:
    if section.has("attention_factor"):
        return section.positive("attention_factor")
    factor = section.positive("factor")

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if section.has("mscale") and section.has("mscale_all_dim"):
        return grown(section.positive("mscale")) / grown(section.positive("mscale_all_dim"))
    return grown(1.0)


def _longrope(section: Fields, fields: Fields, theta: float, rotary_dim: int) -> Rope:
    original = _original_max_positions(section, fields)
    scaling = LongRopeScaling(
        original, section.positives("short_factor", rotary_dim // 2), section.positives("long_factor", rotary_dim // 2)
    )
    factor = section.positive("factor", fields.integer("max_position_embeddings") / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(theta, rotary_dim, scaling, section.positive("attention_factor", default))
