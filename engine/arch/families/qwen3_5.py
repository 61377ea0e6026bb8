"""Qwen 3.5 without its vision part, dense or with experts and a shared one in every layer: Gated DeltaNet in most
layers, attention with an output gate in the others. Qwen3-Next, before it, stores the projections of Gated DeltaNet by
head, and may have an MLP in some layers.

Norms multiply by 1 + their stored weight, but for the one behind a Gated DeltaNet. Rotary embedding turns a quarter of
each head; for text its three kinds of positions are one.
"""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, NormKind, QKNorm
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.families.qwen3_moe import expert_layers
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.recurrent import GatedDelta
from inferd.engine.arch.rope import read_rope
from inferd.engine.arch.tensors import TensorNames

NAMES_OF_NEXT = TensorNames(delta_in=("in_proj_qkvz", "in_proj_ba"))
SPLIT_NAMES_OF_NEXT = TensorNames(delta_in=("in_proj_qkv", "in_proj_z", "in_proj_ba"))
"""The names in GGUF files, in which q, k and v of all heads lie in one matrix, and z in another."""
MTP_LAYERS = "mtp."

_IS_RECURRENT = {"linear_attention": True, "full_attention": False}


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(head_dim=256, partial_rotary_factor=0.25)
    num_heads, _ = fields.heads()
    rope = read_rope(fields, fields.head_dim(num_heads), has_partial_rotation=True)
    arch = base(architecture, fields, rope=rope)
    recurrent_layers = _recurrent_layers(fields, arch.num_layers)
    has_bias = fields.boolean("attention_bias", default=False)
    return dataclasses.replace(
        arch,
        norm=NormKind.RMS_ONE_PLUS,
        qk_norm=QKNorm.HEAD,
        has_output_gate=True,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        recurrent=_delta(fields) if recurrent_layers else None,
        recurrent_layers=recurrent_layers,
    )


def describe_with_experts(architecture: str, fields: Fields) -> Arch:
    size = "moe_intermediate_size"
    fields = fields.with_defaults(intermediate_size=fields.integer(size))
    arch, shared_size = describe(architecture, fields), fields.integer("shared_expert_intermediate_size")
    return with_experts(arch, fields, count="num_experts", size=size, normalizes=True, shared_size=shared_size)


def describe_next(architecture: str, fields: Fields) -> Arch:
    arch = describe(architecture, fields)
    return with_experts(
        arch,
        fields,
        count="num_experts",
        size="moe_intermediate_size",
        normalizes=fields.boolean("norm_topk_prob", default=True),
        layers=expert_layers(fields, arch.num_layers),
        shared_size=fields.integer("shared_expert_intermediate_size"),
    )


def _recurrent_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """All but those of `layer_types` with full attention; without that list all but every fourth, or as
    `full_attention_interval` says."""
    if fields.has("layer_types"):
        is_recurrent = fields.choices("layer_types", _IS_RECURRENT, num_layers)
    else:
        interval = fields.integer("full_attention_interval", default=4)
        is_recurrent = tuple(bool((layer + 1) % interval) for layer in range(num_layers))
    if all(is_recurrent):
        raise fields.refuse("layer_types", "must name full_attention at least once")
    return tuple(layer for layer in range(num_layers) if is_recurrent[layer])


def _delta(fields: Fields) -> GatedDelta:
    num_key_heads = fields.integer("linear_num_key_heads", default=16)
    num_value_heads = fields.integer("linear_num_value_heads", default=32)
    if num_value_heads % num_key_heads:
        raise fields.refuse(
            "linear_num_value_heads", f"must be a multiple of linear_num_key_heads, which is {num_key_heads}"
        )
    return GatedDelta(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", default=128),
        value_dim=fields.integer("linear_value_head_dim", default=128),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4, minimum=2),
    )
