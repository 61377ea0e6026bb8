"""The metadata of a GGUF file, and what a family's row in the table of families may say. It knows no family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from inferd.engine.arch.gguf.header import GgufError, GgufTensor, Value
from inferd.engine.arch.gguf.types import PLAIN
from inferd.engine.arch.shown import shown

LONG_FACTORS, SHORT_FACTORS, ROPE_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
FACTOR_TENSORS = (LONG_FACTORS, SHORT_FACTORS, ROPE_FACTORS)
"""Tensors that hold a divisor for each rotary frequency. They become fields of the config."""

Config = dict[str, Any]

KEY, VALUE, ROTATED = "attention.key_length", "attention.value_length", "rope.dimension_count"
"""Sizes of a head of K and of V, and of the part that rope turns."""

CLASSES = "cls.output.weight"
"""Tensor with a row for each label of a classifier."""
RANKS = 4
"""`pooling_type` of a reranker."""
_MAX_LABELS = 2**16


NEUTRAL: Mapping[str, object] = {
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
    turns_part: bool = False
    """Whether rope may turn a part of each head."""
    tiles_value_heads: bool = False
    """Whether value heads of a Gated DeltaNet have the order of `TiledHeads`."""
    mtp: Mapping[str, str] = field(default_factory=dict)
    """Original names of the tensors that only an MTP layer has, by those behind "nextn."; and by "" the beginning of
    the names of its others. `{layer}` stands for the number of the layer, and `{mtp}` for its number among MTP layers.
    Empty: a file with such layers is refused."""
    reads: frozenset[str] = frozenset()
    """Keys of `NEUTRAL` that `fields` reads."""


def num_layers(of: Metadata) -> int:
    """The number of layers without MTP layers, at most as many as the file has tensors: some fields are lists with an
    item a layer."""
    count = of.whole("block_count")
    if count > len(of.tensors):
        raise of.refuse("block_count", f"must be at most the number of tensors, {len(of.tensors)}")
    num_mtp = of.get("nextn_predict_layers", 0)
    if type(num_mtp) is not int or not 0 <= num_mtp < count:
        raise of.refuse("nextn_predict_layers", f"must be a whole number below block_count, {count}")
    return count - num_mtp


def by_layer(of: Metadata, key: str) -> tuple[Any, ...]:
    """The value of `key` for each layer; a value that is no list holds for all. Of a longer list, MTP layers have the
    rest."""
    value, count = of.required(key), num_layers(of)
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) < count:
        raise of.refuse(key, f"must have an item for each of {count} layers")
    return value[:count]


def rows_of(of: Metadata, name: str) -> int | None:
    """The number of rows of the tensor `name` in the first layer that has it; None if no layer has it."""
    for layer in range(num_layers(of)):
        tensor = of.tensors.get(f"blk.{layer}.{name}")
        if tensor is not None:
            return tensor.shape[0]
    return None


def layers_with(of: Metadata, name: str) -> list[int]:
    """The layers that have a tensor `name`."""
    return [layer for layer in range(num_layers(of)) if f"blk.{layer}.{name}" in of.tensors]


def neutral(of: Metadata, reads: Set[str]) -> None:
    """Raises `GgufError` for a key of `NEUTRAL` that is not in `reads` and has another value."""
    for key, value in NEUTRAL.items():
        if key not in reads and of.get(key, value) not in (value, None):
            raise of.refuse(key, f"must be {value!r} in this family")


def vocab_size_of(of: Metadata) -> int:
    embedding = of.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError("the file lacks the tensor token_embd.weight")
    return embedding.shape[0]


def labels_of(of: Metadata) -> dict[str, str]:
    """`id2label` of a classifier."""
    count = of.tensors[CLASSES].shape[0]
    if count > _MAX_LABELS:
        raise GgufError(f"{CLASSES} must have at most {_MAX_LABELS:,} rows, one for each label, but has {count:,}")
    stated = of.get("classifier.output_labels")
    if stated is None:
        stated = [f"LABEL_{number}" for number in range(count)]
    if not isinstance(stated, list) or len(stated) != count:
        raise of.refuse("classifier.output_labels", f"must be a list of {count} texts, one for each row of cls.output")
    return {str(number): label for number, label in enumerate(stated)}


def dtype_of(of: Metadata) -> str:
    """Dtype of most of the weights; bfloat16 if most of them are quantized."""
    bytes_by_type: dict[str, int] = {}
    for tensor in of.tensors.values():
        bytes_by_type[tensor.type.name] = bytes_by_type.get(tensor.type.name, 0) + tensor.num_bytes
    most = max(bytes_by_type, key=lambda name: bytes_by_type[name], default="F32")
    return dict(zip(PLAIN, ("float32", "float16", "bfloat16"), strict=True)).get(most, "bfloat16")
