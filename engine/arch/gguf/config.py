"""Turns the metadata of a GGUF file into the fields of the config.json that the model was converted from.

So each family file reads both. It knows the keys that llama.cpp writes, and the constants that llama.cpp does not write
because it has them in its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inferd.engine.arch.gguf.header import GgufError, GgufTensor, Value
from inferd.engine.arch.gguf.types import PLAIN
from inferd.engine.arch.shown import shown

LONG_FACTORS, SHORT_FACTORS, ROPE_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
FACTOR_TENSORS = (LONG_FACTORS, SHORT_FACTORS, ROPE_FACTORS)
"""Tensors that hold a divisor for each rotary frequency. They become fields of the config."""

Config = dict[str, Any]

_KEY, _VALUE, _ROTATED = "attention.key_length", "attention.value_length", "rope.dimension_count"
"""Sizes of a head of K and of V, and of the part that rope turns."""


class Metadata:
    """The metadata of one file, by keys without the architecture's name, and what its tensors tell about the model."""

    def __init__(
        self,
        values: Mapping[str, Value],
        tensors: Mapping[str, GgufTensor],
        factors: Mapping[str, tuple[float, ...]],
    ) -> None:
        """`factors`: content of `FACTOR_TENSORS`, as far as the file has them."""
        self.values, self.tensors, self.factors = values, tensors, factors
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str):
            raise GgufError(f"general.architecture must be a text, but is {shown(architecture)}")
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise GgufError(f"the metadata lacks {self.architecture}.{key}")
        return value

    def whole(self, key: str) -> int:
        """A number to compute with. The family file checks the others."""
        value = self.required(key)
        if type(value) is not int or value < 1:
            raise self.refuse(key, "must be a whole number of at least 1")
        return value

    def refuse(self, key: str, rule: str) -> GgufError:
        return GgufError(f"{self.architecture}.{key} {rule}, but is {shown(self.get(key))}")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How the files of one architecture differ from Llama's."""

    architecture: str
    """The name in config.json's `architectures`."""
    fields: Callable[[Metadata], Config] = lambda _: {}
    """Fields of config.json that only this family has, or has otherwise."""
    pairs_rows: bool = False
    """Whether the rows of q and k are stored in pairs: the two that rotary embedding turns together follow one
    another."""
    norm_excess: float = 0.0
    """Number that the file adds to every weight of a norm."""
    mlp_norm: str = "ffn_norm"
    """Name of the norm before the MLP."""
    reads: frozenset[str] = frozenset()
    """Keys of `_NEUTRAL` that `fields` reads."""


_NEUTRAL: Mapping[str, object] = {
    "expert_count": 0, "expert_shared_count": 0, "expert_group_count": 0, "leading_dense_block_count": 0,
    "expert_weights_scale": 1.0, "expert_gating_func": 1, "nextn_predict_layers": 0, "use_parallel_residual": False,
    "logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0, "attention.scale": 0.0, "attention.output_scale": 0.0,
    "attention.max_alibi_bias": 0.0, "attention.clamp_kqv": 0.0, "attention.causal": True,
    "attention.sliding_window": 0, "attention.temperature_length": 0, "attention.temperature_scale": 0.0,
    "attention.shared_kv_layers": 0, "altup.num_inputs": 0,
}  # fmt: skip
"""Keys that change what a model computes, and the value at which they do not. A family that does not read such a key
refuses another value."""


def _llama(of: Metadata) -> Config:
    """Files of Mistral and Mixtral state the same architecture. Only Mistral has a window, for all layers, and only
    Mixtral experts."""
    window = of.get("attention.sliding_window")
    if of.get("expert_count"):
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window or None}
        return {**names, "num_local_experts": of.get("expert_count"), **_chosen(of)}
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _olmo2(of: Metadata) -> Config:
    """OLMo 3's files state the same architecture. Only OLMo 3 has windows."""
    window, layers = of.get("attention.sliding_window"), of.get("attention.sliding_window_pattern")
    if not window:
        return {}
    config: Config = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window}
    return config | ({"layer_types": _layer_types(layers)} if isinstance(layers, tuple) else {})


def _exaone4(of: Metadata) -> Config:
    """llama.cpp has the windows of the large model in its code."""
    window = of.get("attention.sliding_window") or (4096 if _num_layers(of) == 64 else None)
    return {"sliding_window": window}


