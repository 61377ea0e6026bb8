"""The shapes of models that are written as GGUF files.

They leave out what files cannot state: some windows and ropes by layer, an MLP between experts, and biases that
llama.cpp has no tensors for.
"""

from __future__ import annotations

import dataclasses

from tests.cpu.cases import CASES as ALL
from tests.cpu.cases import (
    GEMMA3_ROPES,
    GLM_ROPE,
    GRANITE4,
    LLAMA3_ROPE,
    LONG_ROPE,
    MINISTRAL3_ROPE,
    MIXED_LAYERS,
    OLMO3_ROPES,
    QWEN35,
    YARN_ROPE,
)
from tests.cpu.checkpoints import Case

CASES = (
    Case("llama, all heads, tied", "llama", {"tie_word_embeddings": True}),
    Case("llama, biases", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    Case("llama 3", "llama", {"rope_parameters": LLAMA3_ROPE}),
    Case("llama, linear rope", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    Case("llama, yarn", "llama", {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    Case("mistral, window", "mistral", {"head_dim": 16, "sliding_window": 20}),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", "qwen3", {"head_dim": 16}),
    Case(
        "olmo 3",
        "olmo3",
        {"sliding_window": 20, "layer_types": MIXED_LAYERS, "rope_parameters": OLMO3_ROPES},
    ),
    Case("exaone 4, windows in three of four layers", "exaone4", {"sliding_window": 20, "num_hidden_layers": 4}),
    Case("exaone 4, no window", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    Case("seed-oss", "seed_oss", {"head_dim": 16}),
    Case(
        "gemma 2",
        "gemma2",
        {"hidden_size": 96, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "tie_word_embeddings": True},
    ),
    Case(
        "gemma 3",
        "gemma3_text",
        {"hidden_size": 96, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20, "num_hidden_layers": 7,
         "rope_parameters": {
             **GEMMA3_ROPES, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
         }},
        embedding_std=0.02,
    ),
    Case(
        "phi 3, long factors",
        "phi3",
        {"hidden_size": 128, "original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE},
    ),
    Case("phi 3, window", "phi3", {"hidden_size": 128, "sliding_window": 20}),
    Case("mixtral", "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    Case("olmo 2", "olmo2", {}),
    Case("olmoe", "olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    Case(
        "qwen3 moe",
        "qwen3_moe",
        {"head_dim": 16, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2,
         "norm_topk_prob": True},
    ),
    Case("smollm3", "smollm3", {"num_hidden_layers": 5}),
    Case(
        "gpt-oss",
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20,
         "rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
    Case(
        "granite",
        "granite",
        {"embedding_multiplier": 3.5, "attention_multiplier": 0.25, "residual_multiplier": 0.75,
         "logits_scaling": 1.5},
    ),
    Case("starcoder2, window", "starcoder2", {"sliding_window": 20}),
    Case("exaone 4, windows by a list", "exaone4", {"sliding_window": 20, "layer_types": MIXED_LAYERS}),
    Case("ministral 3", "ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE}),
    Case("glm 4", "glm4", {"head_dim": 16, "rope_parameters": GLM_ROPE}),
    Case(
        "glm 4.5",
        "glm4_moe",
        {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "rope_parameters": GLM_ROPE,
         "moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
         "n_shared_experts": 2, "routed_scaling_factor": 1.7},
    ),
    Case("ernie 4.5", "ernie4_5", {"head_dim": 16}),
    Case(
        "ernie 4.5 moe, every second layer",
        "ernie4_5_moe",
        {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_intermediate_size": 40, "moe_num_experts": 6,
         "moe_k": 2},
    ),
    Case(
        "qwen2 moe",
        "qwen2_moe",
        {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "num_experts": 6,
         "num_experts_per_tok": 2},
    ),
    Case(
        "minimax m2",
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": GLM_ROPE},
    ),
    *(case for case in ALL if case.model_type == "gemma4_text"),
)  # fmt: skip

_EXPERTS = {
    "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "num_experts": 8, "num_experts_per_tok": 5
}  # fmt: skip
_LFM2 = {"layer_types": ["conv", "full_attention", "conv"]}
HYBRIDS = (
    Case("qwen 3.5", "qwen3_5_text", QWEN35),
    Case("qwen 3.5 moe", "qwen3_5_moe_text", QWEN35 | _EXPERTS),
    Case("qwen3 next", "qwen3_next", QWEN35 | _EXPERTS | {"rope_parameters": GLM_ROPE}),
    Case("lfm2", "lfm2", _LFM2 | {"conv_L_cache": 4, "block_multiple_of": 40}),
    Case(
        "lfm2 moe",
        "lfm2_moe",
        _LFM2 | {"num_dense_layers": 2, "num_experts": 8, "num_experts_per_tok": 5, "moe_intermediate_size": 40},
    ),
    Case("granite 4, experts", "granitemoehybrid", GRANITE4),
    Case("granite 4", "granitemoehybrid", GRANITE4 | {"num_local_experts": 0}),
)
"""Models with recurrent layers. Some of their values are stored as an exponential, which rounds."""


def with_value_heads(case: Case, size: int) -> Case:
    """A Qwen 3.5 whose value heads have this size."""
    return dataclasses.replace(case, config={**case.config, "linear_value_head_dim": size})
