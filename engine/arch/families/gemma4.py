"""Gemma 4, text only: Gemma 3 with RMS norms of the common kind, a norm of v, and a factor behind each layer.

Full layers have heads of another size than windowed ones, may have fewer of K and V, and may take v from the projection
of k. Of their heads the first part turns alone. The last layers may read the K and V of earlier ones, and have wider
MLPs. Each layer may have an input from the token itself, and experts beside its MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from inferd.engine.arch.base import base, num_layers_of
from inferd.engine.arch.description import Arch, ArchError, QKNorm
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.families.gemma2 import NAMES as GEMMA2_NAMES
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.heads import Heads
from inferd.engine.arch.rope import PROPORTIONAL, rope_of
from inferd.engine.arch.rotary import Rope
from inferd.engine.arch.windows import windowed_layers, windows_of

__all__ = ["NAMES", "describe"]

NAMES = dataclasses.replace(GEMMA2_NAMES, experts="", router="router.proj")
_HEAD_GROUP = 32
"""Elements of K or V that share a scale in a cache of 8 bits. Layers of different sizes share planes by whole ones."""
_ROPES: Mapping[str, Mapping[str, object]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
"""The ropes, if the config states none."""
_OVERRIDES = ("head_dim", "num_key_value_heads")
"""Fields that an entry of per_layer_config may set for its layer."""


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size_per_layer_input=256,
        num_key_value_heads=4,
        sliding_window=512,
        tie_word_embeddings=True,
    )
    if fields.value("use_bidirectional_attention") not in (None, "vision"):
        raise fields.refuse(
            "use_bidirectional_attention", 'must be null or "vision": a token of text sees no later one'
        )
    arch = _layers(architecture, fields)
    if not fields.boolean("enable_moe_block", default=False):
        return arch
    return with_experts(
        arch,
        fields,
        count="num_experts",
        size="moe_intermediate_size",
        chosen="top_k_experts",
        normalizes=True,
        activation=arch.activation,
        beside_mlp=True,
    )


def _layers(architecture: str, fields: Fields) -> Arch:
    """The description without experts."""
    windowed = _windowed(fields)
    heads = _sharing(fields, windowed, _heads(fields, windowed))
    ropes = {kind: _rope(fields, kind, own.head_dim) for kind, own in zip(windowed, heads, strict=True)}
    arch = base(architecture, fields, activation="hidden_activation", rope=ropes[windowed[-1]])
    has_bias = fields.boolean("attention_bias", default=False)
    is_wide = fields.boolean("use_double_wide_mlp", default=False)
    mlp_sizes = tuple(arch.intermediate_size * (2 if is_wide and own.kv_layer is not None else 1) for own in heads)
    return dataclasses.replace(
        arch,
        layer_heads=heads,
        intermediate_size=max(mlp_sizes),
        mlp_sizes=mlp_sizes if is_wide else (),
        layer_input_size=_layer_input_size(fields, arch),
        ropes=tuple(ropes[kind] for kind in windowed),
        windows=windows_of(fields, windowed, arch.max_positions),
        attention_scale=1.0,
        qk_norm=QKNorm.HEAD,
        has_v_norm=True,
        has_post_norms=True,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_layer_scalars=True,
        final_softcap=fields.positive_or_none("final_logit_softcapping"),
        embedding_multiplier=arch.hidden_size**0.5,
        rounds_embedding_multiplier=True,
    )


def _windowed(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer has a window: all but every sixth and the last, or as `layer_types` says."""
    num_layers = num_layers_of(fields)
    windowed = windowed_layers(fields, num_layers, lambda layer: bool((layer + 1) % 6) and layer < num_layers - 1)
    if windowed[-1]:
        raise fields.refuse("layer_types", "must end with full_attention")
    return windowed


