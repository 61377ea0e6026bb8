"""ELECTRA: BERT with other names, a classifier with a GELU, and in small models a narrower embedding."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.encoder import Classifier, EncoderArch, HeadActivation
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(
    prefixes=("electra.",),
    projection="embeddings_project",
    classifier=("classifier.dense", "classifier.out_proj"),
    unread=("generator_", "discriminator_", "embeddings.position_ids"),
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(type_vocab_size=2)
    arch = bert_like(
        architecture,
        fields,
        positions=learned_positions(fields),
        num_token_types=fields.integer("type_vocab_size"),
    )
    size = fields.integer("embedding_size", default=arch.hidden_size)
    return arch if size == arch.hidden_size else replace(arch, projected_from=size)


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields), HeadActivation.GELU_ERF)
