"""BERT: MiniLM, BGE, E5, GTE, Snowflake Arctic and most other small embedders, and cross-encoders on top of them."""

from __future__ import annotations

from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(prefixes=("bert.",))


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(type_vocab_size=2)
    return bert_like(
        architecture,
        fields,
        positions=learned_positions(fields),
        num_token_types=fields.integer("type_vocab_size"),
    )


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
