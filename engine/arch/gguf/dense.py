"""The fields of config.json of families with one MLP in each layer, from the metadata of a GGUF file; and those of
Mixtral, whose files state Llama's architecture.

llama.cpp has some constants in its code and does not write them. They are here, and in the other files of families.
"""

from __future__ import annotations

from typing import Any

from inferd.engine.arch.gguf.metadata import KEY, Config, Metadata, num_layers
from inferd.engine.arch.gguf.ropes import rope_scaling


def llama(of: Metadata) -> Config:
    """Files of Mistral and Mixtral state the same architecture. Only Mistral has a window, for all layers, and only
    Mixtral experts."""
    window = of.get("attention.sliding_window")
    if of.get("expert_count"):
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window or None}
        return {**names, "num_local_experts": of.get("expert_count"), **chosen(of)}
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def chosen(of: Metadata) -> Config:
    return {"num_experts_per_tok": of.required("expert_used_count")}


def olmo2(of: Metadata) -> Config:
    """OLMo 3's files state the same architecture. Only OLMo 3 has windows."""
    window, layers = of.get("attention.sliding_window"), of.get("attention.sliding_window_pattern")
    if not window:
        return {}
    config: Config = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window}
    return config | ({"layer_types": layer_types(layers)} if isinstance(layers, tuple) else {})


def exaone4(of: Metadata) -> Config:
    """llama.cpp has the windows of the large model in its code, for files that do not state them."""
    window = of.get("attention.sliding_window") or (4096 if num_layers(of) == 64 else None)
    pattern = of.get("attention.sliding_window_pattern")
    layers: Config = {"layer_types": layer_types(pattern)} if window and isinstance(pattern, tuple) else {}
    return {"sliding_window": window, **layers}


def gemma2(of: Metadata) -> Config:
    names = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
    }
    found = {name: of.get(key) for name, key in names.items() if of.get(key) is not None}
    return {**_gemma(of, largest=46), **found}


def gemma3(of: Metadata) -> Config:
    window, pattern = of.get("attention.sliding_window"), of.get("attention.sliding_window_pattern", 6)
    if not window:
        layers: Config = {"layer_types": ["full_attention"] * num_layers(of)}
    elif isinstance(pattern, tuple):
        layers = {"layer_types": layer_types(pattern)}
    else:
        layers = {"sliding_window_pattern": pattern}
    return {
        **_gemma(of, largest=62),
        **layers,
        "sliding_window": window or None,
        "rope_theta": of.get("rope.freq_base", 1e6),
        "rope_local_base_freq": of.get("rope.freq_base_swa", 1e4),
        "final_logit_softcapping": of.get("final_logit_softcapping") or None,
    }


def _gemma(of: Metadata, largest: int) -> Config:
    """`largest`: number of layers of the family's largest model. Its scores are scaled by another number than the head
    size, which the file does not state."""
    scalar = of.get(KEY, 256)
    if num_layers(of) == largest:
        scalar = of.whole("embedding_length") // of.whole("attention.head_count")
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def granite(of: Metadata) -> Config:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: of.get(key) for name, key in names.items() if of.get(key)}


def phi3(of: Metadata) -> Config:
    original = of.get("rope.scaling.original_context_length", of.required("context_length"))
    return {
        "sliding_window": of.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def starcoder2(of: Metadata) -> Config:
    return {
        "norm_epsilon": of.required("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in of.tensors,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": of.get("attention.sliding_window") or None,
    }


def ernie4_5(of: Metadata) -> Config:
    return {"use_bias": "blk.0.attn_q.bias" in of.tensors}


def mistral3(of: Metadata) -> Config:
    """Files of Mistral Small 3 state the same architecture. Only Ministral 3 has queries that grow."""
    growth, scaling = of.get("attention.temperature_scale"), rope_scaling(of)
    if not growth or scaling is None:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    return {"rope_scaling": None, "rope_parameters": {**scaling, "llama_4_scaling_beta": growth}}


def layer_types(pattern: tuple[Any, ...]) -> list[str]:
    return ["sliding_attention" if is_windowed else "full_attention" for is_windowed in pattern]
