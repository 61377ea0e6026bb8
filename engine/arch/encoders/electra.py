"""ELECTRA: BERT with other names, and a classifier with a GELU."""

from __future__ import annotations

from inferd.engine.arch.encoder import Classifier, EncoderArch, HeadActivation
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(
    prefixes=("electra.",),
    classifier=("classifier.dense", "classifier.out_proj"),
    unread=("generator_", "discriminator_", "embeddings.position_ids"),
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(type_vocab_size=2)
    hidden_size = fields.integer("hidden_size")
    if fields.integer("embedding_size", default=hidden_size) != hidden_size:
        raise fields.refuse("embedding_size", f"must be hidden_size, {hidden_size}: no projection is computed")
    return bert_like(
        architecture,
        fields,
        positions=learned_positions(fields),
        num_token_types=fields.integer("type_vocab_size"),
    )


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields), HeadActivation.GELU_ERF)
