"""DeBERTa v2 and v3: BERT whose attention also has keys and queries of distances. mxbai-rerank, and classifiers of
entailment and of prompts."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.encoder import Classifier, Disentangled, EncoderArch, HeadActivation
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(
    prefixes=("deberta.",),
    distances="encoder.rel_embeddings",
    distance_norm="encoder.LayerNorm",
    qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    unread=("pooler.", "cls.", "lm_predictions.", "mask_predictions.", "embeddings.position_ids"),
)

_KINDS = {"c2p", "p2c"}
"""Both ways in which distances count: keys of distances, and queries of them."""
_HEAD_ACTIVATIONS = {"gelu": HeadActivation.GELU_ERF, "tanh": HeadActivation.TANH, "relu": HeadActivation.RELU}


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(
        layer_norm_eps=1e-7, type_vocab_size=0, norm_rel_ebd="none", max_relative_positions=-1
    )
    _check(fields)
    positions = learned_positions(fields)
    num_buckets, most = fields.integer("position_buckets", default=-1, minimum=-1), positions.num_rows
    stated = fields.integer("max_relative_positions", minimum=-1)
    max_distance = stated if stated > 0 else most
    if num_buckets > 0 and not 2 <= num_buckets // 2 < max_distance - 1:
        raise fields.refuse("position_buckets", f"must be -1, or from 4 to below {2 * (max_distance - 1)}")
    arch = bert_like(
        architecture,
        fields,
        positions=positions if fields.boolean("position_biased_input", default=True) else None,
        num_token_types=fields.integer("type_vocab_size", minimum=0),
        max_positions=most,
    )
    return replace(
        arch,
        disentangled=Disentangled(
            num_buckets=num_buckets if num_buckets > 0 else max_distance,
            max_distance=max_distance if num_buckets > 0 else 0,
            has_norm="layer_norm" in (fields.value("norm_rel_ebd") or "").lower(),
        ),
    )


def _check(fields: Fields) -> None:
    if not fields.boolean("relative_attention", default=False) or not fields.boolean("share_att_key", default=False):
        raise fields.refuse("share_att_key", "must be true, as must relative_attention: others are not supported")
    kinds = fields.value("pos_att_type")
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or set(map(str, kinds)) != _KINDS:
        raise fields.refuse("pos_att_type", f"must be both of {', '.join(sorted(_KINDS))}")
    if fields.integer("conv_kernel_size", default=0, minimum=0):
        raise fields.refuse("conv_kernel_size", "must be 0: a convolution behind the first layer is not supported")
    if fields.integer("embedding_size", default=fields.integer("hidden_size")) != fields.integer("hidden_size"):
        raise fields.refuse("embedding_size", "must be hidden_size")
    if not isinstance(fields.value("norm_rel_ebd"), str):
        raise fields.refuse("norm_rel_ebd", "must be a text")


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields), fields.choice("pooler_hidden_act", _HEAD_ACTIVATIONS, default="gelu"))
