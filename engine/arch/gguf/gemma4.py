"""The fields of Gemma 4's config.json, from the metadata of a GGUF file."""

from __future__ import annotations

from inferd.engine.arch.gguf.dense import layer_types
from inferd.engine.arch.gguf.metadata import KEY, ROPE_FACTORS, Config, Metadata, by_layer


def gemma4(of: Metadata) -> Config:
    """Windowed layers and full ones have heads of different sizes. The divisors of rope's frequencies say which part of
    a head of a full layer turns."""
    windowed = by_layer(of, "attention.sliding_window_pattern")
    full = [layer for layer, is_windowed in enumerate(windowed) if not is_windowed]
    counts = by_layer(of, "attention.head_count_kv")
    kv_heads = {bool(kind): count for kind, count in zip(windowed, counts, strict=True)}
    mlp_sizes = by_layer(of, "feed_forward_length")
    divisors = of.factors.get(ROPE_FACTORS, (1.0,))
    ropes = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": sum(divisor == 1.0 for divisor in divisors) / len(divisors),
            "rope_theta": of.get("rope.freq_base", 1e6),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": of.get("rope.freq_base_swa", 1e4)},
    }
    config: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": of.get(f"{KEY}_swa", of.required(KEY)),
        "global_head_dim": of.required(KEY),
        "num_key_value_heads": kv_heads.get(True, kv_heads.get(False)),
        "num_global_key_value_heads": kv_heads.get(False),
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in of.tensors for layer in _own_kv(of, full)),
        "layer_types": layer_types(windowed),
        "sliding_window": of.required("attention.sliding_window"),
        "num_kv_shared_layers": of.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": of.get("embedding_length_per_layer_input", 0),
        "intermediate_size": mlp_sizes[0],
        "use_double_wide_mlp": mlp_sizes[-1] != mlp_sizes[0],
        "final_logit_softcapping": of.get("final_logit_softcapping") or None,
        "rope_scaling": None,
        "rope_parameters": ropes,
    }
    if not of.get("expert_count"):
        return config
    experts = {"num_experts": "expert_count", "top_k_experts": "expert_used_count"}
    experts |= {"moe_intermediate_size": "expert_feed_forward_length"}
    return {**config, "enable_moe_block": True, **{name: of.required(key) for name, key in experts.items()}}


def _own_kv(of: Metadata, layers: list[int]) -> list[int]:
    """Those of `layers` that do not read the K and V of others."""
    return [layer for layer in layers if f"blk.{layer}.attn_k.weight" in of.tensors]