def _layer_types(pattern: tuple[Any, ...]) -> list[str]:
    return ["sliding_attention" if is_windowed else "full_attention" for is_windowed in pattern]


def _olmoe(of: Metadata) -> Config:
    return {"num_experts": of.required("expert_count"), "norm_topk_prob": False, **_chosen(of)}


def _gpt_oss(of: Metadata) -> Config:
    """llama.cpp has in its code that the ends of YaRN's interpolation are not rounded."""
    scaling = _rope_scaling(of)
    return {
        "num_local_experts": of.required("expert_count"),
        "intermediate_size": of.required("expert_feed_forward_length"),
        "sliding_window": of.required("attention.sliding_window"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
        **_chosen(of),
    }


def _qwen3_moe(of: Metadata) -> Config:
    sizes = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
    return {name: of.required(key) for name, key in sizes.items()} | {"norm_topk_prob": True, **_chosen(of)}


def _chosen(of: Metadata) -> Config:
    return {"num_experts_per_tok": of.required("expert_used_count")}


def _gemma2(of: Metadata) -> Config:
    names = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
    }
    found = {name: of.get(key) for name, key in names.items() if of.get(key) is not None}
    return {**_gemma(of, largest=46), **found}


def _gemma3(of: Metadata) -> Config:
    window, pattern = of.get("attention.sliding_window"), of.get("attention.sliding_window_pattern", 6)
    if not window:
        layers: Config = {"layer_types": ["full_attention"] * _num_layers(of)}
    elif isinstance(pattern, tuple):
        layers = {"layer_types": _layer_types(pattern)}
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
    scalar = of.get(_KEY, 256)
    if _num_layers(of) == largest:
        scalar = of.whole("embedding_length") // of.whole("attention.head_count")
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _granite(of: Metadata) -> Config:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: of.get(key) for name, key in names.items() if of.get(key)}


def _phi3(of: Metadata) -> Config:
    original = of.get("rope.scaling.original_context_length", of.required("context_length"))
    config: Config = {
        "sliding_window": of.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }
    head_dim = _head_dim(of) or of.whole("embedding_length") // of.whole("attention.head_count")
    rotated = head_dim if of.get(_ROTATED) is None else of.whole(_ROTATED)
    if rotated != head_dim:
        # Half a number more, so that the product with head_dim is rounded down to the same number.
        config["partial_rotary_factor"] = (rotated + 0.5) / head_dim
    return config


def _starcoder2(of: Metadata) -> Config:
    return {
        "norm_epsilon": of.required("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in of.tensors,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": of.get("attention.sliding_window") or None,
    }


_WINDOW = frozenset({"attention.sliding_window"})
_EXPERTS = frozenset({"expert_count"})
_CAP = frozenset({"final_logit_softcapping"})
FAMILIES: dict[str, GgufFamily] = {
    "exaone4": GgufFamily("Exaone4ForCausalLM", _exaone4, reads=_WINDOW),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM", _gemma2, norm_excess=1.0, reads=_WINDOW | _CAP | {"attn_logit_softcapping"}
    ),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _gemma3, norm_excess=1.0, reads=_WINDOW | _CAP),
    "gpt-oss": GgufFamily("GptOssForCausalLM", _gpt_oss, mlp_norm="post_attention_norm", reads=_WINDOW | _EXPERTS),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        _granite,
        pairs_rows=True,
        reads=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    ),
    "llama": GgufFamily("LlamaForCausalLM", _llama, pairs_rows=True, reads=_WINDOW | _EXPERTS),
    "olmo2": GgufFamily("Olmo2ForCausalLM", _olmo2, reads=_WINDOW),
    "olmoe": GgufFamily("OlmoeForCausalLM", _olmoe, reads=_EXPERTS),
    "phi3": GgufFamily("Phi3ForCausalLM", _phi3, reads=_WINDOW),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _qwen3_moe, reads=_EXPERTS),
    "seed_oss": GgufFamily("SeedOssForCausalLM", mlp_norm="post_attention_norm"),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", pairs_rows=True),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", _starcoder2, reads=_WINDOW),
}
"""Architectures that are read, by their names in `general.architecture`."""


def family_of(of: Metadata) -> GgufFamily:
    family = FAMILIES.get(of.architecture)
    if family is None:
        raise GgufError(f"unknown architecture {shown(of.architecture)}; known are: {', '.join(FAMILIES)}")
    return family


