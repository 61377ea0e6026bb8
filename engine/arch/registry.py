"""The table of architectures that can be served. Turns config.json into an `Arch`, and an `Arch` into its weight map.

To add a family, write one short file in `families` and one line in `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inferd.engine.arch.description import Activation, Arch, ArchError
from inferd.engine.arch.draft_heads import (
    DEEPSEEK,
    MIMO,
    MTP_LAYERS,
    MTPNames,
    as_stored,
    describe_draft_head,
    eagle3_weights,
    is_draft_head,
    mtp_layer,
    mtp_weights,
)
from inferd.engine.arch.encoder_base import num_labels
from inferd.engine.arch.families import (
    ernie45,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4_moe,
    gpt_oss,
    granite,
    granite4,
    lfm2,
    llama,
    mimo,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    seed_oss,
    smollm3,
    starcoder2,
)
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.modelled import Modelled
from inferd.engine.arch.quantization.read import read_quantization
from inferd.engine.arch.shown import shown
from inferd.engine.arch.stored import Stored
from inferd.engine.arch.tensors import LLAMA_NAMES, TensorNames, modelled_weights, weight_map
from inferd.engine.arch.weights import WeightMap
from inferd.engine.arch.wrappers import known_wrappers, text_config, wrapper_of


@dataclass(frozen=True, slots=True)
class Family:
    """The function that reads a family's config, and the names of its tensors."""

    describe: Callable[[str, Fields], Arch]
    names: TensorNames = LLAMA_NAMES
    split_names: TensorNames | None = None
    """Names of the tensors if matrices that `names` has as one lie one by one (`Arch.splits_matrices`); None if it has
    none of such."""
    mtp_layers: str = ""
    """Beginning of the names of the tensors of MTP layers; empty if its checkpoints have none of such names."""
    mtp: MTPNames | None = None
    """Names of the first MTP layer's tensors, if it can draft."""

    def names_of(self, splits_matrices: bool) -> TensorNames:
        return self.split_names if splits_matrices and self.split_names is not None else self.names


_FAMILIES: dict[str, Family] = {
    "Ernie4_5ForCausalLM": Family(ernie45.describe),
    "Ernie4_5_MoeForCausalLM": Family(
        ernie45.describe_with_experts, ernie45.NAMES_WITH_EXPERTS, mtp_layers=ernie45.MTP_LAYERS
    ),
    "Exaone4ForCausalLM": Family(exaone4.describe, exaone4.NAMES),
    "Gemma2ForCausalLM": Family(gemma2.describe, gemma2.NAMES),
    "Gemma3ForCausalLM": Family(gemma3.describe, gemma3.NAMES),
    "Gemma4ForCausalLM": Family(gemma4.describe, gemma4.NAMES),
    "Glm4ForCausalLM": Family(glm.describe_with_post_norms, glm.NAMES_WITH_POST_NORMS),
    "Glm4MoeForCausalLM": Family(glm4_moe.describe, glm4_moe.NAMES, mtp=DEEPSEEK),
    "GlmForCausalLM": Family(glm.describe, glm.NAMES),
    "GptOssForCausalLM": Family(gpt_oss.describe, gpt_oss.NAMES),
    "GraniteForCausalLM": Family(granite.describe),
    "GraniteMoeHybridForCausalLM": Family(granite4.describe, granite4.NAMES, granite4.SPLIT_NAMES),
    "Lfm2ForCausalLM": Family(lfm2.describe, lfm2.NAMES),
    "Lfm2MoeForCausalLM": Family(lfm2.describe_with_experts, lfm2.NAMES),
    "LlamaForCausalLM": Family(llama.describe),
    "MiMoForCausalLM": Family(mimo.describe, mtp_layers=MTP_LAYERS, mtp=MIMO),
    "MiniMaxM2ForCausalLM": Family(minimax_m2.describe, minimax_m2.NAMES),
    "Ministral3ForCausalLM": Family(ministral3.describe),
    "MistralForCausalLM": Family(mistral.describe),
    "MixtralForCausalLM": Family(mixtral.describe, mixtral.NAMES),
    "Olmo2ForCausalLM": Family(olmo2.describe, olmo2.NAMES),
    "Olmo3ForCausalLM": Family(olmo3.describe, olmo3.NAMES),
    "OlmoeForCausalLM": Family(olmoe.describe),
    "Phi3ForCausalLM": Family(phi3.describe, phi3.NAMES),
    "Qwen2ForCausalLM": Family(qwen2.describe),
    "Qwen2MoeForCausalLM": Family(qwen3_moe.describe_qwen2),
    "Qwen3ForCausalLM": Family(qwen3.describe),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.describe),
    "Qwen3NextForCausalLM": Family(
        qwen3_5.describe_next,
        qwen3_5.NAMES_OF_NEXT,
        qwen3_5.SPLIT_NAMES_OF_NEXT,
        mtp_layers=qwen3_5.MTP_LAYERS,
    ),
    "Qwen3_5ForCausalLM": Family(qwen3_5.describe, mtp_layers=qwen3_5.MTP_LAYERS),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5.describe_with_experts, mtp_layers=qwen3_5.MTP_LAYERS),
    "SeedOssForCausalLM": Family(seed_oss.describe),
    "SmolLM3ForCausalLM": Family(smollm3.describe),
    "Starcoder2ForCausalLM": Family(starcoder2.describe, starcoder2.NAMES),
}


