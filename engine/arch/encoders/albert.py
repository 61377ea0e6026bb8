"""ALBERT: BERT whose layers share their weights, and whose embedding is narrower than its hidden states."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

_ONE = "albert_layers.0."
"""A group has one layer."""
NAMES = EncoderNames(
    prefixes=("albert.",),
    projection="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.",
    qkv=(f"{_ONE}attention.query", f"{_ONE}attention.key", f"{_ONE}attention.value"),
    o=f"{_ONE}attention.dense",
    attention_norm=f"{_ONE}attention.LayerNorm",
    up=(f"{_ONE}ffn",),
    down=f"{_ONE}ffn_output",
    mlp_norm=f"{_ONE}full_layer_layer_norm",
    classifier=("pooler", "classifier"),
    unread=("pooler.", "predictions.", "sop_classifier.", "embeddings.position_ids"),
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(
        type_vocab_size=2, hidden_act="gelu_new", embedding_size=128, num_hidden_groups=1, inner_group_num=1
    )
    if fields.integer("inner_group_num") != 1:
        raise fields.refuse("inner_group_num", "must be 1: groups of several layers are not supported")
    arch = bert_like(
        architecture,
        fields,
        positions=learned_positions(fields),
        num_token_types=fields.integer("type_vocab_size"),
    )
    num_groups = fields.integer("num_hidden_groups")
    if arch.num_layers % num_groups:
        raise fields.refuse("num_hidden_groups", f"must divide num_hidden_layers, {arch.num_layers}")
    return replace(arch, projected_from=fields.integer("embedding_size"), num_uses=arch.num_layers // num_groups)


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