def config_of(of: Metadata) -> Config:
    """config.json of the model. The family file checks the values. Raises `GgufError` for a key that is missing, and
    for one whose value asks for something that the family does not compute."""
    family = family_of(of)
    for key, neutral in _NEUTRAL.items():
        if key not in family.reads and of.get(key, neutral) not in (neutral, None):
            raise of.refuse(key, f"must be {neutral!r} in this family")
    heads = of.required("attention.head_count")
    config = {
        "architectures": [family.architecture],
        "model_type": of.architecture,
        "vocab_size": _vocab_size(of),
        "hidden_size": of.required("embedding_length"),
        "intermediate_size": of.required("feed_forward_length"),
        "num_hidden_layers": _num_layers(of),
        "num_attention_heads": heads,
        "num_key_value_heads": of.get("attention.head_count_kv", heads),
        "max_position_embeddings": of.required("context_length"),
        "rms_norm_eps": of.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": of.get("rope.freq_base", 1e4),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in of.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in of.tensors,
        "tie_word_embeddings": "output.weight" not in of.tensors,
        "dtype": _dtype(of),
        "head_dim": _head_dim(of),
        "rope_scaling": _rope_scaling(of),
    }
    return {name: value for name, value in config.items() if value is not None} | family.fields(of)


def _num_layers(of: Metadata) -> int:
    """The number of layers, at most as many as the file has tensors: some fields are lists with an item a layer."""
    num_layers = of.whole("block_count")
    if num_layers > len(of.tensors):
        raise of.refuse("block_count", f"must be at most the number of tensors, {len(of.tensors)}")
    return num_layers


def _vocab_size(of: Metadata) -> int:
    embedding = of.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError("the file lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _head_dim(of: Metadata) -> int | None:
    """Size of a head; None if the file leaves it to be computed."""
    stated = {name: of.whole(name) for name in (_KEY, _VALUE, _ROTATED) if of.get(name) is not None}
    if stated.get(_VALUE, stated.get(_KEY)) != stated.get(_KEY):
        raise of.refuse(_VALUE, f"must be {_KEY}, {shown(stated.get(_KEY))}")
    if of.architecture == "phi3":
        # Its rope turns a part of each head.
        return stated.get(_KEY)
    found = stated.get(_KEY, stated.get(_ROTATED))
    if stated.get(_ROTATED, found) != found:
        raise of.refuse(_ROTATED, f"must be the size of a head, {shown(found)}")
    return found


def _dtype(of: Metadata) -> str:
    """Dtype of most of the weights; bfloat16 if most of them are quantized."""
    bytes_by_type: dict[str, int] = {}
    for tensor in of.tensors.values():
        bytes_by_type[tensor.type.name] = bytes_by_type.get(tensor.type.name, 0) + tensor.num_bytes
    most = max(bytes_by_type, key=lambda name: bytes_by_type[name], default="F32")
    return dict(zip(PLAIN, ("float32", "float16", "bfloat16"), strict=True)).get(most, "bfloat16")


def _rope_scaling(of: Metadata) -> Config | None:
    kind = of.get("rope.scaling.type", "linear" if of.get("rope.scaling.factor") else "none")
    factor = of.get("rope.scaling.factor", 1.0)
    original = of.get("rope.scaling.original_context_length", of.required("context_length"))
    if of.factors:
        if kind not in ("none", "longrope") and factor != 1.0:
            raise of.refuse("rope.scaling.type", f"must be none beside the tensor {next(iter(of.factors))}")
        return _scaling_by_factors(of, original)
    match kind:
        case "none" | "longrope":
            return None
        case "linear":
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
            optional = {name: of.get(f"rope.scaling.{key}") for name, key in names.items()}
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                **{name: value for name, value in optional.items() if value is not None},
            }
        case _:
            raise of.refuse("rope.scaling.type", "must be none, linear, yarn or longrope")


def _scaling_by_factors(of: Metadata, original: int) -> Config:
    """Factors of Llama 3, which hold for every length, or LongRoPE's two lists."""
    both = of.factors.get(ROPE_FACTORS)
    short, long = of.factors.get(SHORT_FACTORS, both), of.factors.get(LONG_FACTORS, both)
    if short is None or long is None:
        raise GgufError(f"the file must have both {SHORT_FACTORS} and {LONG_FACTORS}, or {ROPE_FACTORS}")
    config: Config = {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": original,
        "attention_factor": 1.0 if both is not None else of.get("rope.scaling.attn_factor"),
    }
    return {name: value for name, value in config.items() if value is not None}
