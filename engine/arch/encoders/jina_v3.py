"""Jina's XLM-RoBERTa, with other names of tensors: jina-embeddings-v3, which has rope in place of positions, and
jina-reranker-v2. The published configs of both call it `XLMRoberta`, and transformers' own `JinaEmbeddingsV3`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_base import bert_like, num_labels
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.encoders import roberta
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope

NAMES = EncoderNames(
    prefixes=("roberta.",),
    embedding_norm="emb_ln",
    layer="encoder.layers.",
    qkv=("mixer.Wqkv",),
    o="mixer.out_proj",
    attention_norm="norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="norm2",
    classifier=("classifier.dense", "classifier.out_proj"),
    unread=("pooler.", "lm_head.", "embeddings.position_ids"),
)


def is_jinas(config: Mapping[str, Any]) -> bool:
    """Whether a config of XLM-RoBERTa is that of Jina's code."""
    return "use_flash_attn" in config or "lora_adaptations" in config


def describe(architecture: str, fields: Fields) -> EncoderArch:
    if fields.value("lora_adaptations"):
        rule = "must be empty: vectors need the adapter of a task, and adapters of encoders are not computed"
        raise fields.refuse("lora_adaptations", f"{rule}; merge one into the weights, or give another model")
    is_own = architecture.startswith("JinaEmbeddingsV3")
    fields = fields.with_defaults(position_embedding_type="rotary" if is_own else "absolute", type_vocab_size=1)
    if fields.choice("position_embedding_type", {"absolute": False, "rotary": True}):
        return _with_rope(architecture, fields)
    return roberta.describe(architecture, fields)


def _with_rope(architecture: str, fields: Fields) -> EncoderArch:
    fields = fields.renamed(rotary_emb_base="rope_theta").with_defaults(
        max_position_embeddings=8194, layer_norm_eps=1e-5, rope_theta=20_000.0
    )
    arch = bert_like(
        architecture,
        fields,
        num_token_types=fields.integer("type_vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
    )
    return replace(arch, ropes=(read_rope(fields, arch.head_dim),) * arch.num_layers)


def classifier(fields: Fields) -> Classifier:
    return Classifier(num_labels(fields))
