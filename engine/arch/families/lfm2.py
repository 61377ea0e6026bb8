"""LFM2, dense or with experts behind the first layers: gated short convolutions in most layers, attention with norms of
q and k in the others."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.recurrent import ShortConv
from inferd.engine.arch.tensors import TensorNames

NAMES = TensorNames(
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    mlp="feed_forward",
    score_bias="expert_bias",
    o="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    gate_up=("w1", "w3"),
    up="w3",
    down="w2",
    recurrent="conv",
    final_norm="embedding_norm",
)
_IS_RECURRENT = {"conv": True, "full_attention": False}


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(
        hidden_act="silu",
        rope_theta=1_000_000.0,
        tie_word_embeddings=fields.boolean("tie_embedding", default=True),
        intermediate_size=fields.value("block_ff_dim"),
    )
    if not fields.boolean("block_use_swiglu", default=True):
        raise fields.refuse("block_use_swiglu", "must be true: an MLP without a gate is not supported in this family")
    arch = base(architecture, fields, norm_eps="norm_eps")
    layers = _recurrent_layers(fields, arch.num_layers)
    conv = ShortConv(
        size=arch.hidden_size,
        conv_width=fields.integer("conv_L_cache", default=3, minimum=2),
        has_bias=fields.boolean("conv_bias", default=False),
    )
    return dataclasses.replace(
        arch,
        intermediate_size=_mlp_size(fields, arch.intermediate_size),
        qk_norm=QKNorm.HEAD,
        recurrent=conv if layers else None,
        recurrent_layers=layers,
    )


def describe_with_experts(architecture: str, fields: Fields) -> Arch:
    arch = describe(architecture, fields.with_defaults(block_auto_adjust_ff_dim=False))
    num_dense = fields.integer("num_dense_layers", default=2, minimum=0)
    arch = with_experts(
        arch,
        fields,
        count="num_experts",
        size="moe_intermediate_size",
        normalizes=fields.boolean("norm_topk_prob", default=True),
        layers=tuple(range(num_dense, arch.num_layers)),
    )
    if arch.experts is None:
        return arch
    experts = dataclasses.replace(
        arch.experts,
        has_sigmoid=True,
        has_score_bias=fields.boolean("use_expert_bias", default=True),
        factor=fields.positive("routed_scaling_factor", 1.0),
        added=1e-6,
    )
    return dataclasses.replace(arch, experts=experts)


def _mlp_size(fields: Fields, size: int) -> int:
    """With `block_auto_adjust_ff_dim` two thirds of the size, times a factor, rounded up to a multiple."""
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    factor, multiple = (
        fields.positive("block_ffn_dim_multiplier", 1.0),
        fields.integer("block_multiple_of", default=256),
    )
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def _recurrent_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Those of `layer_types`, or in older files those that `full_attn_idxs` does not name."""
    if fields.has("layer_types"):
        is_recurrent = fields.choices("layer_types", _IS_RECURRENT, num_layers)
    else:
        named = fields.value("full_attn_idxs")
        named = list(range(num_layers)) if named is None else named
        if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in named):
            raise fields.refuse("full_attn_idxs", f"must be a list of layers, from 0 to {num_layers - 1}")
        is_recurrent = tuple(layer not in named for layer in range(num_layers))
    if all(is_recurrent):
        raise fields.refuse("layer_types", "must name full_attention at least once")
    return tuple(layer for layer in range(num_layers) if is_recurrent[layer])
