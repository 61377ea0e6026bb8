"""The memory plan: bytes of a model in a precision, part by part, each with its formula. If ranks share the model, it
is the plan of the first, which has most.

It needs an `Arch` only, so config.json is enough, and neither torch nor a device. `inferd plan` shows the plan before
anything is loaded, the start sizes the KV pool with it, and then compares it with what was allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from inferd.engine.api.memory.activations import PROCESSES, Draft, PlanLine, Workload, working_lines
from inferd.engine.api.memory.formula import NOTHING, Formula, sum_of, term
from inferd.engine.api.memory.precision import (
    HEAD_STORED_AS,
    INT8_OF_ENCODER,
    LINEARS_STORED_AS,
    Precision,
    Quantization,
    StoredAs,
    stored_as,
)
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.encoder_registry import weights_of
from inferd.engine.arch.matrix import Component, LinearWeight, Shape
from inferd.engine.arch.sharding import Rank, num_rows, within
from inferd.engine.arch.stored import IntLayout
from inferd.engine.arch.weights import ParameterSpec

_Member = tuple[str, Shape, StoredAs | None]
"""(label, shape, format) of a parameter."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that the engine will allocate, part by part."""

    weights: tuple[PlanLine, ...]
    kv: PlanLine
    working: tuple[PlanLine, ...]
    """Parts beside weights and KV: tables, slots, and an estimate of the largest step's tensors with plain kernels."""
    loading: PlanLine
    """Memory held only while weights are loaded: the largest matrix as it is read, before it is packed."""
    host_bytes: int = 0
    """Most bytes of the host's memory for KV beside a GPU's, whose memory the other parts are about."""

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
    def loading_bytes(self) -> int:
        """Bytes beside the weights while they are loaded."""
        return self.loading.num_bytes + sum(part.num_bytes for part in self.working if part.name == PROCESSES)

    @property
    def total_bytes(self) -> int:
        """Most bytes at any time: while serving, or while loading if that needs more."""
        return self.weights_bytes + max(self.kv_bytes + self.working_bytes, self.loading_bytes)


def plan_memory(arch: Arch, precision: Precision, work: Workload, pool: Formula) -> MemoryPlan:
    """The memory plan of an engine whose KV pool has space for `pool` tokens. A draft model's pool has space for as
    many."""
    own = weight_lines(arch, precision, work.device, work.num_ranks)
    kv, loading = _kv(arch, precision, pool, work.num_ranks), loading_line(arch, precision, work.num_ranks)
    working = working_lines(arch, precision, work)
    if work.draft is None:
        return MemoryPlan(own, PlanLine("KV cache", kv), working, loading, work.kv_host_bytes)
    draft = work.draft
    drafts = (
        PlanLine(f"draft {part.name}", part.formula) for part in weight_lines(draft.arch, draft.precision, work.device)
    )
    kv += _kv(draft.arch, draft.precision, pool)
    loading = max(loading, loading_line(draft.arch, draft.precision, 1), key=lambda part: part.num_bytes)
    return MemoryPlan((*own, *drafts), PlanLine("KV cache", kv), working, loading, work.kv_host_bytes)


@lru_cache(maxsize=64)
def weight_lines(
    arch: Arch | EncoderArch, precision: Precision, device: Literal["cpu", "cuda"] = "cpu", num_ranks: int = 1
) -> tuple[PlanLine, ...]:
    """Embedding, attention, MLP, inputs of layers, routers, experts, norms and head, without those that take no memory
    of their own. A draft head has a projection of hidden states too."""
    parameters = [*_parameters(arch, num_ranks)]
    if device == "cpu" and num_ranks == 1 and arch.stored is not None and arch.stored.shares_head:
        # Rows of the embedding are read from the head's blocks.
        parameters = [one for one in parameters if one.of.own != "embed"]
    if isinstance(arch, Arch) and arch.tie_embeddings:
        # A CPU keeps a packed copy of the embedding as the head. A GPU multiplies by the embedding itself.
        tied = _tied_head(arch, num_ranks)
        if device == "cpu" or _stored_as(arch, precision, tied, device) is not None:
            parameters.append(tied)
    found = (
        PlanLine(own, _total(arch, precision, [one for one in parameters if one.of.component is own], device))
        for own in Component
    )
    return tuple(line for line in found if line.num_bytes)


