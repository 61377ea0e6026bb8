"""The `Arch` of each family's published config, as its repository spells it, without fields that have their default."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.memory.planner import weight_lines
from inferd.engine.api.memory.precision import Precision
from inferd.engine.arch.description import Activation, Arch, ArchError, Experts, GateLimit, NormKind, QKNorm
from inferd.engine.arch.heads import CacheGroup, Heads
from inferd.engine.arch.recurrent import GatedDelta, Mamba2, ShortConv
from inferd.engine.arch.registry import describe, is_body, known_architectures
from inferd.engine.arch.registry import weights as weights_of
from inferd.engine.arch.rotary import LinearScaling, Llama3Scaling, ProportionalScaling, QueryGrowth, Rope, YarnScaling
from inferd.engine.arch.sharding import counts_of, refuses
from inferd.engine.arch.weights import ByKeyHead, Neighbours, WeightMap

GRANITE4_LAYERS = ["mamba" if layer not in (5, 15, 25, 35) else "attention" for layer in range(40)]

MODELS = Path(__file__).parents[2] / "docs" / "models.md"
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Mistral-7B-v0.1": (
        {"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000},
        7_241_732_096,
    ),
    "MiMo-7B-RL": (
        {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
         "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 32768, "max_window_layers": 32,
         "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
         "rms_norm_eps": 1e-5, "rope_theta": 640000, "sliding_window": 32768, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151680},
        7_622_619_136,  # without its MTP layer
    ),
    "Qwen2.5-0.5B": (
        {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
         "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
         "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "use_sliding_window": False, "vocab_size": 151936},
        494_032_768,
    ),
    "Qwen3.5-0.8B": (
        {"architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "full_attention_interval": 4,
         "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
         "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
         "linear_num_value_heads": 16, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
         "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
         "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                             "rope_theta": 10000000, "rope_type": "default"},
         "tie_word_embeddings": True, "dtype": "bfloat16", "vocab_size": 248320},
        752_393_024,
    ),
    "gemma-2-2b": (
        {"architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
         "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
         "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
         "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000},
        2_614_341_888,
    ),
    "gemma-3-1b-it": (
        {"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
         "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
         "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
         "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
         "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None,
         "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
         "vocab_size": 262144},
        999_885_952,
    ),
    "gemma-4-31B, text alone": (
        {"architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_k_eq_v": True, "dtype": "bfloat16",
         "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0,
         "intermediate_size": 21504, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
         "max_position_embeddings": 262144, "num_attention_heads": 32, "num_global_key_value_heads": 4,
         "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6,
         "rope_parameters": {
             "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
             "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
         "sliding_window": 1024, "tie_word_embeddings": True, "use_bidirectional_attention": "vision",
         "vocab_size": 262144},
        30_697_345_340,
    ),
    "gemma-4-E2B, text alone": (
        {"architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": False, "dtype": "bfloat16",
         "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
         "intermediate_size": 6144, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
         "max_position_embeddings": 131072, "num_attention_heads": 8, "num_global_key_value_heads": None,
         "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-6,
         "sliding_window": 512, "tie_word_embeddings": True, "use_bidirectional_attention": None,
         "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144},
        4_628_569_379,
    ),
    "gemma-4-26B-A4B, text alone": (
        {"architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": True, "dtype": "bfloat16",
         "enable_moe_block": True, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816, "hidden_size_per_layer_input": 0,
         "intermediate_size": 2112, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
         "max_position_embeddings": 262144, "moe_intermediate_size": 704, "num_attention_heads": 16,
         "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
         "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024, "tie_word_embeddings": True,
         "top_k_experts": 8, "use_bidirectional_attention": "vision", "vocab_size": 262144},
        25_233_141_790,
    ),
    "Phi-3-mini-4k-instruct": (
        {"architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
         "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16", "vocab_size": 32064},
        3_821_079_552,
    ),
    "Phi-4-mini-instruct": (
        {"architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
         "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
         "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5,
         "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
         "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "vocab_size": 200064},
        3_836_021_760,
    ),
    "gpt-oss-20b": (
        {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
         "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
         "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
         "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
         "num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-5,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                          "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
         "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
         "vocab_size": 201088},
        20_914_757_184,
    ),
    "OLMo-2-1124-7B": (
        {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_scaling": None,
         "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100352},
        7_298_617_344,
    ),
    "Olmo-3-7B-Instruct": (
        {"architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 11008, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
         "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
         "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                          "original_max_position_embeddings": 8192, "rope_type": "yarn"},
         "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "dtype": "bfloat16",
         "vocab_size": 100278},
        7_298_011_136,
    ),
    "EXAONE-4.0-32B": (
        {"architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
         "intermediate_size": 27392, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
         "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
         "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
         "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 102400},
        32_003_216_384,
    ),
    "Seed-OSS-36B-Instruct": (
        {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False,
         "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648,
         "max_position_embeddings": 524288, "mlp_bias": False, "num_attention_heads": 80, "num_hidden_layers": 64,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"},
         "rope_theta": 10000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 155136},
        36_151_104_512,
    ),
    "GLM-4-9B-0414": (
        {"architectures": ["Glm4ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
         "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151552},
        9_400_279_040,
    ),
    "ERNIE-4.5-21B-A3B-PT": (
        {"architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 2560,
         "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "moe_k": 6,
         "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
         "moe_num_shared_experts": 2, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "use_bias": False, "vocab_size": 103424},
        21_825_437_888,
    ),
    "GLM-4.5-Air": (
        {"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
         "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
         "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
         "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
         "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
         "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
         "torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 151552},
        106_852_251_264,  # without its MTP layer
    ),
    "glm-4-9b-chat-hf": (
        {"architectures": ["GlmForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
         "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 131072,
         "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
         "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "vocab_size": 151552},
        9_399_951_360,
    ),
    "ERNIE-4.5-0.3B-PT": (
        {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
         "intermediate_size": 3072, "max_position_embeddings": 131072, "num_attention_heads": 16,
         "num_hidden_layers": 18, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "vocab_size": 103424},
        360_748_032,
    ),
    "Ministral-3-8B-Base-2512": (
        {"architectures": ["Ministral3ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 262144, "num_attention_heads": 32,
         "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
         "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
                             "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                             "rope_theta": 1000000.0, "rope_type": "yarn"},
         "sliding_window": None, "tie_word_embeddings": False, "dtype": "bfloat16", "vocab_size": 131072},
        8_489_553_920,
    ),
    "SmolLM3-3B": (
        {"architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
         "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
         "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
         "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
         "use_sliding_window": False, "vocab_size": 128256},
        3_075_098_624,
    ),
    "granite-3.1-2b-instruct": (
        {"architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
         "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
         "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
         "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
         "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "vocab_size": 49155},
        2_533_531_648,
    ),
    "Mixtral-8x7B-v0.1": (
        {"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16", "vocab_size": 32000},
        46_702_792_704,
    ),
    "MiniMax-M2": (
        {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
         "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48,
         "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
         "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64,
         "scoring_func": "sigmoid", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 200064},
        228_689_764_864,  # and 13,880,064 scales in FP8
    ),
    "OLMoE-1B-7B-0924": (
        {"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "hidden_act": "silu",
         "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False,
         "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
         "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 50304},
        6_919_161_856,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
         "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
         "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936},
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
         "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
         "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
         "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
         "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
         "vocab_size": 151936},
        30_532_122_624,
    ),
    "Qwen3-Next-80B-A3B-Instruct": (
        {"architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
         "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
         "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
         "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
         "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
         "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
         "rope_scaling": None, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936},
        79_674_391_296,  # without its MTP layer
    ),
    "Qwen3.5-35B-A3B": (
        {"architectures": ["Qwen3_5MoeForCausalLM"], "attention_bias": False, "full_attention_interval": 4,
         "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "linear_conv_kernel_dim": 4,
         "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "linear_value_head_dim": 128, "max_position_embeddings": 262144, "moe_intermediate_size": 512,
         "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
         "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
         "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                             "rope_theta": 10000000, "rope_type": "default"},
         "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "dtype": "bfloat16",
         "vocab_size": 248320},
        34_660_610_688,
    ),
    "granite-4.0-h-tiny": (
        {"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
         "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512,
         "layer_types": GRANITE4_LAYERS, "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True,
         "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
         "mamba_n_heads": 48, "mamba_proj_bias": False, "max_position_embeddings": 131072, "num_attention_heads": 12,
         "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64,
         "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 10000,
         "shared_intermediate_size": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "vocab_size": 100352},
        6_939_037_248,
    ),
    "LFM2-1.2B": (
        {"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
         "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_use_swiglu": True,
         "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
         "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 32, "num_hidden_layers": 16,
         "num_key_value_heads": 8, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "vocab_size": 65536},
        1_170_340_608,
    ),
    "LFM2-8B-A1B": (
        {"architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16",
         "hidden_size": 2048, "intermediate_size": 7168,
         "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
         "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_eps": 1e-5, "norm_topk_prob": True,
         "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
         "num_hidden_layers": 24, "num_key_value_heads": 8, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
         "tie_embedding": True, "use_expert_bias": True, "vocab_size": 65536},
        8_339_930_560,
    ),
    "starcoder2-3b": (
        {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072,
         "intermediate_size": 12288, "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-5,
         "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
         "rope_theta": 999999.4420358813, "sliding_window": 4096, "torch_dtype": "float32", "use_bias": True,
         "vocab_size": 49152},
        3_030_371_328,
    ),
}  # fmt: skip


LIMIT = GateLimit(7.0, 1.702)


def arch_of(name: str, **changes: Any) -> Arch:
    """The `Arch` of the published config with fields set, or removed if the value is `...`."""
    config = PUBLISHED[name][0] | changes
    return describe({field: value for field, value in config.items() if value is not ...})


@functools.cache
def weights(arch: Arch) -> WeightMap:
    """Each only once, because a model with hundreds of experts has tens of thousands of tensors."""
    return weights_of(arch)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert weights(arch_of(name)).num_elements == PUBLISHED[name][1]


def test_no_family_is_left_out() -> None:
    found = {config["architectures"][0] for config, _ in PUBLISHED.values()}
    assert found | {"LlamaForCausalLM", "Qwen3ForCausalLM"} == set(known_architectures())


def test_the_table_in_the_docs_says_which_families_ranks_can_share() -> None:
    rows = [line.split(" | ") for line in MODELS.read_text().splitlines() if "ForCausalLM`" in line and line[0] == "|"]
    said = {name: row[3].startswith("yes") for row in rows for name in re.findall(r"`(\w+ForCausalLM)`", row[1])}
    shared = {config["architectures"][0]: refuses(describe(config), 2) is None for config, _ in PUBLISHED.values()}
    assert {name: said[name] for name in shared} == shared
    assert said.keys() == {name for name in known_architectures() if name.endswith("ForCausalLM")}


def test_mistral() -> None:
    assert arch_of("Mistral-7B-v0.1").windows == (4096,) * 32
    assert arch_of("Mistral-7B-v0.1", sliding_window=None).windows == (None,) * 32
    assert arch_of("Mistral-7B-v0.1", sliding_window=...).windows == (4096,) * 32
    with pytest.raises(ArchError, match="layer_types is not supported in this family"):
        arch_of("Mistral-7B-v0.1", layer_types=["full_attention"] * 32)


def test_qwen2() -> None:
    arch = arch_of("Qwen2.5-0.5B")
    assert (arch.has_qkv_bias, arch.has_o_bias, arch.has_mlp_bias, arch.qk_norm) == (True, False, False, QKNorm.NONE)
    assert arch.windows == (None,) * 24
    arch = arch_of("Qwen2.5-0.5B", use_sliding_window=True, sliding_window=1024, max_window_layers=20)
    assert arch.windows == (None,) * 20 + (1024,) * 4


def test_qwen3_5() -> None:
    arch = arch_of("Qwen3.5-0.8B")
    assert arch.attention_layers == (3, 7, 11, 15, 19, 23) and len(arch.recurrent_layers) == 18
    assert arch.recurrent == GatedDelta(16, 16, 128, 128, 4)
    assert (arch.has_output_gate, arch.qk_norm, arch.norm) == (True, QKNorm.HEAD, NormKind.RMS_ONE_PLUS)
    assert arch.ropes[3] == Rope(1e7, 64)
    assert arch.cache_groups == (CacheGroup(None, (3, 7, 11, 15, 19, 23)),)
    types = ["linear_attention", "full_attention"] * 12
    assert arch_of("Qwen3.5-0.8B", layer_types=types).attention_layers == tuple(range(1, 24, 2))
    assert arch_of("Qwen3.5-0.8B", linear_num_value_heads=...).recurrent == GatedDelta(16, 32, 128, 128, 4)
    with pytest.raises(ArchError, match="must name full_attention at least once"):
        arch_of("Qwen3.5-0.8B", layer_types=["linear_attention"] * 24)
    with pytest.raises(ArchError, match="linear_num_value_heads must be a multiple of linear_num_key_heads"):
        arch_of("Qwen3.5-0.8B", linear_num_value_heads=24)


GEMMA4, GEMMA4_E2B = "gemma-4-31B, text alone", "gemma-4-E2B, text alone"


def test_gemma4() -> None:
    arch, wide, local = arch_of(GEMMA4), Heads(32, 4, 512, has_v=False), Heads(32, 16, 256)
    assert arch.layer_heads == ((local,) * 5 + (wide,)) * 10
    assert arch.windows == ((1024,) * 5 + (None,)) * 10
    assert set(arch.ropes) == {Rope(1e6, 512, ProportionalScaling(64, 1.0)), Rope(1e4, 256)}
    assert (arch.attention_scale, arch.final_softcap, arch.norm) == (1.0, 30.0, NormKind.RMS)
    # Two wide layers have the K and V of one other, so no plane is left unused.
    assert [(group.window, len(group.layers), group.num_planes) for group in arch.cache_groups] == [
        (None, 10, 5), *[(1024, 5, 5)] * 10
    ]  # fmt: skip
    assert arch_of(GEMMA4, layer_types=..., rope_parameters=..., global_head_dim=..., head_dim=...) == arch
    written = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    assert arch_of(GEMMA4, num_global_key_value_heads=..., per_layer_config=written) == arch
    assert arch_of(GEMMA4, attention_k_eq_v=False).heads(5) == Heads(32, 16, 512)
    assert counts_of(arch) == (1, 2, 4)
    assert "8 ranks would have heads of K and V of some layers twice" in str(refuses(arch, 8))


def test_gemma4_with_inputs_of_layers() -> None:
    arch = arch_of(GEMMA4_E2B)
    assert (arch.kv_layers, arch.layer_input_size) == (tuple(range(15)), 256)
    assert [arch.heads(layer).kv_layer for layer in (14, 15, 19, 34)] == [None, 13, 14, 14]
    assert {arch.mlp_size(layer) for layer in range(15)} == {6144}
    assert {arch.mlp_size(layer) for layer in range(15, 35)} == {12288}
    assert counts_of(arch) == (1, 2, 4, 8)
    # K and V of a full layer are as large as those of two others, and no plane is left unused.
    assert [(group.window, len(group.layers), group.num_planes) for group in arch.cache_groups] == [
        (None, 3, 3), (512, 6, 3), (512, 6, 3)
    ]  # fmt: skip


def test_gemma4_with_experts() -> None:
    arch = arch_of("gemma-4-26B-A4B, text alone")
    assert arch.experts == Experts(128, 8, 704, True, tuple(range(30)), beside_mlp=True)
    assert all(arch.has_experts(layer) and arch.has_mlp(layer) for layer in range(30))
    # Five full layers have the K and V of two and a half others.
    assert [(group.window, len(group.layers), group.num_planes) for group in arch.cache_groups] == [
        (None, 5, 3), *[(1024, 3, 3)] * 8, (1024, 1, 1)
    ]  # fmt: skip
    with pytest.raises(ArchError, match=r"top_k_experts must be at most num_experts \(128\), but it is 129"):
        arch_of("gemma-4-26B-A4B, text alone", top_k_experts=129)
    with pytest.raises(ArchError, match=r"config\.json lacks num_experts"):
        arch_of("gemma-4-26B-A4B, text alone", num_experts=None)


def test_tensors_of_gemma4_that_contradict_its_config() -> None:
    """Layers that read the K and V of others may be stored with projections that nobody reads."""
    found = weights(arch_of(GEMMA4_E2B))
    shapes = {source.tensor: source.shape for source in found.sources}
    assert not found.compare({**shapes, "model.layers.20.self_attn.k_proj.weight": (256, 1536)})
    layer = "model.layers.4"
    shapes[f"{layer}.self_attn.q_norm.weight"] = (256,)
    shapes[f"{layer}.self_attn.v_norm.weight"] = (512,)
    del shapes[f"{layer}.per_layer_input_gate.weight"]
    assert str(found.compare(shapes)) == (
        f"1 missing: {layer}.per_layer_input_gate.weight; 1 unexpected: {layer}.self_attn.v_norm.weight; "
        f"1 of another shape: {layer}.self_attn.q_norm.weight is [256], by config.json [512]"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, 'must be null or "vision": a token of text sees no later one'),
        ({"layer_types": ["full_attention"] * 59 + ["sliding_attention"]}, "layer_types must end with full_attention"),
        ({"num_global_key_value_heads": 5}, "num_attention_heads must be divided by the KV heads of every layer, of"),
        ({"global_head_dim": 100}, "head_dim and global_head_dim must be multiples of 32, but one is 100"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "5 must set head_dim and num_key_value_heads alone"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "must give all layers of a type in layer_types the same"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must hold sliding_attention"),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}},
            "partial_rotary_factor must be 1 unless rope_type is proportional",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "proportional", "rope_theta": 1e4,
                                                       "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor must turn 1 to 128 pairs of elements",
        ),
        ({"num_kv_shared_layers": 55}, "num_kv_shared_layers must leave a layer of each type in layer_types before"),
        ({"num_kv_shared_layers": 61}, "num_kv_shared_layers must leave a layer of each type in layer_types before"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "must be vocab_size .262144., but it"),
    ],
)  # fmt: skip
def test_gemma4_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch_of(GEMMA4, **changes)


def test_gemma2() -> None:
    arch = arch_of("gemma-2-2b")
    assert arch.windows == (4096, None) * 13
    assert (arch.attention_softcap, arch.final_softcap, arch.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (arch.activation, arch.norm, arch.tie_embeddings) == (Activation.GELU_TANH, NormKind.RMS_ONE_PLUS, True)
    assert (arch.has_pre_norms, arch.has_post_norms, arch.embedding_multiplier) == (True, True, 48.0)
    bare = arch_of("gemma-2-2b", attn_logit_softcapping=..., final_logit_softcapping=..., hidden_activation=...)
    assert bare == arch
    assert arch_of("gemma-2-2b", attn_logit_softcapping=None).attention_softcap is None
    with pytest.raises(ArchError, match="use_bidirectional_attention must be false"):
        arch_of("gemma-2-2b", use_bidirectional_attention=True)


def test_gemma3() -> None:
    arch = arch_of("gemma-3-1b-it")
    assert arch.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    local, full = Rope(1e4, 256), Rope(1e6, 256)
    assert arch.ropes == ((local,) * 5 + (full,)) * 4 + (local,) * 2
    assert (arch.qk_norm, arch.attention_softcap, arch.final_softcap) == (QKNorm.HEAD, None, None)
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    newer = {"rope_parameters": ropes, "rope_theta": ..., "rope_local_base_freq": ...}
    assert arch_of("gemma-3-1b-it", **newer) == arch
    assert arch_of("gemma-3-1b-it", rope_theta=..., rope_local_base_freq=...) == arch
    scaled = arch_of("gemma-3-1b-it", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert set(scaled.ropes) == {local, Rope(1e6, 256, LinearScaling(8.0))}


def test_a_local_rope_stays_where_the_window_holds_every_position() -> None:
    arch = arch_of("gemma-3-1b-it", sliding_window=32768)
    assert arch.windows == (None,) * 26
    assert arch.ropes == arch_of("gemma-3-1b-it").ropes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null in this family, but it is 50.0"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters must hold full_attention and sliding_attention"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "x"}}}, "sliding_attention: rope_type must be one of"),
    ],
)
def test_what_gemma3_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch_of("gemma-3-1b-it", **changes)


def test_phi3() -> None:
    assert arch_of("Phi-3-mini-4k-instruct").windows == (2047,) * 32
    arch = arch_of("Phi-4-mini-instruct")
    assert arch.windows == (None,) * 32
    assert arch.ropes[0] is not None
    assert (arch.ropes[0].rotary_dim, arch.head_dim, arch.tie_embeddings) == (96, 128, True)
    sources = {source.tensor: source for source in weights(arch).sources}
    assert sources["model.layers.0.self_attn.qkv_proj.weight"].shape == (5120, 3072)
    assert sources["model.layers.31.mlp.gate_up_proj.weight"].parameter == "layers.31.mlp.gate_up.weight"
    with pytest.raises(ArchError, match="type must be one of default, longrope, su, yarn, but it is 'linear'"):
        arch_of("Phi-4-mini-instruct", rope_scaling={"type": "linear", "factor": 2.0})


def test_olmo2() -> None:
    arch = arch_of("OLMo-2-1124-7B")
    assert (arch.has_pre_norms, arch.has_post_norms, arch.qk_norm) == (False, True, QKNorm.PROJECTION)
    names = {source.tensor for source in weights(arch).sources}
    assert not any("input_layernorm" in name for name in names)
    assert {source.shape for source in weights(arch).sources if "k_norm" in source.tensor} == {(4096,)}


def test_olmo3() -> None:
    arch = arch_of("Olmo-3-7B-Instruct")
    assert arch.windows == (4096, 4096, 4096, None) * 8
    full, local = Rope(5e5, 128, YarnScaling(8.0, 8192, 32.0, 1.0, True), 1.2079441541679836), Rope(5e5, 128)
    assert arch.ropes == (local, local, local, full) * 8
    assert (arch.has_pre_norms, arch.qk_norm, arch.max_positions) == (False, QKNorm.PROJECTION, 65536)
    assert arch_of("Olmo-3-7B-Instruct", layer_types=..., rope_theta=..., sliding_window=...) == arch
    with pytest.raises(ArchError, match="layer_types must be a list of 32, each one of full_attention, sliding_att"):
        arch_of("Olmo-3-7B-Instruct", layer_types=["linear_attention"] * 32)


def test_exaone4() -> None:
    arch = arch_of("EXAONE-4.0-32B")
    rope = Rope(1e6, 128, Llama3Scaling(16.0, 1.0, 4.0, 8192))
    assert (arch.windows, arch.ropes) == ((4096, 4096, 4096, None) * 16, (rope, rope, rope, None) * 16)
    assert (arch.has_pre_norms, arch.has_post_norms, arch.qk_norm) == (False, True, QKNorm.HEAD)
    assert arch_of("EXAONE-4.0-32B", layer_types=..., sliding_window_pattern=...) == arch
    small = arch_of("EXAONE-4.0-32B", layer_types=..., sliding_window=None, sliding_window_pattern=None)
    assert (small.windows, small.ropes) == ((None,) * 64, (rope,) * 64)
    with pytest.raises(
        ArchError, match="sliding_window_pattern must be a whole number of at least 1, but it is 'LLLG'"
    ):
        arch_of("EXAONE-4.0-32B", layer_types=...)


def test_seed_oss() -> None:
    arch = arch_of("Seed-OSS-36B-Instruct")
    assert (arch.has_qkv_bias, arch.has_o_bias, arch.has_mlp_bias, arch.heads(0).q_size) == (True, False, False, 10240)
    assert arch_of("Seed-OSS-36B-Instruct", attention_bias=..., head_dim=...) == arch
    assert arch_of("Seed-OSS-36B-Instruct", attention_out_bias=True).has_o_bias


def test_glm4() -> None:
    arch = arch_of("GLM-4-9B-0414")
    assert arch.ropes == (Rope(1e4, 64, turns_neighbours=True),) * 40
    assert (arch.has_qkv_bias, arch.has_o_bias, arch.has_post_norms) == (True, False, True)
    assert not arch_of("glm-4-9b-chat-hf").has_post_norms
    assert not arch_of("glm-4-9b-chat-hf", attention_bias=False).has_qkv_bias
    sources = {source.tensor.removeprefix("model.layers.0.self_attn."): source for source in weights(arch).sources}
    order = Neighbours(head_rows=128, num_turned=64)
    assert sources["q_proj.weight"].row_order == sources["k_proj.bias"].row_order == order
    assert sources["v_proj.weight"].row_order is sources["o_proj.weight"].row_order is None


def test_glm4_moe() -> None:
    arch = arch_of("GLM-4.5-Air")
    assert arch.ropes == (Rope(1e6, 64),) * 46
    assert (arch.has_qkv_bias, arch.has_o_bias, arch.qk_norm) == (True, False, QKNorm.NONE)
    assert arch_of("GLM-4.5-Air", use_qk_norm=True).qk_norm is QKNorm.HEAD
    sources = {source.tensor.removeprefix("model.layers.1."): source for source in weights(arch).sources}
    bias, up = sources["mlp.gate.e_score_correction_bias"], sources["mlp.shared_experts.up_proj.weight"]
    assert (bias.parameter, bias.shape) == ("layers.1.mlp.router.score_bias", (128,))
    assert (up.parameter, up.row) == ("layers.1.mlp.shared.gate_up.weight", 1408)


def test_ernie_with_experts() -> None:
    arch = arch_of("ERNIE-4.5-21B-A3B-PT", moe_layer_start_index=2, moe_layer_end_index=20, moe_layer_interval=3)
    assert arch.experts is not None and arch.experts.layers == (2, 5, 8, 11, 14, 17, 20)
    assert arch_of("ERNIE-4.5-21B-A3B-PT", moe_layer_end_index=-1) == arch_of("ERNIE-4.5-21B-A3B-PT")
    found = weights(arch)
    (bias,) = [source for source in found.sources if source.tensor.startswith("model.layers.2.mlp.moe_statics.")]
    assert (bias.parameter, bias.shape, bias.may_be_quantized) == ("layers.2.mlp.router.score_bias", (1, 64), False)
    shapes = {source.tensor: source.shape for source in found.sources}
    assert not found.compare(shapes | {"model.mtp_block.0.mlp.up_proj.weight": (12288, 2560)})


def test_qwen3_next() -> None:
    arch = arch_of("Qwen3-Next-80B-A3B-Instruct", num_hidden_layers=8)
    assert (arch.recurrent, arch.attention_layers) == (GatedDelta(16, 32, 128, 128, 4), (3, 7))
    assert (arch.ropes[3], arch.norm, arch.has_output_gate) == (Rope(1e7, 64), NormKind.RMS_ONE_PLUS, True)
    sources = {source.tensor.removeprefix("model.layers.0."): source for source in weights(arch).sources}
    qkvz, ba = (sources[f"linear_attn.in_proj_{name}.weight"] for name in ("qkvz", "ba"))
    assert (qkvz.row_order, ba.row_order) == (ByKeyHead((128, 128, 256, 256)), ByKeyHead((2, 2)))
    assert (qkvz.row, ba.row, ba.parameter) == (0, 12288, "layers.0.recurrent.in.weight")
    assert ByKeyHead((2, 1)).order(6) == [0, 1, 3, 4, 2, 5]
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with pytest.raises(ArchError, match=r"in_proj_qkvz: its rows lie by head, so FP8 blocks of 128 rows, .* another"):
        arch_of("Qwen3-Next-80B-A3B-Instruct", num_hidden_layers=4, quantization_config=fp8)


def test_an_mtp_layer_behind_the_last_is_no_layer_too_many() -> None:
    found = weights(arch_of("GLM-4.5-Air"))
    shapes = {source.tensor: source.shape for source in found.sources}
    behind = {name.replace("layers.45.", "layers.46."): shape for name, shape in shapes.items() if "layers.45." in name}
    assert not found.compare(shapes | behind | {"model.layers.46.eh_proj.weight": (4096, 8192)})
    assert found.compare(shapes | behind).unexpected == tuple(sorted(behind))


def test_heads_are_not_reordered_within_blocks_of_fp8() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert arch_of("ERNIE-4.5-0.3B-PT", quantization_config=fp8).stored is not None
    with pytest.raises(ArchError, match=r"q_proj: heads must be whole FP8 blocks of 128 rows, but have 64"):
        arch_of("ERNIE-4.5-0.3B-PT", quantization_config=fp8, head_dim=64)


def test_minimax_m2() -> None:
    arch = arch_of("MiniMax-M2")
    assert arch.qk_norm is QKNorm.PROJECTION and arch.ropes == (Rope(5e6, 64),) * 62
    assert arch_of("MiniMax-M2", rotary_dim=..., partial_rotary_factor=0.5, head_dim=..., rope_theta=...) == arch
    sources = {source.tensor.removeprefix("model.layers.61."): source.shape for source in weights(arch).sources}
    assert sources["block_sparse_moe.e_score_correction_bias"] == (256,)
    assert sources["block_sparse_moe.experts.255.w3.weight"] == (1536, 3072)
    assert sources["self_attn.q_norm.weight"] == (6144,) and sources["self_attn.k_norm.weight"] == (1024,)
    fp8 = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    assert len(weights(arch_of("MiniMax-M2", quantization_config=fp8)).quantized) == 62 * (4 + 3 * 256)
    with pytest.raises(ArchError, match="rotary_dim must be at most 128, but it is 130"):
        arch_of("MiniMax-M2", rotary_dim=130)
    with pytest.raises(ArchError, match="qk_norm_type must be one of per_layer, but it is 'per_head'"):
        arch_of("MiniMax-M2", qk_norm_type="per_head")


def test_ministral3() -> None:
    arch = arch_of("Ministral-3-8B-Base-2512")
    growth = QueryGrowth(0.1, 16384)
    assert arch.ropes == (Rope(1e6, 128, YarnScaling(16.0, 16384, 32.0, 1.0, True), 1.0, growth),) * 34
    assert arch.windows == (None,) * 34
    assert arch_of("Ministral-3-8B-Base-2512", sliding_window=..., head_dim=...) == arch
    with pytest.raises(ArchError, match="rope_parameters must be given in this family, but it is None"):
        arch_of("Ministral-3-8B-Base-2512", rope_parameters=...)


def test_smollm3() -> None:
    arch = arch_of("SmolLM3-3B")
    rope = Rope(5e6, 128)
    assert arch.ropes == (rope, rope, rope, None) * 9
    assert arch.windows == (None,) * 36
    assert arch.tie_embeddings
    assert arch_of("SmolLM3-3B", no_rope_layers=None, no_rope_layer_interval=...) == arch
    assert arch_of("SmolLM3-3B", rope_theta=...).ropes[0] == Rope(2e6, 128)
    windowed = arch_of("SmolLM3-3B", layer_types=..., use_sliding_window=True, sliding_window=100)
    assert windowed.windows == (None, None, None, 100) * 9
    with pytest.raises(ArchError, match="no_rope_layers must be a list of 36, each one of 0, 1"):
        arch_of("SmolLM3-3B", no_rope_layers=[1] * 35)


def test_granite() -> None:
    arch = arch_of("granite-3.1-2b-instruct")
    multipliers = (arch.attention_scale, arch.embedding_multiplier, arch.residual_multiplier, arch.logits_divisor)
    assert multipliers == (1 / 64, 12.0, 0.22, 8.0)
    assert not arch.rounds_embedding_multiplier
    with pytest.raises(ArchError, match=r"logits_scaling must be a finite number above 0, .*, but it is 0"):
        arch_of("granite-3.1-2b-instruct", logits_scaling=0)


def test_granite4() -> None:
    arch = arch_of("granite-4.0-h-tiny")
    assert arch.recurrent == Mamba2(48, 64, 128, 1, 4, has_conv_bias=True, has_bias=False)
    assert (arch.attention_layers, set(arch.ropes)) == ((5, 15, 25, 35), {None})
    assert (arch.attention_scale, arch.embedding_multiplier, arch.residual_multiplier) == (1 / 128, 12.0, 0.22)
    newer = ["linear_attention" if kind == "mamba" else "full_attention" for kind in GRANITE4_LAYERS]
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert arch_of("granite-4.0-h-tiny", layer_types=newer, mamba_d_head="auto", **limit) == arch
    names = {source.tensor.removeprefix("model.layers.0."): source.parameter for source in weights(arch).sources}
    assert names["mamba.D"] == "layers.0.recurrent.d"
    assert names["block_sparse_moe.router.layer.weight"] == "layers.0.mlp.router.weight"
    assert names["shared_mlp.input_linear.weight"] == "layers.0.mlp.shared.gate_up.weight"
    dense = arch_of("granite-4.0-h-tiny", num_local_experts=0, layer_types=["attention"] * 40)
    assert (dense.intermediate_size, dense.experts, dense.recurrent) == (1024, None, None)
    roped = arch_of("granite-4.0-h-tiny", position_embedding_type="rope")
    assert roped.ropes == (Rope(1e4, 128),) * 40


def test_layers_of_another_kind_than_the_weights_are_named() -> None:
    found = {source.tensor: source.shape for source in weights(arch_of("granite-4.0-h-tiny")).sources}
    layers = ["attention", *GRANITE4_LAYERS[1:5], "mamba", *GRANITE4_LAYERS[6:]]
    differences = weights(arch_of("granite-4.0-h-tiny", layer_types=layers)).compare(found)
    assert {name.partition(".mamba.")[0] for name in differences.missing if ".mamba." in name} == {"model.layers.5"}
    assert "12 unexpected: model.layers.0.mamba.A_log, " in str(differences)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 40}, "layer_types must name attention at least once"),
        ({"layer_types": ["mamba"] * 39}, "layer_types must be a list of 40, each one of mamba, attention, linear_at"),
        ({"mamba_n_heads": 47}, "mamba_n_heads must divide mamba_expand . hidden_size, which is 3072, but it is 47"),
        ({"mamba_d_head": 32}, "mamba_d_head must be 64, which is mamba_expand .*, but it is 32"),
        ({"mamba_n_groups": 7}, "mamba_n_groups must divide mamba_n_heads, which is 48, but it is 7"),
        (
            {"time_step_limit": [0.0, 1.0]},
            r"time_step_limit must be null or from 0 to infinity: .*, but it is \[0.0, 1",
        ),
        ({"hidden_act": "gelu_new", "num_local_experts": 0}, "hidden_act must be silu in a model with Mamba-2"),
        ({"num_local_experts": ...}, "config.json lacks num_local_experts"),
        ({"normalization_function": "layernorm"}, "normalization_function must be one of rmsnorm, but it is 'layern"),
    ],
)
def test_what_granite4_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch_of("granite-4.0-h-tiny", **changes)


def test_lfm2() -> None:
    arch = arch_of("LFM2-1.2B")
    assert (arch.recurrent, arch.attention_layers) == (ShortConv(2048, 3, has_bias=False), (2, 5, 8, 10, 12, 14))
    assert (arch.intermediate_size, arch.qk_norm, arch.tie_embeddings) == (8192, QKNorm.HEAD, True)
    types = ["full_attention" if layer in arch.attention_layers else "conv" for layer in range(16)]
    assert arch_of("LFM2-1.2B", layer_types=types, full_attn_idxs=...) == arch
    assert arch_of("LFM2-1.2B", block_auto_adjust_ff_dim=False).intermediate_size == 12288
    assert arch_of("LFM2-1.2B", block_ffn_dim_multiplier=1.01).intermediate_size == 8448
    names = {source.tensor: source.parameter for source in weights(arch).sources}
    assert names["model.embedding_norm.weight"] == "norm.weight"
    assert names["model.layers.0.conv.conv.weight"] == "layers.0.recurrent.conv.weight"
    assert names["model.layers.2.self_attn.k_layernorm.weight"] == "layers.2.attention.k_norm.weight"
    names = {source.tensor: source.parameter for source in weights(arch_of("LFM2-8B-A1B")).sources}
    assert names["model.layers.2.feed_forward.expert_bias"] == "layers.2.mlp.router.score_bias"
    assert names["model.layers.2.feed_forward.experts.31.w2.weight"] == "layers.2.mlp.experts.31.down.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_attn_idxs": [16]}, r"full_attn_idxs must be a list of layers, from 0 to 15, but it is \[16\]"),
        ({"full_attn_idxs": []}, "layer_types must name full_attention at least once"),
        ({"layer_types": ["mamba"] * 16}, "layer_types must be a list of 16, each one of conv, full_attention"),
        ({"block_use_swiglu": False}, "block_use_swiglu must be true"),
        ({"conv_L_cache": 1}, "conv_L_cache must be a whole number of at least 2, but it is 1"),
    ],
)
def test_what_lfm2_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch_of("LFM2-1.2B", **changes)


def test_starcoder2() -> None:
    arch = arch_of("starcoder2-3b")
    assert (arch.norm, arch.has_gate, arch.norm_eps, arch.tie_embeddings) == (NormKind.LAYER, False, 1e-5, True)
    assert arch.has_qkv_bias and arch.has_o_bias and arch.has_mlp_bias
    assert arch.windows == (4096,) * 30
    names = {source.tensor for source in weights(arch).sources}
    assert {"model.norm.bias", "model.layers.0.mlp.c_fc.bias", "model.layers.0.input_layernorm.bias"} < names
    without = {source.tensor for source in weights(arch_of("starcoder2-3b", use_bias=False)).sources}
    assert not any(name.endswith("proj.bias") or name.endswith("fc.bias") for name in without)
    with pytest.raises(ArchError, match="hidden_act must be gelu_pytorch_tanh in this family, but it is 'silu'"):
        arch_of("starcoder2-3b", hidden_act="silu")


def test_gpt_oss() -> None:
    arch = arch_of("gpt-oss-20b")
    assert arch.windows == (128, None) * 12 and arch.has_sinks
    factor = 0.1 * math.log(32) + 1
    assert arch.ropes == (Rope(150000.0, 64, YarnScaling(32.0, 4096, 32.0, 1.0, False), factor),) * 24
    assert (arch.has_qkv_bias, arch.has_o_bias, arch.max_positions) == (True, True, 131072)
    bare = ("layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "head_dim", "sliding_window", "attention_bias")
    assert arch_of("gpt-oss-20b", **dict.fromkeys(bare, ...)) == arch
    sources = {source.tensor: source for source in weights(arch).sources}
    assert sources["model.layers.3.self_attn.sinks"].parameter == "layers.3.attention.sinks.weight"
    for kind, shape in (("weight", (2880, 2880)), ("bias", (2880,))):
        up = sources[f"model.layers.3.mlp.experts.31.up_proj.{kind}"]
        assert (up.parameter, up.row, up.shape) == (f"layers.3.mlp.experts.31.gate_up.{kind}", 2880, shape)
    assert sources["model.layers.3.mlp.router.bias"].parameter == "layers.3.mlp.router.bias"
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    packed = weights(arch_of("gpt-oss-20b", quantization_config=quantization))
    assert len(packed.quantized) == 24 * 32 * 3 and packed.num_elements == weights(arch).num_elements
    kept = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.experts.*"]}
    assert arch_of("gpt-oss-20b", quantization_config=kept) == arch
    with pytest.raises(ArchError, match="layer_types must be a list of 24"):
        arch_of("gpt-oss-20b", layer_types=["full_attention"] * 23)
    with pytest.raises(ArchError, match=r"swiglu_limit must be a finite number above 0, .* but it is 0"):
        arch_of("gpt-oss-20b", swiglu_limit=0)


@pytest.mark.parametrize(
    ("name", "experts", "num_active"),
    [
        ("gpt-oss-20b", Experts(32, 4, 2880, True, tuple(range(24)), has_bias=True, limit=LIMIT), 4.19e9),
        ("Mixtral-8x7B-v0.1", Experts(8, 2, 14336, True, tuple(range(32))), 12.88e9),
        (
            "MiniMax-M2",
            Experts(256, 8, 1536, True, tuple(range(62)), has_sigmoid=True, has_score_bias=True, added=1e-20),
            11.03e9,  # published without embedding and head: 10 billion
        ),
        ("OLMoE-1B-7B-0924", Experts(64, 8, 1024, False, tuple(range(16))), 1.28e9),
        ("Qwen1.5-MoE-A2.7B", Experts(60, 4, 1408, False, tuple(range(24)), 5632), 2.69e9),
        (
            "ERNIE-4.5-21B-A3B-PT",
            Experts(64, 6, 1536, True, tuple(range(1, 28)), 3072, False, has_score_bias=True, added=1e-12),
            3.352e9,
        ),
        (
            "GLM-4.5-Air",
            Experts(128, 8, 1408, True, tuple(range(1, 46)), 1408, False, True, True, added=1e-20),
            13.42e9,  # published without embedding and head: 12 billion
        ),
        (
            "granite-4.0-h-tiny",
            Experts(64, 6, 512, True, tuple(range(40)), 1024, has_shared_gate=False),
            1.4657e9,
        ),
        (
            "LFM2-8B-A1B",
            Experts(32, 4, 1792, True, tuple(range(2, 24)), has_sigmoid=True, has_score_bias=True, added=1e-6),
            1.558e9,
        ),
        ("Qwen3-30B-A3B", Experts(128, 8, 768, True, tuple(range(48))), 3.35e9),
        ("Qwen3-Next-80B-A3B-Instruct", Experts(512, 10, 512, True, tuple(range(48)), 512), 3.875e9),
        ("Qwen3.5-35B-A3B", Experts(256, 8, 512, True, tuple(range(40)), 512), 3.455e9),
    ],
)
def test_experts(name: str, experts: Experts, num_active: float) -> None:
    """The numbers of active parameters are the published ones, rounded."""
    arch = arch_of(name)
    assert arch.experts == experts
    assert all(window is None for window in arch.windows) == (arch.architecture != "GptOssForCausalLM")
    assert weights(arch).num_elements - arch.num_idle_weights == pytest.approx(num_active, rel=0.002)


def test_names_of_experts() -> None:
    sources = {source.tensor: source for source in weights(arch_of("Mixtral-8x7B-v0.1")).sources}
    up = sources["model.layers.3.block_sparse_moe.experts.7.w3.weight"]
    assert (up.parameter, up.row) == ("layers.3.mlp.experts.7.gate_up.weight", 14336)
    assert sources["model.layers.3.block_sparse_moe.experts.7.w2.weight"].parameter.endswith("experts.7.down.weight")
    router = sources["model.layers.3.block_sparse_moe.gate.weight"]
    assert (router.parameter, router.may_be_quantized, up.may_be_quantized) == (
        "layers.3.mlp.router.weight",
        False,
        True,
    )


def test_names_of_a_shared_expert() -> None:
    sources = {source.tensor: source for source in weights(arch_of("Qwen3.5-35B-A3B")).sources}
    up, gate = (
        sources[f"model.layers.3.mlp.{name}.weight"] for name in ("shared_expert.up_proj", "shared_expert_gate")
    )
    assert (up.parameter, up.row, up.may_be_quantized) == ("layers.3.mlp.shared.gate_up.weight", 512, True)
    assert (gate.parameter, gate.shape, gate.may_be_quantized) == ("layers.3.mlp.shared_gate.weight", (1, 2048), False)


def test_layers_without_experts() -> None:
    arch = arch_of("Qwen3-30B-A3B", decoder_sparse_step=2, mlp_only_layers=[1, 5])
    assert arch.experts is not None and arch.experts.layers[:3] == (3, 7, 9)
    parameters = weights(arch).parameters()
    assert parameters["layers.1.mlp.gate_up.weight"].shape == (2 * 6144, 2048)
    assert parameters["layers.3.mlp.experts.127.gate_up.weight"].shape == (2 * 768, 2048)
    assert arch_of("Qwen3-30B-A3B", decoder_sparse_step=64).experts is None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3-30B-A3B", {"num_experts": 1400}, "num_experts must be at most 1365, but it is 1400"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, r"must be at most num_experts \(128\), but it is 129"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of whole numbers"),
        ("Qwen3.5-35B-A3B", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
        ("Mixtral-8x7B-v0.1", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be silu in a model with experts"),
        ("ERNIE-4.5-21B-A3B-PT", {"use_bias": True}, "use_bias must be false in a model with experts, but it is True"),
        (
            "ERNIE-4.5-21B-A3B-PT",
            {"moe_norm_min": 0.1},
            "moe_norm_min must be at most 1e-06, so that .*, but it is 0.1",
        ),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_k": 65}, r"moe_k must be at most moe_num_experts \(64\), but it is 65"),
        ("GLM-4.5-Air", {"n_group": 3}, "n_group must leave equal groups of two or more of 128 experts, but it is 3"),
        ("GLM-4.5-Air", {"n_group": 128}, "n_group must leave equal groups of two or more of 128 experts"),
        ("GLM-4.5-Air", {"topk_group": 2}, "topk_group must be at most 1, but it is 2"),
        ("GLM-4.5-Air", {"n_group": 32}, "topk_group must be so many groups that they have 8 experts, but it is 1"),
        ("GLM-4.5-Air", {"first_k_dense_replace": 46}, "first_k_dense_replace must be at most 45, but it is 46"),
        ("GLM-4.5-Air", {"scoring_func": "softmax"}, "scoring_func must be one of sigmoid, but it is 'softmax'"),
        ("GLM-4.5-Air", {"topk_method": "greedy"}, "topk_method must be one of noaux_tc, but it is 'greedy'"),
        ("GLM-4.5-Air", {"routed_scaling_factor": 0}, "routed_scaling_factor must be a finite number above 0"),
        ("OLMoE-1B-7B-0924", {"clip_qkv": 8.0}, "clip_qkv must be null: limits of q, k and v are not supported"),
    ],
)
def test_experts_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch_of(name, **changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_planner_counts_by(name: str) -> None:
    arch = arch_of(name)
    assert sorted(layer for group in arch.cache_groups for layer in group.layers) == list(arch.kv_layers)
    embedding = weights(arch).parameters()["embed.weight"]
    assert embedding.shape == (arch.vocab_size, arch.hidden_size)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_field_without_which_nothing_is_known(name: str, field: str) -> None:
    with pytest.raises(ArchError, match=f"config.json lacks {field}"):
        arch_of(name, **{field: ...})


@pytest.mark.parametrize(
    ("name", "body", "num_labels"),
    [
        ("Qwen3-30B-A3B", "Qwen3MoeModel", 0),
        ("Qwen3-30B-A3B", "Qwen3MoeForSequenceClassification", 1),
        ("gemma-3-1b-it", "Gemma3TextModel", 0),
        ("gemma-3-1b-it", "Gemma3TextForSequenceClassification", 1),
    ],
)
def test_models_without_the_head_from_which_tokens_are_drawn(name: str, body: str, num_labels: int) -> None:
    changes = {"architectures": [body], "num_labels": 1}
    assert is_body({**PUBLISHED[name][0], **changes}) and not is_body(PUBLISHED[name][0])
    arch, generating = arch_of(name, **changes), arch_of(name)
    assert arch == replace(generating, num_labels=num_labels, has_head=False, tie_embeddings=False)
    assert not weights_of(arch).ties
    precision = Precision("bfloat16")
    head_bytes = {one.name: one.num_bytes for one in weight_lines(generating, precision)}["head"]
    lines = {one.name: one.num_bytes for one in weight_lines(arch, precision)}
    assert lines.get("head", 0) == num_labels * 2 * arch.hidden_size < head_bytes, "no copy of a tied embedding"
    assert ("score.weight" in {source.tensor for source in weights_of(arch).sources}) == bool(num_labels)
