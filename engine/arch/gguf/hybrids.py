"""The fields of config.json of families with recurrent layers, from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from inferd.engine.arch.gguf.dense import granite
from inferd.engine.arch.gguf.experts import qwen3_moe, sigmoid
from inferd.engine.arch.gguf.metadata import Config, Metadata, by_layer, layers_with, num_layers, rows_of


def qwen3_5(of: Metadata) -> Config:
    """The file states the size of all value heads."""
    names = {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    }
    sizes = {name: of.whole(key) for name, key in names.items()}
    value_dim, rest = divmod(of.whole("ssm.inner_size"), sizes["linear_num_value_heads"])
    if rest:
        raise of.refuse("ssm.inner_size", "must be a multiple of ssm.time_step_rank")
    return {**sizes, "linear_value_head_dim": value_dim, "layer_types": _recurrent_or_full(of)}


def _recurrent_or_full(of: Metadata) -> list[str]:
    """All layers but each fourth are recurrent, or as an interval or a list says."""
    interval = of.get("full_attention_interval", 4)
    if type(interval) is not int or interval < 1:
        raise of.refuse("full_attention_interval", "must be a whole number of at least 1")
    if of.get("attention.recurrent_layers") is None:
        is_recurrent: tuple[Any, ...] = tuple((layer + 1) % interval != 0 for layer in range(num_layers(of)))
    else:
        is_recurrent = by_layer(of, "attention.recurrent_layers")
    return ["linear_attention" if own else "full_attention" for own in is_recurrent]


def qwen3_5_moe(of: Metadata) -> Config:
    return {
        **qwen3_5(of),
        **qwen3_moe(of),
        "shared_expert_intermediate_size": rows_of(of, "ffn_up_shexp.weight"),
    }


def qwen3_next(of: Metadata) -> Config:
    """The first files hold the projections of Gated DeltaNet as the checkpoints do."""
    return {**qwen3_5_moe(of), "splits_matrices": not layers_with(of, "ssm_in.weight")}


def lfm2(of: Metadata) -> Config:
    layer_types, num_kv_heads = _with_kv(of, "conv", "full_attention")
    return {
        "layer_types": layer_types,
        "num_key_value_heads": num_kv_heads,
        "norm_eps": of.required("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": of.required("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(of: Metadata) -> Config:
    sigmoid(of)
    return {
        **lfm2(of),
        **qwen3_moe(of),
        "num_dense_layers": of.get("leading_dense_block_count", 0),
        "use_expert_bias": bool(layers_with(of, "exp_probs_b.bias")),
        "routed_scaling_factor": of.get("expert_weights_scale", 1.0),
    }


def _with_kv(of: Metadata, without: str, with_kv: str) -> tuple[list[str], Any]:
    """(a type for each layer: `without` for those without heads of K and V, number of these heads)."""
    counts = by_layer(of, "attention.head_count_kv")
    return [with_kv if count else without for count in counts], max(counts, key=bool)


def granite_hybrid(of: Metadata) -> Config:
    layer_types, num_kv_heads = _with_kv(of, "mamba", "attention")
    config: Config = {
        **granite(of),
        "layer_types": layer_types,
        "num_key_value_heads": num_kv_heads,
        "position_embedding_type": "rope" if of.get("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": of.required("expert_shared_feed_forward_length"),
        "num_local_experts": of.get("expert_count", 0),
        "num_experts_per_tok": of.get("expert_used_count"),
        "splits_matrices": True,
    }
    if "mamba" not in layer_types:
        return config
    expand, rest = divmod(of.whole("ssm.inner_size"), of.whole("embedding_length"))
    if rest:
        raise of.refuse("ssm.inner_size", "must be a multiple of embedding_length")
    return {
        **config,
        "mamba_n_heads": of.required("ssm.time_step_rank"),
        "mamba_d_state": of.required("ssm.state_size"),
        "mamba_n_groups": of.required("ssm.group_count"),
        "mamba_d_conv": of.required("ssm.conv_kernel"),
        "mamba_expand": expand,
        "mamba_conv_bias": bool(layers_with(of, "ssm_conv1d.bias")),
        "mamba_proj_bias": bool(layers_with(of, "ssm_in.bias")),
    }
