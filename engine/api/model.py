"""A model before anything is loaded: its description, and a check that its weight files agree with its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.registry import as_found, describe, weights
from inferd.engine.arch.weights import KV_SCALE_SUFFIXES


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that can be served, by its config.json alone or with the headers of its weights."""

    path: Path
    arch: Arch
    dtype: str
    """Dtype of the stored weights: "bfloat16", "float16" or "float32"."""
    is_embedded: bool
    has_kv_scales: bool = False
    """Whether the checkpoint holds scales for K and V in 8 bits, which are not used."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelFacts:
        """Raises `ModelError` for an unknown family, an unusable config, or weights that contradict the config."""
        dtypes = {name: info.dtype for name, info in checkpoint.tensors.items() if info.gguf is None}
        arch = as_found(_describe(checkpoint.path, checkpoint.config), dtypes)
        contradictions = weights(arch).compare({name: info.shape for name, info in checkpoint.tensors.items()})
        if contradictions:
            raise ModelError(f"{checkpoint.path}: the weights contradict config.json: {contradictions}")
        for name, found, known in weights(arch).wrong_dtypes(dtypes):
            raise ModelError(
                f"{checkpoint.path}: {name} is stored as {found}; by config.json it is one of: {', '.join(known)}"
            )
        has_kv_scales = any(name.endswith(KV_SCALE_SUFFIXES) for name in checkpoint.tensors)
        return cls(checkpoint.path, arch, checkpoint.dtype, checkpoint.is_embedded, has_kv_scales)

    @classmethod
    def of_config(cls, path: Path, config: Mapping[str, Any]) -> ModelFacts:
        """From a parsed config.json alone, which is enough for a memory plan. Raises `ModelError`."""
        arch = _describe(path, config)
        return cls(path, arch, arch.dtype, is_embedded=False)

    @property
    def num_params(self) -> int:
        """Number of weights. Tied weights count once."""
        return weights(self.arch).num_elements


def _describe(path: Path, config: Mapping[str, Any]) -> Arch:
    try:
        return describe(config)
    except ArchError as error:
        raise ModelError(f"{path}: {error}") from error