def refusal(arch: Arch | EncoderArch, quantization: Quantization) -> str | None:
    """The first matrix that cannot be stored so, and why; None if all can."""
    stored = stored_quantization(arch)
    if stored is not None:
        return None if quantization == stored else f"the checkpoint's matrices are stored in {stored}"
    for parameter in _parameters(arch):
        stored_as = _quantized_as(arch, parameter, quantization)
        if stored_as is None or len(parameter.shape) != 2:
            continue
        reason = stored_as.refuses(parameter.shape[1])
        if reason is not None:
            return f"{parameter.of.name} {reason}"
    return None


def stored_quantization(arch: Arch | EncoderArch) -> Quantization | None:
    """The precision of most of a quantized checkpoint's matrices; None for a checkpoint that is not quantized."""
    kinds = Counter(parameter.layout.kind for parameter in _parameters(arch) if parameter.layout is not None)
    return kinds.most_common(1)[0][0] if kinds else None


def declares_activations(arch: Arch) -> bool:
    """Whether a checkpoint declares for a matrix how its activations are quantized, in a way that a CPU can follow."""
    layouts = (parameter.layout for parameter in _parameters(arch))
    return any(isinstance(layout, IntLayout) and layout.declares_activations for layout in layouts)


def pool_of(num_blocks: int, work: Workload) -> Formula:
    """Tokens that a pool of `num_blocks` has space for, with the block for padding rows if the device pads steps."""
    return (term(num_blocks, "blocks") + _num_padding(work)) * term(work.block_size, "tokens")


def _num_padding(work: Workload) -> Formula:
    return NOTHING if work.device == "cpu" else term(1, "padding")


def pool_for(arch: Arch, work: Workload, num_full: int) -> Formula:
    """Tokens of a pool for `num_full` sequences of `work.max_model_len`. Layers with a window hold what they can
    see."""
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
    """Most KV blocks that one sequence of `num_tokens` holds, in all its cache groups."""
    return sum(group.max_blocks(num_tokens, work.step_tokens, work.block_size) for group in arch.cache_groups)


def block_bytes(
    arch: Arch, precision: Precision, block_size: int, num_ranks: int = 1, draft: Draft | None = None
) -> int:
    """Bytes of a KV block on each rank, with those of the draft model for the same tokens."""
    own = _kv(arch, precision, term(block_size), num_ranks).value
    return own if draft is None else own + _kv(draft.arch, draft.precision, term(block_size)).value


def token_bytes(arch: Arch, precision: Precision) -> int:
    """Bytes of a token's K and V in the blocks of all cache groups. A block of a group has bytes in as many planes as
    the group has layers of K and V."""
    planes = [group.num_planes for group in arch.cache_groups]
    return _kv(arch, precision, term(1)).value // max(planes) * sum(planes)


def _stored_as(
    arch: Arch | EncoderArch, precision: Precision, parameter: ParameterSpec, device: Literal["cpu", "cuda"] = "cpu"
) -> StoredAs | None:
    """The format of this matrix; None if it is stored in the dtype, as the embedding is on a GPU."""
    if device == "cuda" and parameter.of.component is Component.EMBEDDING:
        return None
    if arch.stored is None:
        return _quantized_as(arch, parameter, precision.quantization)
    return None if parameter.layout is None else stored_as(parameter.layout, device)


def _quantized_as(arch: Arch | EncoderArch, parameter: ParameterSpec, quantization: Quantization) -> StoredAs | None:
    """The format that a quantization gives to this matrix of a checkpoint that is not quantized."""
    of = parameter.of
    if not (isinstance(of, LinearWeight) and of.is_quantizable):
        return None
    if quantization == "int8" and isinstance(arch, EncoderArch):
        return INT8_OF_ENCODER
    return (HEAD_STORED_AS if of.component is Component.HEAD else LINEARS_STORED_AS)[quantization]


@lru_cache(maxsize=8)
def _parameters(arch: Arch | EncoderArch, num_ranks: int = 1) -> tuple[ParameterSpec, ...]:
    """Weights and biases as the first rank keeps them, without scales, which `StoredAs` counts, and without ids, which
    `activations` counts."""
    rank, kept = Rank(0, num_ranks), list[ParameterSpec]()
    for parameter in weights_of(arch).parameters().values():
        if parameter.of.component is not Component.TOKEN_IDS:
            own = within(rank.rows(parameter.of), parameter.first_row, parameter.shape[0])
            kept.append(replace(parameter, shape=(num_rows(own), *parameter.shape[1:])))
    return tuple(kept)


