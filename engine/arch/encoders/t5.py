"""The encoder of T5 alone: sentence-t5, GTR and Instructor. RMS norms before attention and MLP, none behind the
embedding, scores that are not scaled, and a learned bias by distance (Raffel et al. 2019, arXiv:1910.10683)."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.description import Activation
from inferd.engine.arch.encoder import EncoderArch, RelativeBias
from inferd.engine.arch.encoder_base import bert_like
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields

_ATTENTION, _MLP = "layer.0.SelfAttention.", "layer.1.DenseReluDense."
NAMES = EncoderNames(
    prefixes=("transformer.",),
    embed="shared",
    relative_bias=f"encoder.block.0.{_ATTENTION}relative_attention_bias",
    layer="encoder.block.",
    qkv=(f"{_ATTENTION}q", f"{_ATTENTION}k", f"{_ATTENTION}v"),
    o=f"{_ATTENTION}o",
    attention_norm="layer.0.layer_norm",
    up=(f"{_MLP}wi",),
    gate_up=(f"{_MLP}wi_0", f"{_MLP}wi_1"),
    down=f"{_MLP}wo",
    mlp_norm="layer.1.layer_norm",
    final_norm="encoder.final_layer_norm",
    unread=("encoder.embed_tokens.", "decoder.", "lm_head."),
)
_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gated-gelu": Activation.GELU_TANH,
    "gated-silu": Activation.SILU,
}


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(
        d_kv=64,
        layer_norm_epsilon=1e-6,
        n_positions=512,
        feed_forward_proj="relu",
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
    )
    fields = fields.renamed(
        d_model="hidden_size",
        d_ff="intermediate_size",
        d_kv="head_dim",
        num_heads="num_attention_heads",
        num_layers="num_hidden_layers",
    )
    arch = bert_like(
        architecture,
        fields,
        max_positions=fields.integer("n_positions"),
        activation="feed_forward_proj",
        activations=_ACTIVATIONS,
        norm_eps="layer_norm_epsilon",
    )
    buckets = fields.integer("relative_attention_num_buckets", minimum=4)
    return replace(
        arch,
        relative_bias=RelativeBias(buckets, _max_distance(fields, buckets)),
        has_pre_norms=True,
        has_embedding_norm=False,
        has_norm_bias=False,
        has_rms_norms=True,
        scales_scores=False,
        has_gate=arch.activation is not Activation.RELU,
        has_qkv_bias=False,
        has_o_bias=False,
        has_up_bias=False,
        has_down_bias=False,
    )


def _max_distance(fields: Fields, num_buckets: int) -> int:
    found = fields.integer("relative_attention_max_distance", maximum=2**16)
    if num_buckets % 4 or found <= num_buckets // 4:
        rule = "must be above a quarter of relative_attention_num_buckets, which must be a multiple of 4"
        raise fields.refuse("relative_attention_max_distance", rule)
    return found
