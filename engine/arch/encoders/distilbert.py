"""DistilBERT: BERT without token types, with other names of fields and tensors."""

from __future__ import annotations

from inferd.engine.arch.encoder import Classifier, EncoderArch, HeadActivation
from inferd.engine.arch.encoder_base import bert_like, learned_positions, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

NAMES = EncoderNames(
    prefixes=("distilbert.",),
    layer="transformer.layer.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    o="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    classifier=("pre_classifier", "classifier"),
    unread=("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "embeddings.position_ids"),
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.renamed(
        dim="hidden_size",
        hidden_dim="intermediate_size",
        n_heads="num_attention_heads",
        n_layers="num_hidden_layers",
        activation="hidden_act",
    )
    return bert_like(architecture, fields, positions=learned_positions(fields))


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields), HeadActivation.RELU)