def _tied_head(arch: Arch, num_ranks: int) -> ParameterSpec:
    """The head that is a copy of the embedding, as each rank keeps it."""
    shape = (Rank(0, num_ranks).width(arch.vocab_size), arch.hidden_size)
    return ParameterSpec(LinearWeight.whole("packed copy of the embedding", Component.HEAD, shape), shape)


def _total(
    arch: Arch | EncoderArch, precision: Precision, parameters: Iterable[ParameterSpec], device: Literal["cpu", "cuda"]
) -> Formula:
    """Bytes of these parameters: one layer, or one expert, times the number of equal ones, plus parameters outside of
    layers."""
    groups: dict[str, list[_Member]] = {}
    unit = "layers"
    for parameter in parameters:
        member = parameter.label, parameter.shape, _stored_as(arch, precision, parameter, device)
        groups.setdefault(parameter.of.owner, []).append(member)
        unit = "experts" if parameter.of.component is Component.EXPERTS else "layers"
    outside = groups.pop("", [])
    alike = Counter(tuple(members) for members in groups.values())
    totals = [term(count, unit) * _members(members, precision) for members, count in alike.items()]
    return sum_of([*totals, _members(outside, precision)])


def _members(members: Iterable[_Member], precision: Precision) -> Formula:
    """Bytes of these members of a group."""
    narrow, in_dtype, packed = NOTHING, NOTHING, NOTHING
    is_alike = precision.matrix_bytes == precision.dtype_bytes
    for label, shape, stored in members:
        if len(shape) != 2:
            in_dtype += term(prod(shape)).named(label)
        elif stored is not None:
            packed += stored.num_bytes(*shape).named(label)
        elif is_alike:
            in_dtype += (term(shape[0]) * term(shape[1])).named(label)
        else:
            narrow += (term(shape[0]) * term(shape[1])).named(label)
    sized = ((narrow, precision.matrix_bytes), (in_dtype, precision.dtype_bytes))
    return packed + sum_of(count * num_bytes for count, num_bytes in sized if count.value)


def _kv(arch: Arch, precision: Precision, pool: Formula, num_ranks: int = 1) -> Formula:
    """Bytes of K and V on each rank for `pool` tokens. A block can serve any cache group, so it has planes for the
    largest one, each as large as the largest layer's K and V."""
    num_planes = max(group.num_planes for group in arch.cache_groups)
    start, end = Rank(0, num_ranks).kv_heads(arch.widest_heads)
    heads, head_dim = term(2) * term(num_planes, "layers") * term(end - start, "KV heads"), arch.widest_heads.head_dim
    if precision.kv_cache == "auto":
        return heads * term(head_dim).named("head") * pool * precision.dtype_bytes
    return heads * precision.head_bytes(head_dim) * pool


@lru_cache(maxsize=64)
def loading_line(arch: Arch | EncoderArch, precision: Precision, num_ranks: int = 1) -> PlanLine:
    """Most bytes of one linear layer's weight beside its packed form: the matrix as read, and a byte a weight if it is
    quantized here. A tied head counts without the matrix as read, which is the embedding, unless it is widened."""
    widened = precision.dtype_bytes if precision.matrix_bytes != precision.dtype_bytes else NOTHING

    def read_as(parameter: ParameterSpec) -> Formula:
        if _stored_as(arch, precision, parameter) is None:
            return precision.matrix_bytes
        return term(1, "B") if arch.stored is not None else precision.dtype_bytes + term(1, "B")

    held = [
        (term(one.shape[0]) * term(one.shape[1])).named(one.label) * read_as(one)
        for one in _parameters(arch, num_ranks)
        if len(one.shape) == 2 and one.of.component is not Component.EMBEDDING
    ]
    if isinstance(arch, Arch) and arch.tie_embeddings:
        tied = _tied_head(arch, num_ranks)
        is_quantized = arch.stored is None and _stored_as(arch, precision, tied) is not None
        beside = widened + term(1, "B") if is_quantized else term(0, "B")
        held.append((term(tied.shape[0]) * term(arch.hidden_size)).named("tied head") * beside)
    return PlanLine("while loading", max(held, key=lambda formula: formula.value))


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with one decimal: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