def known_architectures() -> tuple[str, ...]:
    """Names of the architectures that `describe` knows, in alphabetical order, without the wrappers of such models."""
    return tuple(sorted(_FAMILIES))


_GENERATING, _CLASSIFYING = "ForCausalLM", "ForSequenceClassification"
_BIDIRECTIONAL = "Bidirectional"
_BODIES = (
    f"{_BIDIRECTIONAL}{_CLASSIFYING}", f"{_BIDIRECTIONAL}Model", f"Text{_CLASSIFYING}", _CLASSIFYING, "TextModel",
    "Model",
)  # fmt: skip
"""Ends of the names of a family's models without the head from which tokens are drawn."""
_LABELS_OF = {"avg": True, "last": False}
"""Value of `pooling` of a classifier whose tokens see those behind them -> whether it reads the mean."""


def is_body(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a family's model without the head from which tokens are drawn: an embedding model,
    such as `Qwen3Model`, a classifier, such as `Qwen3ForSequenceClassification`, or an encoder."""
    match config.get("architectures"):
        case [str(name)] if _generating(name) in _FAMILIES:
            return name not in _FAMILIES or sees_behind(config)
    return False


def _generating(name: str) -> str:
    """Name of the architecture with that head."""
    for end in _BODIES:
        known = name.removesuffix(end) + _GENERATING
        if name.endswith(end) and known in _FAMILIES:
            return known
    return name


def sees_behind(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a decoder whose tokens see those behind them too, so that it serves as an encoder."""
    match config.get("architectures"):
        case [str(name)] if _generating(name) in _FAMILIES:
            is_named = name.removesuffix(_CLASSIFYING).removesuffix("Model").endswith(_BIDIRECTIONAL)
            flags = config.get("is_causal") is False, config.get("use_bidirectional_attention") is True
            return is_named or any(flags)
    return False


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether `describe` knows the architecture that config.json names. True if it names none: `describe` then says
    so."""
    if is_draft_head(config) or wrapper_of(config) is not None:
        return True
    match config.get("architectures"):
        case [str(name)]:
            return _generating(name) in _FAMILIES
    return True


def describe(config: Mapping[str, Any]) -> Arch:
    """The decoder or draft head that a parsed config.json describes; of a wrapper, the decoder of its text part.

    Raises `ArchError` for an unknown architecture, a missing field, or a value that is not supported or contradicts
    another one.
    """
    if is_draft_head(config):
        return describe_draft_head(config)
    config = text_config(config)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ArchError(f"config.json: architectures must be a list of one name, but it is {shown(names)}")
    architecture = _generating(names[0])
    if architecture not in _FAMILIES:
        known = ", ".join((*known_architectures(), *known_wrappers()))
        raise ArchError(f"unknown architecture {shown(names[0])}; known are: {known}")
    fields, family = Fields(config, architecture), _FAMILIES[architecture]
    arch = family.describe(architecture, fields)
    if family.split_names is not None:
        arch = replace(arch, splits_matrices=fields.boolean("splits_matrices", default=False))
    if is_body(config):
        arch = replace(arch, has_head=False, tie_embeddings=False)
    if sees_behind(config):
        arch = _as_encoder(arch, fields)
    if names[0].endswith(_CLASSIFYING):
        arch = replace(arch, num_labels=num_labels(fields))
    return _as_stored(arch, fields, family)


def _as_encoder(arch: Arch, fields: Fields) -> Arch:
    """The same decoder with tokens that see those behind them. Raises `ArchError` for parts that this kind of attention
    does not have."""
    for has_part, part in (
        (arch.recurrent is not None, "recurrent layers"),
        (arch.has_sinks, "attention sinks"),
        (arch.attention_softcap is not None, "a soft cap of attention"),
    ):
        if has_part:
            raise ArchError(f"{arch.architecture}: tokens that see those behind them are not supported with {part}")
    labels_mean = fields.choice("pooling", _LABELS_OF, default="last")
    if fields.positive("temperature", 1.0) != 1.0:
        raise fields.refuse("temperature", "must be 1: other temperatures of logits are not supported")
    return replace(arch, is_bidirectional=True, labels_mean=labels_mean)


def describe_modelled(modelled: Modelled) -> Arch:
    """The decoder of a family that is not native. Of its layers it tells attention and tensors alone."""
    num_layers = len(modelled.windows)
    return Arch(
        architecture=modelled.architecture,
        vocab_size=modelled.vocab_size,
        hidden_size=modelled.hidden_size,
        intermediate_size=modelled.widest,
        num_layers=num_layers,
        num_heads=modelled.num_heads,
        num_kv_heads=modelled.num_kv_heads,
        head_dim=modelled.head_dim,
        max_positions=modelled.max_positions,
        norm_eps=0.0,
        activation=Activation.SILU,
        ropes=(None,) * num_layers,
        attention_scale=modelled.attention_scale,
        attention_softcap=modelled.attention_softcap,
        tie_embeddings=modelled.tie_embeddings,
        dtype=modelled.dtype,
        windows=modelled.windows,
        modelled=modelled,
    )


def _as_stored(arch: Arch, fields: Fields, family: Family) -> Arch:
    """`arch` with the quantization from config.json. Raises `ArchError` if the weight map cannot place its tensors."""
    names = family.names_of(arch.splits_matrices)
    sources = weight_map(arch, names).sources if fields.has("quantization_config") else ()
    modules = [source.tensor.removesuffix(".weight") for source in sources if source.may_be_quantized]
    has_own_head = arch.has_head and not arch.tie_embeddings
    stored = read_quantization(fields, modules, has_own_head=has_own_head)
    if stored is None:
        return arch
    arch = replace(arch, stored=stored)
    weight_map(arch, names)  # refuses shapes that a format cannot hold
    return arch


def tensor_names(architecture: str, *, splits_matrices: bool = False) -> TensorNames:
    """Names of the tensors of a known architecture. `splits_matrices`: as of `Arch`."""
    return _FAMILIES[_generating(architecture)].names_of(splits_matrices)


def weights(arch: Arch) -> WeightMap:
    """The tensors that a checkpoint of `arch` must hold."""
    if arch.modelled is not None:
        return modelled_weights(arch.modelled)
    family = _FAMILIES.get(arch.architecture)
    if arch.draft_head is not None:
        if family is None or family.mtp is None:
            return eagle3_weights(arch)
        return mtp_weights(arch, family.mtp, family.names)
    assert family is not None
    found = weight_map(arch, family.names_of(arch.splits_matrices))
    return replace(
        found,
        unread=(*found.unread, family.mtp_layers) if family.mtp_layers else found.unread,
        mtp_layer=family.mtp.layer.format(arch.num_layers) if family.mtp is not None and family.mtp.is_behind else "",
    )


def describe_mtp_layer(config: Mapping[str, Any]) -> Arch:
    """The first MTP layer of the model that a parsed config.json describes. Raises `ArchError` if there can be none."""
    arch = describe(config)
    names = None if arch.draft_head is not None else _FAMILIES[arch.architecture].mtp
    if names is None:
        known = ", ".join(name for name, family in _FAMILIES.items() if family.mtp is not None)
        raise ArchError(f"{arch.architecture} has no MTP layers that can draft; models with such layers are: {known}")
    if arch.stored is not None:
        raise ArchError(f"the MTP layer of a quantized checkpoint of {arch.architecture} is not supported")
    return mtp_layer(arch, names)


def as_found(arch: Arch, dtypes: Mapping[str, str]) -> Arch:
    """`arch` with what config.json does not say: the dtypes of a quantized checkpoint's scales, or the names of a draft
    head's tensors. `dtypes` has the dtype of each tensor, as safetensors headers name it."""
    if arch.draft_head is not None:
        return as_stored(arch, dtypes)
    if arch.stored is None:
        return arch
    found = {
        source.module: source.format.found(
            {tensor.suffix: dtypes[name] for name, tensor in source.tensors.items() if name in dtypes}
        )
        for source in weights(arch).quantized
    }
    head = found.pop("lm_head", None)
    plain = {module: None for module, form in arch.stored.exceptions if form is None}
    return replace(arch, stored=Stored.of({**plain, **found}, head))
