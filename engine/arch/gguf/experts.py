"""The fields of config.json of families with experts, from the metadata of a GGUF file."""

from __future__ import annotations

from inferd.engine.arch.gguf.dense import chosen, ernie4_5
from inferd.engine.arch.gguf.metadata import Config, Metadata, layers_with, rows_of
from inferd.engine.arch.gguf.ropes import rope_scaling


def olmoe(of: Metadata) -> Config:
    return {"num_experts": of.required("expert_count"), "norm_topk_prob": False, **chosen(of)}


def gpt_oss(of: Metadata) -> Config:
    """llama.cpp has in its code that the ends of YaRN's interpolation are not rounded."""
    scaling = rope_scaling(of)
    return {
        "num_local_experts": of.required("expert_count"),
        "intermediate_size": of.required("expert_feed_forward_length"),
        "sliding_window": of.required("attention.sliding_window"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
        **chosen(of),
    }


def qwen3_moe(of: Metadata) -> Config:
    sizes = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
    return {name: of.required(key) for name, key in sizes.items()} | {"norm_topk_prob": True, **chosen(of)}


def qwen2_moe(of: Metadata) -> Config:
    return {
        **qwen3_moe(of),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": rows_of(of, "ffn_up_shexp.weight"),
        "qkv_bias": "blk.0.attn_q.bias" in of.tensors,
    }


def glm4_moe(of: Metadata) -> Config:
    names = {
        "n_routed_experts": "expert_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
    }
    defaults = {
        "first_k_dense_replace": ("leading_dense_block_count", 0),
        "n_group": ("expert_group_count", 1),
        "topk_group": ("expert_group_used_count", 1),
        "routed_scaling_factor": ("expert_weights_scale", 1.0),
        "norm_topk_prob": ("expert_weights_norm", False),
    }
    return {
        **{name: of.required(key) for name, key in names.items()},
        **{name: of.get(key, default) for name, (key, default) in defaults.items()},
        "scoring_func": sigmoid(of),
        "use_qk_norm": bool(layers_with(of, "attn_q_norm.weight")),
        **chosen(of),
    }


def sigmoid(of: Metadata) -> str:
    if of.get("expert_gating_func", 2) != 2:
        raise of.refuse("expert_gating_func", "must be 2, a sigmoid, in this family")
    return "sigmoid"


def ernie4_5_moe(of: Metadata) -> Config:
    """A file does not state the last layer with experts."""
    names = {
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_num_shared_experts": "expert_shared_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    }
    return {
        **{name: of.required(key) for name, key in names.items()},
        "moe_layer_start_index": of.get("leading_dense_block_count", 0),
        "moe_layer_end_index": max(layers_with(of, "ffn_gate_inp.weight"), default=-1),
        **ernie4_5(of),
    }


def minimax_m2(of: Metadata) -> Config:
    return {
        "num_local_experts": of.required("expert_count"),
        "intermediate_size": of.required("expert_feed_forward_length"),
        "scoring_func": sigmoid(of),
        **chosen(of),
    }
