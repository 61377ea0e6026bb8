"""ERNIE 4.5, dense or with experts and a shared one: Llama whose rope turns neighbours in a head. The dense models have
an explicit head size. Experts are chosen by a softmax plus a bias."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope
from inferd.engine.arch.tensors import TensorNames

NAMES_WITH_EXPERTS = TensorNames(shared="mlp.shared_experts", score_bias="moe_statics.e_score_correction_bias")
MTP_LAYERS = "model.mtp_"
_LEAST_SUM = 1e-6


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=2, rope_theta=500_000.0, tie_word_embeddings=True)
    rope = dataclasses.replace(read_rope(fields, fields.integer("head_dim")), turns_neighbours=True)
    has_bias = fields.boolean("use_bias", default=False)
    return dataclasses.replace(
        base(architecture, fields, rope=rope), has_qkv_bias=has_bias, has_o_bias=has_bias, has_mlp_bias=has_bias
    )


def describe_with_experts(architecture: str, fields: Fields) -> Arch:
    if fields.boolean("use_bias", default=False):
        raise fields.refuse("use_bias", "must be false in a model with experts")
    head_dim, size = fields.head_dim(fields.heads()[0]), "moe_intermediate_size"
    arch = describe(architecture, fields.with_defaults(head_dim=head_dim, num_key_value_heads=4))
    arch = with_experts(
        arch,
        fields,
        count="moe_num_experts",
        chosen="moe_k",
        size=size,
        normalizes=True,
        layers=_expert_layers(fields, arch.num_layers),
        shared_size=fields.integer(size) * fields.integer("moe_num_shared_experts", default=2, minimum=0),
        has_shared_gate=False,
    )
    if arch.experts is None:
        return arch
    least = fields.positive("moe_norm_min", 1e-12)
    if least > _LEAST_SUM:
        raise fields.refuse("moe_norm_min", f"must be at most {_LEAST_SUM}, so that it is a guard against zero alone")
    return dataclasses.replace(arch, experts=dataclasses.replace(arch.experts, has_score_bias=True, added=least))


def _expert_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer from the start index to the end index; an end of -1 is the last layer."""
    first = fields.integer("moe_layer_start_index", default=1, minimum=0)
    last = fields.integer("moe_layer_end_index", default=-1, minimum=-1)
    interval = fields.integer("moe_layer_interval", default=1)
    last = num_layers - 1 if last == -1 else last
    return tuple(layer for layer in range(num_layers) if first <= layer <= last and (layer + 1) % interval == 0)
