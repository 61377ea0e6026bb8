"""Memory as a plan: what a model takes in a precision, part by part, each with the formula that gave it.

Works from an `Arch` alone, so config.json is enough. No torch and no device: the same arithmetic answers before
anything is loaded, sizes the KV pool, and is compared with what was allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from inferd.engine.api.memory.activations import BASE_BYTES, Part, Workload, working_parts
from inferd.engine.api.memory.formula import NOTHING, Formula, sum_of, term
from inferd.engine.api.memory.precision import (
    FP8,
    FP8_BLOCKS,
    HEAD_STORED_AS,
    LINEARS_STORED_AS,
    Precision,
    Quantization,
    StoredAs,
)
from inferd.engine.arch.description import Arch, Scales
from inferd.engine.arch.registry import weights
from inferd.engine.arch.weights import Shape

_TIED_HEAD = "packed copy of the embedding.weight"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes the engine will allocate, part by part."""

    weights: tuple[Part, ...]
    kv: Part
    working: tuple[Part, ...]
    """Beside weights and KV: tables, slots, and an estimate of the largest step's tensors for the plain kernels."""
    loading: Part
    """Held only while weights are loaded: the largest matrix, as it is read and before it is packed."""

    @property
    def weights_bytes(self) -> int:
        return sum(part.num_bytes for part in self.weights)

    @property
    def kv_bytes(self) -> int:
        return self.kv.num_bytes

    @property
    def working_bytes(self) -> int:
        return sum(part.num_bytes for part in self.working)

    @property
    def total_bytes(self) -> int:
        """At the fullest: serving, or the moment in loading that needs more than that."""
        return self.weights_bytes + max(self.kv_bytes + self.working_bytes, self.loading.num_bytes + BASE_BYTES)


def plan_memory(arch: Arch, precision: Precision, work: Workload, pool: Formula) -> MemoryPlan:
    """The plan of an engine whose KV cache has `pool` places for a token in every plane of its blocks."""
    return MemoryPlan(
        weight_parts(arch, precision, work.device),
        Part("KV cache", _kv(arch, precision, pool)),
        working_parts(arch, precision, work),
        _loading(arch, precision),
    )


@lru_cache(maxsize=64)
def weight_parts(arch: Arch, precision: Precision, device: Literal["cpu", "cuda"] = "cpu") -> tuple[Part, ...]:
    """Embedding, attention, MLP, norms and head, as far as the model has them."""
    shapes: dict[str, dict[str, Shape]] = {}
    for name, shape in _parameters(arch).items():
        shapes.setdefault(_part_of(name), {})[name] = shape
    parts = []
    for name in ("embedding", "attention", "MLP", "norms"):
        parts.append(Part(name, _total(arch, precision, shapes.pop(name, {}))))
    head = shapes.pop("head", {})
    assert not shapes, f"parameters that no part of the plan holds: {shapes}"
    if arch.tie_embeddings and not (device == "cuda" and _stored_as(arch, precision, _TIED_HEAD) is None):
        # A CPU packs the head, so that its copy of the embedding's weights is another layout of the same numbers. A
        # GPU multiplies by the embedding itself.
        head[_TIED_HEAD] = (arch.vocab_size, arch.hidden_size)
    parts.append(Part("head", _total(arch, precision, head)))
    return tuple(part for part in parts if part.num_bytes)


def refusal(arch: Arch, quantization: Quantization) -> str | None:
    """The first matrix that cannot be stored so, and why; None where all can."""
    if arch.stored is not None:
        return None if quantization == "fp8" else "the checkpoint's matrices are stored in fp8"
    for name, shape in _parameters(arch).items():
        part = _part_of(name)
        stored = (HEAD_STORED_AS if part == "head" else LINEARS_STORED_AS)[quantization]
        if stored is None or part in ("embedding", "norms") or len(shape) < 2:
            continue
        reason = stored.refuses(shape[1])
        if reason is not None:
            return f"{name.removesuffix('.weight')} {reason}"
    return None


def pool_of(num_blocks: int, work: Workload) -> Formula:
    """With the block that a device which pads steps has them write to."""
    return (term(num_blocks, "blocks") + _num_padding(work)) * term(work.block_size, "tokens")


def _num_padding(work: Workload) -> Formula:
    return NOTHING if work.device == "cpu" else term(1, "padding")


def pool_for(arch: Arch, work: Workload, num_full: int) -> Formula:
    """Places for `num_full` sequences of `work.max_model_len` tokens, a window's layers holding what they can see."""
    length, block_size = work.max_model_len, work.block_size
    blocks = [group.max_blocks(length, work.step_tokens, block_size) for group in arch.cache_groups]
    padding = _num_padding(work)
    if [num_blocks * block_size for num_blocks in blocks] == [length]:
        padding_tokens = padding * term(block_size, "tokens") if padding.value else NOTHING
        return term(length, "tokens") * term(num_full, "sequences") + padding_tokens
    held = sum_of(term(count) * term(num) if count > 1 else term(num) for num, count in Counter(blocks).items())
    if not padding.value:
        return held * term(block_size, "tokens a block") * term(num_full, "sequences")
    return (held * term(num_full, "sequences") + padding) * term(block_size, "tokens a block")


