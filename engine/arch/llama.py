"""Llama 2 and 3.x, and checkpoints saved in their shape."""

from __future__ import annotations

from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    num_heads, num_kv_heads = fields.heads()
    head_dim = fields.head_dim(num_heads)
    num_layers = fields.integer("num_hidden_layers")
    max_positions = fields.integer("max_position_embeddings")
    has_bias = fields.boolean("attention_bias", default=False)
    return Arch(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=fields.positive("rms_norm_eps"),
        activation=fields.activation(),
        rope=fields.rope(head_dim, max_positions),
        attention_scale=head_dim**-0.5,
        tie_embeddings=fields.boolean("tie_word_embeddings", default=False),
        dtype=fields.dtype(),
        windows=(None,) * num_layers,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_mlp_bias=fields.boolean("mlp_bias", default=False),
    )
