"""The shapes in which every family is compared with transformers. To add a family, add a row.

Sequences are longer than the windows. Original contexts are shorter or longer than the sequences, and no multiplier is
one. So whatever a family does differently shows in its `broken` row.
"""

from __future__ import annotations

from tests.cpu.checkpoints import Case

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 0.5,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 4.5, 7.0],
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}

PROPORTIONAL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4}
GEMMA4_ROPES = {
    "full_attention": PROPORTIONAL_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 20,
    "final_logit_softcapping": 8.0,
    "rope_parameters": GEMMA4_ROPES,
}
OLMO3_ROPES = {
    "full_attention": YARN_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MINISTRAL3_ROPE = YARN_ROPE | {
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GRANITE = {
    "embedding_multiplier": 3.3,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CASES = (
    Case(
        "llama3, grouped heads, shards",
        "llama",
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        max_shard_size="100KB",
    ),
    Case(
        "llama, one kv head, biases",
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 0.1},
    ),
    Case(
        "llama 2, all heads, tied",
        "llama",
        {"num_key_value_heads": 8, "tie_word_embeddings": True},
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
    Case(
        "llama, head size of its own, linear rope",
        "llama",
        {"head_dim": 24, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    Case(
        "llama, yarn",
        "llama",
        {"head_dim": 16, "rope_parameters": YARN_ROPE},
        {"rope_parameters": YARN_ROPE | {"attention_factor": 1.0}},
    ),
    Case(
        "mistral, window",
        "mistral",
        {"head_dim": 16, "sliding_window": 20},
        {"sliding_window": 21},
    ),
    Case(
        "ministral 3, queries that grow",
        "ministral3",
        {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE},
        {"rope_parameters": MINISTRAL3_ROPE | {"llama_4_scaling_beta": None}},
    ),
    Case(
        "qwen2, late windows, tied",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": True},
        {"sliding_window": 21},
    ),
    Case(
        "qwen3, tied",
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    Case(
        "qwen3, biases, late windows",
        "qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
        {"sliding_window": 21},
    ),
    Case(
        "gemma 2",
        "gemma2",
        {
            "hidden_size": 96,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
        },
        {"attn_logit_softcapping": 7.0},
    ),
    Case(
        "gemma 3, tied",
        "gemma3_text",
        {
            "hidden_size": 96,
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": GEMMA3_ROPES,
        },
        {"rope_parameters": GEMMA3_ROPES | {"sliding_attention": GEMMA3_ROPES["full_attention"]}},
        embedding_std=0.02,
    ),
    Case(
        "gemma 4, k is v in wide layers",
        "gemma4_text",
        GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
        },
        {"rope_parameters": GEMMA4_ROPES | {"full_attention": PROPORTIONAL_ROPE | {"partial_rotary_factor": 0.5}}},
        embedding_std=0.02,
    ),
    Case(
        "gemma 4, inputs of layers, shared k and v",
        "gemma4_text",
        GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 211,
        },
        {"sliding_window": 21},
        embedding_std=0.02,
    ),
    Case(
        "gemma 4, experts beside an MLP",
        "gemma4_text",
        GEMMA4
        | {
            "layer_types": [*MIXED_LAYERS[:2], "full_attention"],
            "num_global_key_value_heads": 2,
            "num_key_value_heads": 4,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "top_k_experts": 5,
        },
        {"top_k_experts": 1},
        embedding_std=0.02,
    ),
    Case(
        "phi 3, short factors, window",
        "phi3",
        {
            "hidden_size": 128,
            "sliding_window": 20,
            "original_max_position_embeddings": 256,
            "rope_parameters": LONG_ROPE,
        },
        {"rope_parameters": LONG_ROPE | {"short_factor": LONG_ROPE["long_factor"]}},
        max_positions=256,
    ),
    Case(
        "phi 3, long factors",
        "phi3",
        {"hidden_size": 128, "original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE},
        {"rope_parameters": LONG_ROPE | {"long_factor": LONG_ROPE["short_factor"]}},
    ),
    Case("olmo 2", "olmo2", {}, {"rms_norm_eps": 0.1}),
    Case(
        "olmo 3",
        "olmo3",
        {"sliding_window": 20, "layer_types": MIXED_LAYERS, "rope_parameters": OLMO3_ROPES},
        {"rope_parameters": OLMO3_ROPES | {"sliding_attention": YARN_ROPE}},
    ),
    Case(
        "exaone 4, no rope without a window",
        "exaone4",
        {"sliding_window": 20, "layer_types": MIXED_LAYERS},
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 512},
    ),
    Case(
        "seed-oss, bias of o",
        "seed_oss",
        {"head_dim": 16, "attention_out_bias": True},
        {"rms_norm_eps": 0.1},
    ),
    Case(
        "glm 4, half of a head turns",
        "glm4",
        {"head_dim": 16, "rope_parameters": GLM_ROPE},
        {"rope_parameters": GLM_ROPE | {"partial_rotary_factor": 0.75}},
    ),
    Case("glm, no biases", "glm", {"head_dim": 16, "attention_bias": False}, {"rms_norm_eps": 0.1}),
    Case(
        "ernie 4.5, biases",
        "ernie4_5",
        {"head_dim": 16, "use_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    ),
    Case(
        "ernie 4.5 moe, every second layer",
        "ernie4_5_moe",
        {
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
            "moe_intermediate_size": 40,
            "moe_num_experts": 6,
            "moe_k": 2,
        },
        {"moe_k": 1},
    ),
    Case(
        "smollm3, window where there is no rope",
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 20},
        {"no_rope_layers": [1, 1, 1]},
    ),
    Case("granite", "granite", GRANITE, {"residual_multiplier": 0.8}),
    Case(
        "granite 4, attention alone",
        "granitemoehybrid",
        {
            **GRANITE,
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 88,
            "position_embedding_type": "rope",
        },
        {"position_embedding_type": "nope"},
    ),
    Case(
        "mixtral, window",
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20},
        {"num_experts_per_tok": 1},
    ),
    Case(
        "gpt-oss",
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "sliding_window": 20,
            "swiglu_limit": 0.7,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
        {"rope_parameters": YARN_ROPE | {"truncate": True}},
    ),
    Case(
        "minimax m2, rope in half of a head",
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": GLM_ROPE},
        {"rope_parameters": GLM_ROPE | {"partial_rotary_factor": 0.25}},
    ),
    Case("olmoe", "olmoe", {"num_experts": 12, "num_experts_per_tok": 3}, {"norm_topk_prob": True}),
    Case(
        "qwen2 moe, shared expert",
        "qwen2_moe",
        {
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
        {"sliding_window": 21},
    ),
    Case(
        "qwen3 moe, an MLP between experts",
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        {"norm_topk_prob": False},
    ),
    Case(
        "glm 4.5, groups of experts behind an MLP",
        "glm4_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": GLM_ROPE,
            "moe_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
        },
        {"topk_group": 4},
    ),
    Case(
        "starcoder2, window",
        "starcoder2",
        {"sliding_window": 20, "tie_word_embeddings": False},
        {"sliding_window": 21},
    ),
)

QWEN35_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e3,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
QWEN35 = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "rope_parameters": QWEN35_ROPE,
}
GRANITE4 = {
    **GRANITE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "shared_intermediate_size": 88,
    "intermediate_size": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
HYBRIDS = (
    Case(
        "qwen 3.5",
        "qwen3_5_text",
        QWEN35,
        {"rope_parameters": QWEN35_ROPE | {"partial_rotary_factor": 0.5}},
    ),
    Case(
        "qwen 3.5 moe",
        "qwen3_5_moe_text",
        QWEN35
        | {
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
            "num_experts": 8,
            "num_experts_per_tok": 5,
        },
        {"num_experts_per_tok": 1},
    ),
    Case(
        "qwen3 next, an MLP",
        "qwen3_next",
        QWEN35
        | {
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
            "num_experts": 8,
            "num_experts_per_tok": 5,
            "mlp_only_layers": [1],
            "rope_parameters": GLM_ROPE,
        },
        {"num_experts_per_tok": 1},
    ),
    Case(
        "lfm2, biases",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 40,
        },
        {"norm_eps": 0.1},
    ),
    Case(
        "lfm2 moe",
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.3,
        },
        {"num_experts_per_tok": 1},
    ),
    Case("granite 4, experts", "granitemoehybrid", GRANITE4, {"position_embedding_type": "rope"}),
    Case(
        "granite 4, biases",
        "granitemoehybrid",
        GRANITE4 | {"num_local_experts": 0, "mamba_proj_bias": True, "mamba_conv_bias": False},
        {"rms_norm_eps": 0.1},
    ),
)
"""Models with recurrent layers, which ranks cannot share."""
