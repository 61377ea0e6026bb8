"""Names, values and keys that llama.cpp's converter writes for families that are far from Llama. `gguf_files` writes
them.

The names, the orders of rows and the values are those of llama.cpp's conversion/*.py (2026-11). This file shares no
code with the reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Json = Mapping[str, Any]

ARCHITECTURES = {
    "ernie4_5_moe": "ernie4_5-moe",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
PERMUTED = ("granitehybrid", "mistral3")
"""Architectures whose rows of q and k are stored in pairs."""
WITH_POST_NORMS = ("gemma4", "glm4", "glm4moe", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose norm behind attention, or before the MLP, is called post_attention_norm."""
WITH_EXCESS = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures whose norms have 1 added."""

WITH_HEAD_SIZE = ("ernie4_5", "glm4", "glm4_moe", "minimax_m2", "ministral3", "qwen3_5_text", "qwen3_5_moe_text",
                  "qwen3_next")  # fmt: skip
"""Families whose config has the size of a head."""

OUTSIDE = {
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_RECURRENT = {
    "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out", "A_log": "ssm_a", "D": "ssm_d",
    "dt_bias": "ssm_dt.bias", "in_proj": "ssm_in", "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate",
    "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta", "in_proj_ba": "ssm_ba",
}  # fmt: skip
IN_LAYER = {
    **{f"{module}.{own}": name for module in ("mamba", "linear_attn") for own, name in _RECURRENT.items()},
    **{f"conv.{own}": f"shortconv.{own}" for own in ("conv", "in_proj", "out_proj")},
    **{f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp" for shared in ("shared_expert", "shared_experts")
       for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "shared_mlp.output_linear": "ffn_down_shexp",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale.weight", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}  # fmt: skip
"""Name in a layer of a checkpoint -> name in a GGUF file; without "weight" or "bias" if both have it."""
_MTP = {
    "mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}  # fmt: skip


def in_order(tensors: Mapping[str, Tensor], config: Json) -> dict[str, Tensor]:
    """The same tensors, with those of an MTP layer behind the layers, and with fused matrices in their parts."""
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in _MTP:
            name = f"model.layers.{config['num_hidden_layers']}.{_MTP[module]}.{kind}"
        elif name.startswith("mtp.layers.0."):
            name = f"model.layers.{config['num_hidden_layers']}.{name.removeprefix('mtp.layers.0.')}"
        found |= _in_parts(name, values, config)
    return found


def _in_parts(name: str, values: Tensor, config: Json) -> dict[str, Tensor]:
    layer = ".".join(("blk", *name.split(".")[2:3]))
    if name.endswith("in_proj_qkvz.weight"):
        keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        v_size = len(values) // keys // 2 - key_dim
        rows = values.view(keys, -1, values.shape[1])
        q, k, v, z = torch.split(rows, [key_dim, key_dim, v_size, v_size], dim=1)
        qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        return {f"{layer}.attn_qkv.weight": qkv, f"{layer}.attn_gate.weight": z.flatten(0, 1)}
    if name.endswith(("input_linear.weight", "shared_mlp.output_linear.weight")):
        shared = "_shexp" if config.get("num_local_experts") else ""
        end = shared if "shared_mlp" in name else "_exps"
        if "output" in name:
            return {f"{layer}.ffn_down{end}.weight": values}
        gate, up = values.chunk(2, dim=-2)
        return {f"{layer}.ffn_gate{end}.weight": gate, f"{layer}.ffn_up{end}.weight": up}
    return {name: values}


def converted(name: str, values: Tensor, config: Json, architecture: str) -> Tensor:
    """The values of a tensor as the file has them, with its shape there. `name`: that of the checkpoint."""
    if "linear_attn." in name and architecture in ("qwen35", "qwen35moe"):
        values = _tiled(name, values, config)
    if name.endswith(".A_log"):
        values = -values.exp()
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        return values.squeeze(1)
    if name.startswith("model.layers") and ".mamba." in name:
        if name.endswith((".A_log", ".D")):
            return values[:, None]
        if name.endswith("norm.weight"):
            return values.view(config["mamba_n_groups"], -1)
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return values + 1 if is_norm and architecture in WITH_EXCESS else values


def _tiled(name: str, values: Tensor, config: Json) -> Tensor:
    """Value heads in another order: the first of each key head, then the second of each key head, and so on."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, num_keys = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def tiled(rows: Tensor, head_rows: int) -> Tensor:
        return rows.reshape(keys, heads // keys, head_rows, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    match name.split(".linear_attn.")[1]:
        case "in_proj_qkv.weight" | "conv1d.weight":
            return torch.cat([values[:num_keys], tiled(values[num_keys:], size)])
        case "in_proj_z.weight":
            return tiled(values, size)
        case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
            return tiled(values, 1)
        case "out_proj.weight":
            return tiled(values.T, size).T.contiguous()
    return values


def keys_of(config: Json) -> dict[str, Any]:
    """Keys of the metadata that other families lack, or have otherwise, without the architecture before them."""
    kind = config["model_type"]
    if kind.startswith(("qwen3_5", "qwen3_next")):
        return _qwen3_5(config)
    if kind == "gemma4_text":
        return _gemma4(config)
    if kind in ("glm4", "glm4_moe", "minimax_m2"):
        share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.5)
        return {"rope.dimension_count": int(config["head_dim"] * share), **_router(config)}
    if kind.startswith("ernie4_5"):
        return _ernie4_5(config)
    if kind.startswith("lfm2"):
        kv_heads = [0 if own == "conv" else config["num_key_value_heads"] for own in config["layer_types"]]
        norm = {"attention.layer_norm_rms_epsilon": config["norm_eps"]}
        sizes = {"attention.head_count_kv": kv_heads, "shortconv.l_cache": config["conv_L_cache"], **norm}
        if kind == "lfm2_moe":
            return {**sizes, "leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
        size = int(2 * config["intermediate_size"] / 3)
        return {**sizes, "feed_forward_length": -(-size // config["block_multiple_of"]) * config["block_multiple_of"]}
    if kind == "granitemoehybrid":
        kv_heads = [config["num_key_value_heads"] if own in ("attention", "full_attention") else 0
                    for own in config["layer_types"]]  # fmt: skip
        return {
            "attention.head_count_kv": kv_heads, "context_length": 2**20, "rope.scaling.finetuned": False,
            "expert_count": config["num_local_experts"], "vocab_size": config["vocab_size"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "ssm.conv_kernel": config["mamba_d_conv"], "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"], "ssm.time_step_rank": config["mamba_n_heads"],
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        }  # fmt: skip
    if kind == "ministral3":
        rope = config["rope_parameters"]
        return {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
            "rope.dimension_count": config["head_dim"],
        }
    if kind == "exaone4" and config.get("sliding_window"):
        return {"attention.sliding_window_pattern": [own == "sliding_attention" for own in config["layer_types"]]}
    return {}


def _qwen3_5(config: Json) -> dict[str, Any]:
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    num_mtp = config.get("mtp_num_hidden_layers") or 0
    share = config["rope_parameters"]["partial_rotary_factor"]
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"] + num_mtp,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "attention.recurrent_layers": [*recurrent, *[False] * num_mtp], "full_attention_interval": 4,
        "rope.dimension_count": int(config["head_dim"] * share),
    }  # fmt: skip
    return {**found, "nextn_predict_layers": num_mtp} if num_mtp else found


def _gemma4(config: Json) -> dict[str, Any]:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    of_full = _of_full_layers(config)
    heads = {True: config["num_key_value_heads"], False: of_full.get("num_key_value_heads")}
    shared, size = config["num_kv_shared_layers"], config["intermediate_size"]
    full, part = of_full["head_dim"], config["head_dim"]
    found: dict[str, Any] = {
        "attention.shared_kv_layers": shared, "attention.sliding_window_pattern": windowed,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.key_length": full, "attention.value_length": full, "rope.dimension_count": full,
        "attention.key_length_swa": part, "attention.value_length_swa": part, "rope.dimension_count_swa": part,
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    }  # fmt: skip
    if heads[False] is not None:
        found["attention.head_count_kv"] = [heads[kind] for kind in windowed]
    if config["use_double_wide_mlp"]:
        own = len(windowed) - shared
        found["feed_forward_length"] = [size] * own + [2 * size] * shared
    if config["enable_moe_block"]:
        found |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
    return found


def _of_full_layers(config: Json) -> Json:
    """The fields that differ in layers without a window."""
    own: Json = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]
    return own


def gemma4_divisors(config: Json) -> list[float]:
    """The divisors of rope's frequencies in full layers: those that do not turn have a large one."""
    size, rope = _of_full_layers(config)["head_dim"], config["rope_parameters"]["full_attention"]
    num_turned = int(size * rope["partial_rotary_factor"] / 2)
    return [1.0] * num_turned + [1e30] * (size // 2 - num_turned)


def _router(config: Json) -> dict[str, Any]:
    """Keys of families whose router has sigmoids."""
    if config["model_type"] == "minimax_m2":
        return {"expert_gating_func": 2, "expert_feed_forward_length": config["intermediate_size"]}
    if config["model_type"] != "glm4_moe":
        return {}
    num_mtp = config.get("num_nextn_predict_layers") or 0
    return {
        "block_count": config["num_hidden_layers"] + num_mtp, "nextn_predict_layers": num_mtp,
        "expert_count": config["n_routed_experts"], "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"], "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"], "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
    }  # fmt: skip


def _ernie4_5(config: Json) -> dict[str, Any]:
    if config["model_type"] == "ernie4_5":
        return {}
    return {
        "expert_count": config["moe_num_experts"], "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_count": config["moe_num_shared_experts"],
    }  # fmt: skip
