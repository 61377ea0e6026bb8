"""Nomic BERT: BERT with rope, a gated MLP and few biases. Its config has GPT-2's names of fields, or BERT's."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.description import Activation
from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_base import bert_like, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope

NAMES = EncoderNames(
    prefixes=("nomic_bert.", "bert."),
    embedding_norm="emb_ln",
    layer="encoder.layers.",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)

_ACTIVATIONS = {"silu": Activation.SILU, "swiglu": Activation.SILU}
_NOT_SUPPORTED = (
    "prenorm", "parallel_block", "causal", "use_rms_norm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias",
    "rotary_emb_interleaved", "rotary_emb_scale_base", "rotary_scaling_factor", "moe_every_n_layers",
)  # fmt: skip
"""Fields that are false, 0 or null in the models that are supported."""


def describe(architecture: str, fields: Fields) -> EncoderArch:
    for name in _NOT_SUPPORTED:
        if fields.value(name):
            raise fields.refuse(name, "is not supported and must be false, 0 or null")
    fields = fields.renamed(
        n_embd="hidden_size",
        n_inner="intermediate_size",
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
        n_positions="max_position_embeddings",
        activation_function="hidden_act",
        layer_norm_epsilon="layer_norm_eps",
        rotary_emb_base="rope_theta",
        rotary_emb_fraction="partial_rotary_factor",
    ).with_defaults(hidden_act="silu", max_position_embeddings=2048, rope_theta=1000.0, type_vocab_size=2)
    arch = bert_like(
        architecture,
        fields,
        num_token_types=fields.integer("type_vocab_size", minimum=0),
        max_positions=fields.integer("max_position_embeddings"),
        activations=_ACTIVATIONS,
    )
    return replace(
        arch,
        ropes=(read_rope(fields, arch.head_dim),) * arch.num_layers,
        has_gate=True,
        has_qkv_bias=False,
        has_o_bias=False,
        has_up_bias=False,
        has_down_bias=False,
    )


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
