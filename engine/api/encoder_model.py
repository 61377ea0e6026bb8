"""An encoder before anything is loaded: its description, and a check that its weight files agree with its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.model import ModelFacts, narrow_dtype
from inferd.engine.api.modelling import ModelImpl
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.encoder_registry import described_as_encoder, is_encoder, weights_of
from inferd.engine.arch.gguf.formats import encoder_with_blocks, in_words, with_blocks
from inferd.engine.arch.gguf.tensors import PlacedTensor


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """An encoder that can be served, by its config.json alone or with the headers of its weights."""

    path: Path
    arch: EncoderArch | Arch
    dtype: str
    """Dtype of the stored weights: "bfloat16", "float16" or "float32"."""
    matrix_dtype: str = "float32"
    """Dtype of all matrices; "float32" if they differ."""

    blocks: str = ""
    """The types of blocks in a GGUF file, and whether they are kept or dequantized."""

    is_embedded = False
    """Whether the wheel ships it."""
    scope = ""
    """As of `ModelFacts`."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> EncoderFacts:
        """Raises `ModelError` for an unusable config, or weights that contradict the config."""
        arch = _described(checkpoint.path, checkpoint.config)
        found = checkpoint.tensors_of(arch)
        placed = {name: info.gguf for name, info in found.items() if info.gguf is not None}
        if checkpoint.keeps_blocks:
            arch = _with_blocks(arch, placed)
        needed = weights_of(arch)
        contradictions = needed.compare({name: info.shape for name, info in found.items()})
        if contradictions:
            stated = "the metadata" if placed else "config.json"
            raise ModelError(f"{checkpoint.path}: the weights contradict {stated}: {contradictions}")
        dtypes = {name: info.dtype for name, info in found.items() if info.gguf is None}
        for name, stored, known in needed.wrong_dtypes(dtypes):
            raise ModelError(
                f"{checkpoint.path}: {name} is stored as {stored}; by config.json it is one of: {', '.join(known)}"
            )
        matrices = {found[source.tensor].dtype for source in needed.sources if len(source.shape) == 2}
        return cls(checkpoint.path, arch, checkpoint.dtype, narrow_dtype(matrices), in_words(arch, placed.values()))

    @classmethod
    def of_config(cls, path: Path, config: Mapping[str, Any]) -> EncoderFacts:
        """From a parsed config.json alone, which is enough for a memory plan. Raises `ModelError`."""
        arch = _described(path, config)
        return cls(path, arch, arch.dtype, arch.dtype)

    @property
    def num_params(self) -> int:
        """Number of weights."""
        return weights_of(self.arch).num_elements


def _with_blocks(arch: Arch | EncoderArch, placed: Mapping[str, PlacedTensor]) -> Arch | EncoderArch:
    matrices = weights_of(arch)
    if isinstance(arch, EncoderArch):
        return encoder_with_blocks(arch, matrices, placed)
    return with_blocks(arch, matrices, placed)


def _described(path: Path, config: Mapping[str, Any]) -> EncoderArch | Arch:
    try:
        return described_as_encoder(config)
    except ArchError as error:
        raise ModelError(f"{path}: {error}") from error


def facts_of(checkpoint: Checkpoint, model_impl: ModelImpl = "native") -> ModelFacts | EncoderFacts:
    """A model of either kind. Raises `ModelError` as their own constructors do."""
    if not is_encoder(checkpoint.config):
        return ModelFacts.of(checkpoint, model_impl)
    _check_impl(checkpoint.path, model_impl)
    return EncoderFacts.of(checkpoint)


def config_facts_of(path: Path, config: Mapping[str, Any], model_impl: ModelImpl) -> ModelFacts | EncoderFacts:
    """A model of either kind, by its config.json alone. Raises `ModelError`."""
    if not is_encoder(config):
        return ModelFacts.of_config(path, config, model_impl)
    _check_impl(path, model_impl)
    return EncoderFacts.of_config(path, config)


def _check_impl(path: Path, model_impl: ModelImpl) -> None:
    if model_impl == "transformers":
        raise ModelError(f"{path} is an encoder, which native code alone serves: give --model-impl auto")
