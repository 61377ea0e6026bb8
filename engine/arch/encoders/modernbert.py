"""ModernBERT: norms before attention and MLP, rope, a gated MLP, few biases, and windows in most layers."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.description import Activation
from inferd.engine.arch.encoder import Classifier, EncoderArch, HeadActivation, Pooling
from inferd.engine.arch.encoder_base import ACTIVATIONS, bert_like, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import ropes_by_layer_type
from inferd.engine.arch.windows import windowed_layers

NAMES = EncoderNames(
    prefixes=("model.",),
    embed="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
    classifier=("head.dense", "classifier"),
    classifier_norm="head.norm",
    unread=("head.", "decoder."),
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(
        max_position_embeddings=8192,
        norm_eps=1e-5,
        local_attention=128,
        global_attn_every_n_layers=3,
        global_rope_theta=160_000.0,
        local_rope_theta=10_000.0,
    )
    arch = bert_like(
        architecture,
        fields,
        max_positions=fields.integer("max_position_embeddings"),
        activation="hidden_activation",
        activations={**ACTIVATIONS, "silu": Activation.SILU},
        norm_eps="norm_eps",
    )
    every = fields.integer("global_attn_every_n_layers")
    windowed = windowed_layers(fields, arch.num_layers, default=lambda layer: layer % every != 0)
    full, local = ropes_by_layer_type(
        fields, arch.head_dim, fields.positive("global_rope_theta"), fields.positive("local_rope_theta")
    )
    window = fields.integer("local_attention", minimum=2) // 2
    has_attention_bias = fields.boolean("attention_bias", default=False)
    has_mlp_bias = fields.boolean("mlp_bias", default=False)
    return replace(
        arch,
        ropes=tuple(local if is_windowed else full for is_windowed in windowed),
        windows=tuple(window if is_windowed else None for is_windowed in windowed),
        has_pre_norms=True,
        has_norm_bias=fields.boolean("norm_bias", default=False),
        has_gate=True,
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
        has_up_bias=has_mlp_bias,
        has_down_bias=has_mlp_bias,
    )


def classifier(fields: Fields) -> Classifier:
    fields = fields.with_defaults(classifier_activation="gelu", classifier_pooling="cls")
    fields.choice("classifier_activation", {"gelu": None})
    return Classifier(
        num_labels(fields),
        HeadActivation.GELU_ERF,
        fields.choice("classifier_pooling", {"cls": Pooling.FIRST, "mean": Pooling.MEAN}),
        has_dense_bias=fields.boolean("classifier_bias", default=False),
        has_norm=True,
    )
