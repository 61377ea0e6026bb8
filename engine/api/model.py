"""What is known of a model before anything is loaded: its description, its shape, and proof that its files agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.planner import ModelShape
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.registry import describe, weights


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A checkpoint that is consistent, as far as config and headers tell."""

    path: Path
    arch: Arch
    shape: ModelShape
    dtype: str
    """Of the stored weights: "bfloat16", "float16" or "float32"."""
    is_embedded: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelFacts:
        """Raises `ModelError` for an unknown family, an unusable config, or weights that contradict it."""
        try:
            arch = describe(checkpoint.config)
            weight_map = weights(arch)
        except ArchError as error:
            raise ModelError(f"{checkpoint.path}: {error}") from error
        contradictions = weight_map.compare({name: info.shape for name, info in checkpoint.tensors.items()})
        if contradictions:
            raise ModelError(f"{checkpoint.path}: the weights contradict config.json: {contradictions}")
        shape = ModelShape(
            num_params=weight_map.num_elements,
            num_packed_twice=arch.tied_head_elements,
            kv_elements_per_token=arch.kv_elements_per_token,
            max_positions=arch.max_positions,
            vocab_size=arch.vocab_size,
        )
        return cls(checkpoint.path, arch, shape, checkpoint.dtype, checkpoint.is_embedded)
