"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions begin behind the padding token's id. BGE-M3, multilingual
E5, and BGE's rerankers."""

from __future__ import annotations

from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(
    prefixes=("roberta.",),
    classifier=("classifier.dense", "classifier.out_proj"),
    unread=("pooler.", "lm_head.", "embeddings.position_ids"),
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(pad_token_id=1, type_vocab_size=2)
    return bert_like(
        architecture,
        fields,
        positions=learned_positions(fields, padding_id=fields.integer("pad_token_id", minimum=0)),
        num_token_types=fields.integer("type_vocab_size"),
    )


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
