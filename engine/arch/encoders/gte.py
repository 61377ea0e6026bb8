"""GTE v1.5 and multilingual GTE: BERT with rope and a gated MLP. Their published configs call it `New`."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_base import bert_like, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope
from inferd.engine.arch.rotary import LinearScaling, Rope

NAMES = EncoderNames(
    prefixes=("new.", "gte."),
    qkv=("attention.qkv_proj",),
    o="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    has_up_first=True,
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    unread=("pooler.", "lm_head.", "embeddings.position_ids"),
)


def describe(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.with_defaults(max_position_embeddings=8192, position_embedding_type="rope", type_vocab_size=1)
    fields.choice("position_embedding_type", {"rope": None})
    fields.with_defaults(layer_norm_type="layer_norm").choice("layer_norm_type", {"layer_norm": None})
    for name in ("logn_attention_scale", "logn_attention_clip1"):
        if fields.boolean(name, default=False):
            raise fields.refuse(name, "must be false: it is not supported")
    arch = bert_like(
        architecture,
        fields,
        num_token_types=fields.integer("type_vocab_size", minimum=0),
        max_positions=fields.integer("max_position_embeddings"),
    )
    ropes = (_rope(fields, arch.head_dim),) * arch.num_layers
    return replace(arch, ropes=ropes, has_gate=True, has_up_bias=False)


def _rope(fields: Fields, head_dim: int) -> Rope:
    """A scaling `ntk` multiplies the base by its factor, for texts of any length, and divides frequencies by the
    factor's power 2 / head_dim."""
    section = fields.section("rope_scaling")
    if section is None or section.value("type") != "ntk":
        return read_rope(fields.with_defaults(rope_theta=160_000.0), head_dim)
    if section.has("mixed_b"):
        raise section.refuse("mixed_b", "must be absent or null: it is not supported")
    factor = section.positive("factor")
    return Rope(fields.positive("rope_theta") * factor, head_dim, LinearScaling(factor ** (2 / head_dim)))


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
