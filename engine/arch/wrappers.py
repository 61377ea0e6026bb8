"""Models that also see, of which the text part alone is served: their config.json wraps a text model's, and their
tensors' names have a prefix.

It turns both into those of the text model, which the family files know. Weights of the other parts are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferd.engine.arch.description import ArchError
from inferd.engine.arch.shown import shown
from inferd.engine.arch.tensors import HEAD
from inferd.engine.arch.weights import Tensor

_GEMMA3 = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
}
"""Fields that the published Gemma 3 4B leaves to the defaults of transformers."""

_GEMMA4 = {
    "vocab_size": 262_144,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
}
_GEMMA4_UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
"""The same of Gemma 4."""

_TEXTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA3),
    "gemma4_text": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma4_unified_text": ("Gemma4ForCausalLM", _GEMMA4 | _GEMMA4_UNIFIED),
    "llama": ("LlamaForCausalLM", {}),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {}),
}
"""`model_type` of a text part -> (its architecture, fields that its checkpoints omit)."""

_WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified_text",),
    "InternVLForConditionalGeneration": ("llama", "qwen2", "qwen3"),
    "Mistral3ForConditionalGeneration": ("ministral3", "mistral"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text",),
}
"""Architecture of a wrapper -> the `model_type` that its text part may have. For text alone, each computes exactly what
that text model computes."""

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
    "model.language_model.": "model.",
}
"""Beginnings of the names of a text part's tensors, and what they are in a text model. Files have the first two or the
third. Lists of modules may have the others."""
_OTHER_PARTS = (
    "audio_tower.", "embed_audio.", "embed_vision.", "mtp.", "multi_modal_projector.", "vision_embedder.",
    "vision_tower.", "visual.",
)  # fmt: skip
"""Beginnings of the names of the other parts' tensors, with or without `model.` before them."""
_QUANTIZATION = "quantization_config"
_MAX_DEPTH = 8
"""Most objects and lists around a name in a quantization_config."""


def known_wrappers() -> tuple[str, ...]:
    return tuple(_WRAPPERS)


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """The architecture of a config that wraps a text model; None for any other config."""
    match config.get("architectures"):
        case [str(name)] if name in _WRAPPERS:
            return name
    return None


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text part, with the fields of the whole that it lacks. A config that wraps nothing is returned
    as it is. Raises `ArchError` for a text part that cannot be served."""
    wrapper = wrapper_of(config)
    if wrapper is None:
        return dict(config)
    own = config.get("text_config", {})
    if not isinstance(own, Mapping):
        raise ArchError(f"{wrapper}: text_config must be an object, but it is {type(own).__name__}")
    whole = {name: value for name, value in config.items() if not name.endswith("_config") or name == _QUANTIZATION}
    merged = {**whole, **{name: value for name, value in own.items() if value is not None}}
    kind, allowed = merged.get("model_type"), _WRAPPERS[wrapper]
    if kind not in allowed:
        raise ArchError(
            f"{wrapper}: model_type of text_config must be one of {', '.join(allowed)}, but it is {shown(kind)}"
        )
    architecture, defaults = _TEXTS[kind]
    merged = {**defaults, **merged, "architectures": [architecture]}
    for name in ("rope_scaling", "rope_parameters"):
        if name in merged:
            merged[name] = _rope_of_text(merged[name])
    if _QUANTIZATION in merged:
        merged[_QUANTIZATION] = _renamed(merged[_QUANTIZATION], _MAX_DEPTH)
    return merged


def _rope_of_text(rope: Any) -> Any:
    """M-RoPE turns each frequency by one of three positions, which are equal for text. Then it is the default rope."""
    if not isinstance(rope, Mapping):
        return rope
    return {
        name: "default" if name in ("type", "rope_type") and kind == "mrope" else kind for name, kind in rope.items()
    }


def _renamed(value: Any, depth: int) -> Any:
    """A quantization_config with the names of a text model in its lists of modules."""
    if isinstance(value, str):
        return text_name(value)
    if isinstance(value, list) and depth:
        return [_renamed(item, depth - 1) for item in value]
    if isinstance(value, Mapping) and depth:
        return {text_name(name): _renamed(item, depth - 1) for name, item in value.items()}
    return value


def text_name(text: str) -> str:
    """A name or an expression for names, without the prefix of a text part."""
    for mark in ("", "re:", "+:", "-:"):
        for prefix, ours in _PREFIXES.items():
            for written in (prefix, prefix.replace(".", r"\.")):
                if text.startswith(mark + written):
                    return mark + ours + text.removeprefix(mark + written)
    return text


def text_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the tensors of the text part by the names of a text model, those of the other parts). A name that belongs to no
    part stays, so that it is refused as unexpected. Raises `ArchError` if two tensors have one name."""
    text: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_OTHER_PARTS):
            others[name] = tensor
            continue
        ours = text_name(name)
        if ours in text:
            raise ArchError(f"two tensors are {ours} of the text part, of which one is named {name}")
        text[ours] = tensor
    return text, others


def part_of(name: str) -> str:
    """Name of the part that a tensor of another part belongs to: `vision_tower`."""
    return name.removeprefix("model.").partition(".")[0]


def is_tied(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether the head of the text part is the embedding, for a checkpoint with these tensors of text.

    If the files hold no head, it is. Configs do not tell: transformers has read the field of the whole in some years
    and that of the text part in others, with different defaults.
    """
    has_head = any(name.startswith(HEAD.removesuffix("weight")) for name in tensors)
    text = config.get("text_config")
    return not has_head or (isinstance(text, Mapping) and text.get("tie_word_embeddings") is True)
