"""The table of encoders that can be served. Turns config.json into an `EncoderArch`, and that into its weight map.

To add a family, write one short file in `encoders` and one line in `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inferd.engine.arch import encoder_tensors, registry
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.encoder import Classifier, EncoderArch
from inferd.engine.arch.encoder_tensors import EncoderNames
from inferd.engine.arch.encoders import (
    albert,
    bert,
    deberta,
    distilbert,
    electra,
    eurobert,
    gte,
    jina_bert,
    jina_v3,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
    t5,
)
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.shown import shown
from inferd.engine.arch.tensors import named_in_full
from inferd.engine.arch.weights import Tensor, WeightMap

_PLAIN, _CLASSIFYING = ("Model", "ForMaskedLM"), "ForSequenceClassification"
"""Ends of the names of architectures: encoders whose head is not read, and encoders with a classifier."""


@dataclass(frozen=True, slots=True)
class Family:
    """The functions that read a family's config, and the names of its tensors."""

    describe: Callable[[str, Fields], EncoderArch]
    classifier: Callable[[Fields], Classifier] | None
    """None: the family has no classifier, and no head for masked tokens."""
    names: EncoderNames

    @property
    def ends(self) -> tuple[str, ...]:
        """Ends of its architectures' names."""
        return _PLAIN[:1] if self.classifier is None else (*_PLAIN, _CLASSIFYING)


_JINA_V3 = Family(jina_v3.describe, jina_v3.classifier, jina_v3.NAMES)
_GTE = Family(gte.describe, gte.classifier, gte.NAMES)
_ROBERTA = Family(roberta.describe, roberta.classifier, roberta.NAMES)
_FAMILIES: dict[str, Family] = {
    "Albert": Family(albert.describe, albert.classifier, albert.NAMES),
    "Bert": Family(bert.describe, bert.classifier, bert.NAMES),
    "Camembert": _ROBERTA,
    "DebertaV2": Family(deberta.describe, deberta.classifier, deberta.NAMES),
    "DistilBert": Family(distilbert.describe, distilbert.classifier, distilbert.NAMES),
    "Electra": Family(electra.describe, electra.classifier, electra.NAMES),
    "EuroBert": Family(eurobert.describe, eurobert.classifier, eurobert.NAMES),
    "Gte": _GTE,
    "JinaBert": Family(jina_bert.describe, jina_bert.classifier, jina_bert.NAMES),
    "JinaEmbeddingsV3": _JINA_V3,
    "MPNet": Family(mpnet.describe, mpnet.classifier, mpnet.NAMES),
    "ModernBert": Family(modernbert.describe, modernbert.classifier, modernbert.NAMES),
    "New": _GTE,
    "NomicBert": Family(nomic_bert.describe, nomic_bert.classifier, nomic_bert.NAMES),
    "Roberta": _ROBERTA,
    "T5Encoder": Family(t5.describe, None, t5.NAMES),
    "XLMRoberta": _ROBERTA,
    "XLMRobertaFlash": _JINA_V3,
}
"""Families by the beginning of their architectures' names."""

_REFUSED = {
    "HF_ColBERT": "it gives a vector for each token through a matrix of its own, which is not computed",
    "NVEmbedModel": "it pools by an attention to learned vectors, which is not computed",
    "NeoBERT": "its layers are not computed",
    "NeoBERTForSequenceClassification": "its layers are not computed",
}
"""Other encoders, by the names of their architectures -> why they are refused."""

_ARCHITECTURES = {name + end: family for name, family in _FAMILIES.items() for end in family.ends}


def known_encoders() -> tuple[str, ...]:
    """Names of the architectures that `describe_encoder` knows, in alphabetical order."""
    return tuple(sorted(_ARCHITECTURES))


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture that `describe_encoder` knows, or refuses for a reason of its own, or
    is that of a decoder whose tokens see those behind them too."""
    match config.get("architectures"):
        case [str(name)] if name in _ARCHITECTURES or name in _REFUSED:
            return True
    return registry.sees_behind(config)


def described_as_encoder(config: Mapping[str, Any]) -> EncoderArch | Arch:
    """The encoder of a config for which `is_encoder` is true. Raises `ArchError`."""
    return registry.describe(config) if registry.sees_behind(config) else describe_encoder(config)


def describe_encoder(config: Mapping[str, Any]) -> EncoderArch:
    """The encoder that a parsed config.json describes.

    Raises `ArchError` for an unknown architecture, a missing field, or a value that is not supported.
    """
    architecture = _architecture(config)
    family, fields = _ARCHITECTURES[architecture], Fields(config, architecture)
    if fields.has("quantization_config"):
        raise ArchError(f"{architecture}: a quantized checkpoint of an encoder is not supported; give a plain one")
    arch = family.describe(architecture, fields)
    if family.classifier is None or not architecture.endswith(_CLASSIFYING):
        return arch
    return replace(arch, classifier=family.classifier(fields))


def encoder_names(architecture: str) -> EncoderNames:
    """Names of the tensors of an architecture that `describe_encoder` knows."""
    return _ARCHITECTURES[architecture].names


def encoder_weights(arch: EncoderArch) -> WeightMap:
    """The tensors that a checkpoint of `arch` must hold, by the names of `encoder_tensors_of`."""
    return encoder_tensors.weight_map(arch, encoder_names(arch.architecture))


def weights_of(arch: Arch | EncoderArch) -> WeightMap:
    """The tensors that a checkpoint of a model of either kind must hold."""
    return encoder_weights(arch) if isinstance(arch, EncoderArch) else registry.weights(arch)


def encoder_tensors_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an encoder's checkpoint by the names that `weights_of` uses. Raises `ArchError`."""
    if registry.sees_behind(config):
        return named_in_full(tensors)
    return encoder_tensors.named_in_full(tensors, _ARCHITECTURES[_architecture(config)].names)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    match names:
        case [str(name)] if name in _ARCHITECTURES:
            is_jinas = name.startswith("XLMRoberta") and jina_v3.is_jinas(config)
            return f"XLMRobertaFlash{name.removeprefix('XLMRoberta').removeprefix('Flash')}" if is_jinas else name
        case [str(name)] if name in _REFUSED:
            raise ArchError(f"{name} cannot be served: {_REFUSED[name]}; known are: {', '.join(known_encoders())}")
    known = ", ".join(known_encoders())
    rule = "architectures must be that of an encoder"
    raise ArchError(f"config.json: {rule}, but it is {shown(names)}; known are: {known}")
