"""A model before anything is loaded: its description, and a check that its weight files agree with its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.memory.planner import format_bytes
from inferd.engine.api.modelling import ModelImpl, ask_modelled
from inferd.engine.api.tied_head import is_stored_twice
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.gguf.formats import in_words, with_blocks
from inferd.engine.arch.modelled import Modelled
from inferd.engine.arch.registry import as_found, describe, describe_modelled, describe_mtp_layer, is_known, weights
from inferd.engine.arch.tensors import EMBEDDING, HEAD
from inferd.engine.arch.weights import KV_SCALE_SUFFIXES
from inferd.engine.arch.wrappers import part_of, text_config, wrapper_of

_MTP_LAYER = "MTP layer"
_NAMES = {"BF16": "bfloat16", "F16": "float16"}


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
    shares_head: bool = False
    """Whether the head is a copy of the embedding in another format, kept or stored so. Its weights count once then."""
    blocks: str = ""
    """The types of blocks in a GGUF file, and whether they are kept or dequantized."""
    matrix_dtype: str = "float32"
    """Dtype of all matrices that are not quantized; "float32" if they differ."""
    wrapper: str = ""
    """Architecture of a checkpoint of which only the text part is served; otherwise empty."""
    left_out_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each part that is not loaded, by its name, such as `vision_tower`, or by its file's. Empty if no weights
    were seen."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        model_impl: ModelImpl = "native",
        modelled: Modelled | None = None,
        *,
        is_mtp: bool = False,
    ) -> ModelFacts:
        """`modelled`: the model as transformers' code computes it, if that is known already. `is_mtp`: of an MTP layer,
        whose tensors alone `checkpoint` has.

        Raises `ModelError` for an unknown family, an unusable config, or weights that contradict the config.
        """
        path, config = checkpoint.path, checkpoint.config
        if modelled is not None:
            described = describe_modelled(modelled)
        elif is_mtp:
            described = _describe(path, config, describe_mtp_layer)
        elif is_gguf(path) or _is_native(config, model_impl):
            if model_impl == "transformers":
                raise ModelError(f"{path} is a GGUF file, which only native families read: give --model-impl auto")
            described = _describe(path, config)
        else:
            shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
            described = _modelled(path, config, model_impl, shapes)
        tensors = checkpoint.tensors_of(described)
        dtypes = {name: info.dtype for name, info in tensors.items() if info.gguf is None}
        arch = as_found(described, dtypes)
        placed = {name: info.gguf for name, info in tensors.items() if info.gguf is not None}
        if checkpoint.keeps_blocks and arch.is_native:
            arch = with_blocks(arch, weights(arch), placed)
        shapes = {name: info.shape for name, info in checkpoint.tensors_of(arch).items()}
        contradictions = weights(arch).compare(shapes)
        if contradictions:
            stated = "the metadata" if is_gguf(checkpoint.path) else "config.json"
            raise ModelError(f"{checkpoint.path}: the weights contradict {stated}: {contradictions}")
        for name, found, known in weights(arch).wrong_dtypes(dtypes):
            raise ModelError(
                f"{checkpoint.path}: {name} is stored as {found}; by config.json it is one of: {', '.join(known)}"
            )
        has_kv_scales = any(name.endswith(KV_SCALE_SUFFIXES) for name in checkpoint.tensors)
        shares_head = arch.tie_embeddings != described.tie_embeddings or _stores_head_twice(checkpoint)
        dtype, is_embedded = checkpoint.dtype, checkpoint.is_embedded
        tensors = checkpoint.tensors_of(arch)
        floats = {tensors[source.tensor].dtype for source in weights(arch).sources if len(source.shape) == 2}
        matrix_dtype = narrow_dtype(floats)
        blocks = in_words(arch, placed.values())
        left_out = Counter(checkpoint.files_left_out)
        for name, info in checkpoint.left_out.items():
            left_out[part_of(name)] += info.num_bytes
        if arch.is_native and arch.draft_head is None:
            unread = weights(arch).unread_in(checkpoint.tensors)
            drafting = [info.num_bytes for name, info in checkpoint.tensors.items() if name.startswith(unread)]
            left_out += Counter({_MTP_LAYER: sum(drafting)})
        return cls(
            checkpoint.path, arch, dtype, is_embedded, has_kv_scales, shares_head, blocks, matrix_dtype,
            checkpoint.wrapper, left_out,
        )  # fmt: skip

    @classmethod
    def of_config(
        cls, path: Path, config: Mapping[str, Any], model_impl: ModelImpl = "native", *, is_mtp: bool = False
    ) -> ModelFacts:
        """From a parsed config.json alone, which is enough for a memory plan. Raises `ModelError`."""
        if is_mtp or _is_native(config, model_impl):
            arch = _describe(path, config, describe_mtp_layer if is_mtp else describe)
        else:
            arch = _modelled(path, config, model_impl, None)
        wrapper = wrapper_of(config) or ""
        return cls(path, arch, arch.dtype, is_embedded=False, matrix_dtype=arch.dtype, wrapper=wrapper)

    @property
    def num_params(self) -> int:
        """Number of weights. Tied weights count once."""
        counted_twice = self.arch.vocab_size * self.arch.hidden_size if self.shares_head else 0
        return weights(self.arch).num_elements - counted_twice

    @property
    def scope(self) -> str:
        """The part of the checkpoint that is served, and the parts that are not loaded; empty if all is served."""
        if not self.wrapper:
            drafting = self.left_out_bytes.get(_MTP_LAYER)
            return f"{self.arch.architecture} without its MTP layer ({format_bytes(drafting)})" if drafting else ""
        parts = [f"{name} ({format_bytes(num_bytes)})" for name, num_bytes in sorted(self.left_out_bytes.items())]
        left_out = f"; not loaded: {', '.join(parts)}" if parts else ""
        return f"the text part of {self.wrapper} alone{left_out}"

    @property
    def num_active_params(self) -> int:
        """Number of weights that one token is multiplied by: those of all experts that it does not go to are left
        out."""
        return self.num_params - self.arch.num_idle_weights


def narrow_dtype(stored: set[str]) -> str:
    """The dtype of matrices that are all stored in one of 16 bits, as headers spell dtypes; otherwise "float32"."""
    return _NAMES.get(next(iter(stored)), "float32") if len(stored) == 1 else "float32"


def _stores_head_twice(checkpoint: Checkpoint) -> bool:
    embedding, head = (checkpoint.tensors.get(name) for name in (EMBEDDING, HEAD))
    return is_gguf(checkpoint.path) and embedding is not None and head is not None and is_stored_twice(embedding, head)


def of_mtp_layer(checkpoint: Checkpoint) -> Checkpoint:
    """The part of a served model's checkpoint that is its first MTP layer. Raises `ModelError` if there is none."""
    head = _describe(checkpoint.path, checkpoint.config, describe_mtp_layer).draft_head
    assert head is not None
    tensors = {name: info for name, info in checkpoint.tensors.items() if name.startswith(head.layer)}
    if not tensors:
        raise ModelError(f"{checkpoint.path} holds no MTP layer: no tensor's name begins with {head.layer}")
    return replace(checkpoint, tensors=tensors)


def _describe(path: Path, config: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Arch] = describe) -> Arch:
    try:
        return read(config)
    except ArchError as error:
        raise ModelError(f"{path}: {error}") from error


def _is_native(config: Mapping[str, Any], model_impl: ModelImpl) -> bool:
    return model_impl == "native" or (model_impl == "auto" and is_known(config))


def _modelled(
    path: Path, config: Mapping[str, Any], model_impl: ModelImpl, shapes: Mapping[str, tuple[int, ...]] | None
) -> Arch:
    """The model through transformers' own code. Raises `ModelError` if that cannot serve it."""
    try:
        answer = ask_modelled(text_config(config), shapes)
    except ArchError as error:
        raise ModelError(f"{path}: {error}") from error
    if isinstance(answer, Modelled):
        return describe_modelled(answer)
    if model_impl == "transformers":
        raise ModelError(f"{path}: transformers' own code cannot serve it: {answer}; give --model-impl auto")
    try:
        describe(config)  # raises: this family is not native
    except ArchError as error:
        raise ModelError(f"{path}: {error}. Transformers' own code cannot serve it either: {answer}") from error
    raise AssertionError("a native family was given to transformers")
