"""EuroBERT: the layers of a Llama whose tokens see all others."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.description import Activation
from inferd.engine.arch.encoder import Classifier, EncoderArch, HeadActivation, Pooling
from inferd.engine.arch.encoder_base import bert_like, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import max_positions, read_rope

NAMES = EncoderNames(
    prefixes=("model.",),
    embed="embed_tokens",
    layer="layers.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    attention_norm="input_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    final_norm="norm",
    classifier=("dense", "classifier"),
    unread=("lm_head.",),
)
_POOLINGS = {"bos": Pooling.FIRST, "mean": Pooling.MEAN, "late": Pooling.LATE}


def describe(architecture: str, fields: Fields) -> EncoderArch:
    num_heads, num_kv_heads = fields.heads()
    rope = read_rope(fields, fields.head_dim(num_heads))
    arch = bert_like(
        architecture,
        fields.with_defaults(hidden_act="silu"),
        max_positions=max_positions(fields, rope.scaling),
        activations={"silu": Activation.SILU},
        norm_eps="rms_norm_eps",
    )
    has_bias, has_mlp_bias = (fields.boolean(name, default=False) for name in ("attention_bias", "mlp_bias"))
    return replace(
        arch,
        num_kv_heads=num_kv_heads,
        ropes=(rope,) * arch.num_layers,
        has_pre_norms=True,
        has_embedding_norm=False,
        has_norm_bias=False,
        has_rms_norms=True,
        has_gate=True,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_up_bias=has_mlp_bias,
        has_down_bias=has_mlp_bias,
    )


def classifier(fields: Fields) -> Classifier:
    pooling = fields.renamed(clf_pooling="classifier_pooling").choice("classifier_pooling", _POOLINGS, default="late")
    return Classifier(num_labels(fields), HeadActivation.GELU_ERF, pooling)