def _heads(fields: Fields, windowed: tuple[bool, ...]) -> tuple[Heads, ...]:
    """The heads of each layer: those of windowed layers by the usual fields, those of full layers by `global_head_dim`
    and `num_global_key_value_heads`. `per_layer_config`, as transformers writes it, stands above these."""
    num_heads, num_kv_heads = fields.heads()
    head_dim, shares = fields.head_dim(num_heads), fields.boolean("attention_k_eq_v", default=False)
    num_global = num_kv_heads
    if shares:
        num_global = fields.integer("num_global_key_value_heads", default=num_kv_heads)
    of_kind = {True: (head_dim, num_kv_heads), False: (fields.integer("global_head_dim", default=512), num_global)}
    given = fields.section("per_layer_config")
    found: dict[bool, Heads] = {}
    for layer, is_windowed in enumerate(windowed):
        size, count = of_kind[is_windowed]
        if given is not None:
            size, count = _overridden(given, str(layer), head_dim, num_kv_heads)
        heads = Heads(num_heads, count, size, has_v=is_windowed or not shares)
        if found.setdefault(is_windowed, heads) != heads:
            raise fields.refuse("per_layer_config", "must give all layers of a type in layer_types the same heads")
    for heads in found.values():
        _check(fields, heads)
    return tuple(found[is_windowed] for is_windowed in windowed)


def _sharing(fields: Fields, windowed: tuple[bool, ...], heads: tuple[Heads, ...]) -> tuple[Heads, ...]:
    """The same heads. The last `num_kv_shared_layers` read the K and V of the last layer of their type before them."""
    num_shared = fields.integer("num_kv_shared_layers", default=0, minimum=0)
    num_own = len(windowed) - num_shared
    if not num_shared:
        return heads
    last = {is_windowed: layer for layer, is_windowed in enumerate(windowed[: max(0, num_own)])}
    if set(last) != set(windowed):
        raise fields.refuse(
            "num_kv_shared_layers", "must leave a layer of each type in layer_types before the shared ones"
        )
    shared = (
        dataclasses.replace(own, kv_layer=last[kind])
        for own, kind in zip(heads[num_own:], windowed[num_own:], strict=True)
    )
    return (*heads[:num_own], *shared)


def _layer_input_size(fields: Fields, arch: Arch) -> int:
    size = fields.integer("hidden_size_per_layer_input", default=0, minimum=0)
    if size and fields.integer("vocab_size_per_layer_input", default=arch.vocab_size) != arch.vocab_size:
        raise fields.refuse("vocab_size_per_layer_input", f"must be vocab_size ({arch.vocab_size})")
    return size


def _overridden(given: Fields, layer: str, head_dim: int, num_kv_heads: int) -> tuple[int, int]:
    own = given.section(layer) or Fields({}, given.owner)
    if not set(own.names()) <= set(_OVERRIDES):
        raise given.refuse(layer, f"must set {' and '.join(_OVERRIDES)} alone")
    return own.integer("head_dim", default=head_dim), own.integer("num_key_value_heads", default=num_kv_heads)


def _check(fields: Fields, heads: Heads) -> None:
    if heads.num_heads % heads.num_kv_heads:
        rule = f"must be divided by the KV heads of every layer, of which some have {heads.num_kv_heads}"
        raise fields.refuse("num_attention_heads", rule)
    if heads.head_dim % _HEAD_GROUP:
        raise ArchError(
            f"{fields.owner}: head_dim and global_head_dim must be multiples of {_HEAD_GROUP}, but one is "
            f"{heads.head_dim}"
        )


def _rope(fields: Fields, is_windowed: bool, head_dim: int) -> Rope:
    name = "sliding_attention" if is_windowed else "full_attention"
    sections = fields.section("rope_parameters") or Fields(_ROPES, fields.owner)
    section = sections.section(name)
    if section is None:
        raise fields.refuse("rope_parameters", f"must hold {name}")
    if section.value("rope_type") != "proportional" and section.positive("partial_rotary_factor", 1.0) != 1.0:
        raise section.refuse("partial_rotary_factor", "must be 1 unless rope_type is proportional")
    return rope_of(section, fields, section.positive("rope_theta"), head_dim, PROPORTIONAL)