def blocks_per_seq(arch: Arch, num_tokens: int, work: Workload) -> int:
    """KV blocks that one sequence of `num_tokens` holds at most, in all its cache groups."""
    return sum(group.max_blocks(num_tokens, work.step_tokens, work.block_size) for group in arch.cache_groups)


def block_bytes(arch: Arch, precision: Precision, block_size: int) -> int:
    return _kv(arch, precision, term(block_size)).value


def _stored_as(arch: Arch, precision: Precision, parameter: str) -> StoredAs | None:
    """What this matrix is stored in; None: the dtype."""
    part = "head" if parameter == _TIED_HEAD else _part_of(parameter)
    if part in ("embedding", "norms"):
        return None
    if arch.stored is None:
        return (HEAD_STORED_AS if part == "head" else LINEARS_STORED_AS)[precision.quantization]
    if parameter == _TIED_HEAD or parameter.removesuffix(".weight") in _plain_matrices(arch):
        return None
    return FP8_BLOCKS if arch.stored.scales is Scales.BLOCK else FP8


@lru_cache(maxsize=8)
def _parameters(arch: Arch) -> Mapping[str, Shape]:
    """Weights and biases. Scales follow from how the weights are stored."""
    parameters = weights(arch).parameters()
    return {name: shape for name, shape in parameters.items() if not name.endswith("_scale")}


@lru_cache(maxsize=8)
def _plain_matrices(arch: Arch) -> frozenset[str]:
    return weights(arch).plain_matrices


def _part_of(parameter: str) -> str:
    name = parameter.split(".", 2)[2] if parameter.startswith("layers.") else parameter
    if "norm" in name:
        return "norms"
    return {"embed": "embedding", "attention": "attention", "mlp": "MLP", "lm_head": "head"}[name.partition(".")[0]]


def _total(arch: Arch, precision: Precision, shapes: Mapping[str, Shape]) -> Formula:
    """Bytes of these parameters: those of one layer, times the layers that are like it, and those of no layer."""
    by_layer: dict[str, list[tuple[str, Shape, StoredAs | None]]] = {}
    for name, shape in shapes.items():
        layer, own = name.split(".", 2)[1:] if name.startswith("layers.") else ("", name)
        by_layer.setdefault(layer, []).append((own, shape, _stored_as(arch, precision, name)))
    outside = by_layer.pop("", [])
    alike = Counter(tuple(members) for members in by_layer.values())
    dtype_bytes = precision.dtype_bytes
    totals = [term(count, "layers") * _members(members, dtype_bytes) for members, count in alike.items()]
    return sum_of([*totals, _members(outside, dtype_bytes)])


def _members(members: Iterable[tuple[str, Shape, StoredAs | None]], dtype_bytes: Formula) -> Formula:
    """Bytes of (name, shape, what a matrix is stored in)."""
    in_dtype, packed = NOTHING, NOTHING
    for name, shape, stored in members:
        label = _label(name)
        if len(shape) == 1:
            in_dtype += term(shape[0]).named(label)
        elif stored is None:
            in_dtype += (term(shape[0]) * term(shape[1])).named(label)
        else:
            packed += stored.num_bytes(*shape).named(label)
    return packed + (in_dtype * dtype_bytes if in_dtype.value else NOTHING)


def _label(parameter: str) -> str:
    """ "attention.qkv.weight" -> "qkv"; a bias keeps its name, a norm is one."""
    names = parameter.split(".")
    kind = names.pop()
    own = names[-1].replace("_", " ")
    return own if kind == "weight" else f"{own} {kind}"


def _kv(arch: Arch, precision: Precision, pool: Formula) -> Formula:
    """K and V of so many places of blocks: a block serves any group, so it has the layers of the largest."""
    num_planes = max(len(group.layers) for group in arch.cache_groups)
    heads = term(2) * term(num_planes, "layers") * term(arch.num_kv_heads, "KV heads")
    if precision.kv_cache == "auto":
        return heads * term(arch.head_dim).named("head") * pool * precision.dtype_bytes
    return heads * precision.head_bytes(arch.head_dim) * pool


def _loading(arch: Arch, precision: Precision) -> Part:
    """The most that one linear layer's weight takes beside its packed form: as it was read, and as bytes if quantized
    here. A tied head is read into the embedding, which stays."""
    quantized = term(0 if precision.quantization == "none" or arch.stored is not None else 1, "B")

    def read_as(name: str) -> Formula:
        is_stored = arch.stored is not None and _stored_as(arch, precision, name) is not None
        return term(1, "B") if is_stored else precision.dtype_bytes + quantized

    held = [
        (term(shape[0]) * term(shape[1])).named(_label(name)) * read_as(name)
        for name, shape in _parameters(arch).items()
        if len(shape) == 2 and _part_of(name) != "embedding"
    ]
    if arch.tie_embeddings:
        held.append((term(arch.vocab_size) * term(arch.hidden_size)).named("tied head") * quantized)
    return Part("while loading", max(held, key=lambda formula: formula.value))


def format_bytes(num_bytes: float) -> str:
    """Bytes as people read them: binary units, one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
