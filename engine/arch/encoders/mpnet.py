"""MPNet: BERT without token types, with positions as RoBERTa has them and a learned bias of scores by distance."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.encoder import Classifier, EncoderArch, RelativeBias
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(
    prefixes=("mpnet.",),
    relative_bias="encoder.relative_attention_bias",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    o="attention.attn.o",
    attention_norm="attention.LayerNorm",
    classifier=("classifier.dense", "classifier.out_proj"),
    unread=("pooler.", "lm_head.", "embeddings.position_ids"),
)

_PADDING_ID = 1
"""Whatever config.json says: transformers computes positions with no other."""
_BIAS = RelativeBias(num_buckets=32, max_distance=128)
"""The only one that transformers computes."""


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(relative_attention_num_buckets=_BIAS.num_buckets)
    if fields.integer("relative_attention_num_buckets") != _BIAS.num_buckets:
        raise fields.refuse("relative_attention_num_buckets", f"must be {_BIAS.num_buckets}")
    arch = bert_like(architecture, fields, positions=learned_positions(fields, _PADDING_ID))
    return replace(arch, relative_bias=_BIAS)


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
