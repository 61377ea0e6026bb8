"""Jina BERT v2: BERT with ALiBi in place of positions (Press et al. 2022, arXiv:2108.12409), and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_base import bert_like, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(
    prefixes=("bert.",),
    up=("mlp.gated_layers",),
    down="mlp.wo",
    mlp_norm="mlp.layernorm",
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(
        position_embedding_type="absolute", feed_forward_type="original", type_vocab_size=2, max_position_embeddings=512
    )
    fields.choice("position_embedding_type", {"alibi": None})
    fields.choice("feed_forward_type", {"geglu": None})
    arch = bert_like(
        architecture,
        fields,
        num_token_types=fields.integer("type_vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
    )
    splits_gate = fields.boolean("splits_matrices", default=False)
    return replace(arch, has_alibi=True, has_gate=True, has_up_bias=False, splits_gate=splits_gate)


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
