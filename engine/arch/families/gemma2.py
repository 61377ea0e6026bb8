"""Gemma 2: norms before and after each branch; a norm multiplies by 1 + its stored weight. Scores and logits are
soft-capped, every other layer has a window, and embeddings are scaled by the root of their width."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, NormKind
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rotary import Rope
from inferd.engine.arch.tensors import TensorNames
from inferd.engine.arch.windows import windowed_layers, windows_of

NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.refuse("use_bidirectional_attention", "must be false: a token sees no later one")
    arch = gemma(architecture, fields)
    windowed = windowed_layers(fields, arch.num_layers, default=lambda layer: layer % 2 == 0)
    return dataclasses.replace(
        arch,
        windows=windows_of(fields, windowed, arch.max_positions),
        attention_softcap=fields.positive_or_none("attn_logit_softcapping"),
    )


def gemma(architecture: str, fields: Fields, rope: Rope | None = None) -> Arch:
    """The description that Gemma 2 and 3 share, with one rope in all layers."""
    fields = fields.with_defaults(
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        num_key_value_heads=4,
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
    )
    arch = base(architecture, fields, activation="hidden_activation", rope=rope)
    has_bias = fields.boolean("attention_bias", default=False)
    return dataclasses.replace(
        arch,
        norm=NormKind.RMS_ONE_PLUS,
        has_post_norms=True,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        final_softcap=fields.positive_or_none("final_logit_softcapping"),
        embedding_multiplier=arch.hidden_size**0.5,
        rounds_embedding_multiplier=True,
    )
