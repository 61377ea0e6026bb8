"""The architectures that are read from GGUF files: one row each says how its files differ from Llama's.

`dense`, `gemma4`, `experts` and `hybrids` have the fields of config.json that only some families have.
"""

from __future__ import annotations

from inferd.engine.arch.gguf.dense import (
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    granite,
    llama,
    mistral3,
    olmo2,
    phi3,
    starcoder2,
)
from inferd.engine.arch.gguf.experts import ernie4_5_moe, glm4_moe, gpt_oss, minimax_m2, olmoe, qwen2_moe, qwen3_moe
from inferd.engine.arch.gguf.gemma4 import gemma4
from inferd.engine.arch.gguf.hybrids import granite_hybrid, lfm2, lfm2_moe, qwen3_5, qwen3_5_moe, qwen3_next
from inferd.engine.arch.gguf.metadata import GgufFamily

_WINDOW = frozenset({"attention.sliding_window"})
_EXPERTS = frozenset({"expert_count"})
_CAP = frozenset({"final_logit_softcapping"})
_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_SOME_EXPERTS = frozenset({"expert_count", "leading_dense_block_count"})
_ROUTER = frozenset({"expert_gating_func", "expert_weights_scale"})
_SHARED = frozenset({"expert_shared_count"})
_MTP = frozenset({"nextn_predict_layers"})
_QWEN_MTP = {
    "": "mtp.layers.{mtp}.",
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head_norm": "mtp.norm",
}
_DEEPSEEK_MTP = {
    "": "model.layers.{layer}.",
    **{own: f"model.layers.{{layer}}.{own}" for own in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    "shared_head_norm": "model.layers.{layer}.shared_head.norm",
    "shared_head_head": "model.layers.{layer}.shared_head.head",
}
FAMILIES: dict[str, GgufFamily] = {
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", ernie4_5),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", ernie4_5_moe, reads=_SOME_EXPERTS | _SHARED),
    "exaone4": GgufFamily("Exaone4ForCausalLM", exaone4, reads=_WINDOW),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM", gemma2, norm_excess=1.0, reads=_WINDOW | _CAP | {"attn_logit_softcapping"}
    ),
    "gemma3": GgufFamily("Gemma3ForCausalLM", gemma3, norm_excess=1.0, reads=_WINDOW | _CAP),
    "gemma4": GgufFamily(
        "Gemma4ForCausalLM",
        gemma4,
        reads=_WINDOW | _CAP | _EXPERTS | {"attention.shared_kv_layers"},
    ),
    "glm4": GgufFamily("Glm4ForCausalLM", turns_part=True),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        glm4_moe,
        mlp_norm="post_attention_norm",
        turns_part=True,
        mtp=_DEEPSEEK_MTP,
        reads=_SOME_EXPERTS | _SHARED | _ROUTER | _MTP | {"expert_group_count"},
    ),
    "gpt-oss": GgufFamily("GptOssForCausalLM", gpt_oss, mlp_norm="post_attention_norm", reads=_WINDOW | _EXPERTS),
    "granite": GgufFamily("GraniteForCausalLM", granite, pairs_rows=True, reads=_SCALES),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", granite_hybrid, pairs_rows=True, reads=_SCALES | _EXPERTS
    ),
    "lfm2": GgufFamily("Lfm2ForCausalLM", lfm2),
    "lfm2moe": GgufFamily("Lfm2MoeForCausalLM", lfm2_moe, reads=_SOME_EXPERTS | _ROUTER),
    "llama": GgufFamily("LlamaForCausalLM", llama, pairs_rows=True, reads=_WINDOW | _EXPERTS),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM", minimax_m2, turns_part=True, reads=_EXPERTS | {"expert_gating_func"}
    ),
    "mistral3": GgufFamily(
        "Ministral3ForCausalLM", mistral3, pairs_rows=True, reads=frozenset({"attention.temperature_scale"})
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM", olmo2, reads=_WINDOW),
    "olmoe": GgufFamily("OlmoeForCausalLM", olmoe, reads=_EXPERTS),
    "phi3": GgufFamily("Phi3ForCausalLM", phi3, turns_part=True, reads=_WINDOW),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", qwen2_moe, reads=_EXPERTS),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen35": GgufFamily(
        "Qwen3_5ForCausalLM",
        qwen3_5,
        norm_excess=1.0,
        mlp_norm="post_attention_norm",
        turns_part=True,
        tiles_value_heads=True,
        mtp=_QWEN_MTP,
        reads=_MTP,
    ),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM",
        qwen3_5_moe,
        norm_excess=1.0,
        mlp_norm="post_attention_norm",
        turns_part=True,
        tiles_value_heads=True,
        mtp=_QWEN_MTP,
        reads=_EXPERTS | _MTP,
    ),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", qwen3_moe, reads=_EXPERTS),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM",
        qwen3_next,
        norm_excess=1.0,
        mlp_norm="post_attention_norm",
        turns_part=True,
        mtp=_QWEN_MTP,
        reads=_EXPERTS | _MTP,
    ),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM"),
    "qwen3vlmoe": GgufFamily("Qwen3MoeForCausalLM", qwen3_moe, reads=_EXPERTS),
    "seed_oss": GgufFamily("SeedOssForCausalLM", mlp_norm="post_attention_norm"),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", pairs_rows=True),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", starcoder2, reads=_WINDOW),
}
"""Architectures that are read, by their names in `general.architecture`."""
