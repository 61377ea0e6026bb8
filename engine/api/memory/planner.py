"""The memory plan: bytes of a model in a precision, part by part, each with its formula. If ranks share the model, it
is the plan of the first, which has most.

It needs an `Arch` only, so config.json is enough, and neither torch nor a device. `inferd plan` shows the plan before
anything is loaded, the start sizes the KV pool with it, and then compares it with what was allocated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from inferd.engine.api.memory.activations import BASE_BYTES, Draft, Part, Workload, working_parts
from inferd.engine.api.memory.formula import NOTHING, Formula, sum_of, term
from inferd.engine.api.memory.precision import (
    HEAD_STORED_AS,
    LINEARS_STORED_AS,
    Precision,
    Quantization,
    StoredAs,
    stored_as,
)
from inferd.engine.arch.description import Arch
from inferd.engine.arch.draft_heads import TOKEN_OFFSETS
from inferd.engine.arch.ranks import Rank, num_rows, within
from inferd.engine.arch.registry import weights
from inferd.engine.arch.stored import Layout
from inferd.engine.arch.weights import PART_NAME, Shape

_OWNER = re.compile(r"layers\.\d+\.(mlp\.experts\.\d+\.)?")
"""Beginning of the name of a layer's parameter, or of an expert's."""
_NEVER_QUANTIZED = ("embedding", "routers", "norms")
"""Parts of the plan that stay in the dtype."""
_ORDER = (
    "embedding", "projection", "attention", "recurrent layers", "MLP", "layer inputs", "routers", "experts", "norms"
)  # fmt: skip
"""The parts of the weights before the head."""
_TIED_HEAD = "packed copy of the embedding.weight"
_PARTS = {
    "embed": "embedding",
    "layer_embed": "embedding",
    "layer_projection": "layer inputs",
    "input": "layer inputs",
    "fc": "projection",
    "attention": "attention",
    "recurrent": "recurrent layers",
    "mlp": "MLP",
    "scalar": "norms",
    "lm_head": "head",
}
"""Part of the plan by the first name of a parameter, without its layer."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that the engine will allocate, part by part."""

    weights: tuple[Part, ...]
    kv: Part
    working: tuple[Part, ...]
    """Parts beside weights and KV: tables, slots, and an estimate of the largest step's tensors with plain kernels."""
    loading: Part
    """Memory held only while weights are loaded: the largest matrix as it is read, before it is packed."""

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
        """Most bytes at any time: while serving, or while loading if that needs more."""
        return self.weights_bytes + max(self.kv_bytes + self.working_bytes, self.loading.num_bytes + BASE_BYTES)


def plan_memory(arch: Arch, precision: Precision, work: Workload, pool: Formula) -> MemoryPlan:
    """The memory plan of an engine whose KV pool has space for `pool` tokens. A draft model's pool has space for as
    many."""
    own = weight_parts(arch, precision, work.device, work.num_ranks)
    kv, loading = _kv(arch, precision, pool, work.num_ranks), _loading(arch, precision, work.num_ranks)
    working = working_parts(arch, precision, work)
    if work.draft is None:
        return MemoryPlan(own, Part("KV cache", kv), working, loading)
    draft = work.draft
    drafts = (
        Part(f"draft {part.name}", part.formula) for part in weight_parts(draft.arch, draft.precision, work.device)
    )
    kv += _kv(draft.arch, draft.precision, pool)
    loading = max(loading, _loading(draft.arch, draft.precision, 1), key=lambda part: part.num_bytes)
    return MemoryPlan((*own, *drafts), Part("KV cache", kv), working, loading)


@lru_cache(maxsize=64)
def weight_parts(
    arch: Arch, precision: Precision, device: Literal["cpu", "cuda"] = "cpu", num_ranks: int = 1
) -> tuple[Part, ...]:
    """Embedding, attention, MLP, inputs of layers, routers, experts, norms and head, without those that take no memory
    of their own. A draft head has a projection of hidden states too."""
    shapes: dict[str, dict[str, Shape]] = {}
    for name, shape in _parameters(arch, num_ranks).items():
        shapes.setdefault(_part_of(name), {})[name] = shape
    parts = []
    for name in _ORDER:
        parts.append(Part(name, _total(arch, precision, shapes.pop(name, {}))))
    head = shapes.pop("head", {})
    assert not shapes, f"parameters that no part of the plan holds: {shapes}"
    if arch.tie_embeddings and not (device == "cuda" and _stored_as(arch, precision, _TIED_HEAD) is None):
        # A CPU keeps a packed copy of the embedding as the head. A GPU multiplies by the embedding itself.
        head[_TIED_HEAD] = (Rank(0, num_ranks).width(arch.vocab_size), arch.hidden_size)
    parts.append(Part("head", _total(arch, precision, head)))
    return tuple(part for part in parts if part.num_bytes)


def refusal(arch: Arch, quantization: Quantization) -> str | None:
    """The first matrix that cannot be stored so, and why; None if all can."""
    stored = stored_quantization(arch)
    if stored is not None:
        return None if quantization == stored else f"the checkpoint's matrices are stored in {stored}"
    for name, shape in _parameters(arch).items():
        part = _part_of(name)
        stored_as = (HEAD_STORED_AS if part == "head" else LINEARS_STORED_AS)[quantization]
        if stored_as is None or part in _NEVER_QUANTIZED or len(shape) != 2:
            continue
        reason = stored_as.refuses(shape[1])
        if reason is not None:
            return f"{name.removesuffix('.weight')} {reason}"
    return None


def stored_quantization(arch: Arch) -> Quantization | None:
    """The precision of most of a quantized checkpoint's matrices; None for a checkpoint that is not quantized."""
    kinds = Counter(layout.kind for layout in _layouts(arch).values())
    return kinds.most_common(1)[0][0] if kinds else None


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


def _stored_as(arch: Arch, precision: Precision, parameter: str) -> StoredAs | None:
    """The format of this matrix; None if it is stored in the dtype."""
    part = "head" if parameter == _TIED_HEAD else _part_of(parameter)
    if part in _NEVER_QUANTIZED:
        return None
    if arch.stored is None:
        return (HEAD_STORED_AS if part == "head" else LINEARS_STORED_AS)[precision.quantization]
    layout = _layouts(arch).get(parameter.removesuffix(".weight"))
    if layout is None:
        return None
    return stored_as(layout)


@lru_cache(maxsize=8)
def _parameters(arch: Arch, num_ranks: int = 1) -> Mapping[str, Shape]:
    """Weights and biases as the first rank keeps them, without scales, which `StoredAs` counts."""
    rank, first_rows = Rank(0, num_ranks), Counter[str]()
    kept: dict[str, Shape] = {}
    for name, shape in weights(arch).parameters().items():
        if name == TOKEN_OFFSETS:
            continue  # not in the dtype; `activations` counts them
        is_whole = not arch.is_native or arch.draft_head is not None
        if is_whole or _part_of(name) in ("embedding", "norms", "recurrent layers"):
            kept[name] = shape
            continue
        matrix, _, kind = name.rpartition(".")
        matrix = PART_NAME.sub("", matrix)
        # The parts of a matrix follow one another.
        first = first_rows[f"{matrix}.{kind}"]
        first_rows[f"{matrix}.{kind}"] += shape[0]
        own = within(rank.rows(arch, matrix), first, shape[0])
        kept[name] = (num_rows(own), *shape[1:])
    return kept


@lru_cache(maxsize=8)
def _layouts(arch: Arch) -> Mapping[str, Layout]:
    return weights(arch).layouts()


def _part_of(parameter: str) -> str:
    name = parameter.split(".", 2)[2] if parameter.startswith("layers.") else parameter
    if "norm" in name:
        return "norms"
    if name.startswith("mlp.experts."):
        return "experts"
    if name.startswith(("mlp.router.", "mlp.shared_gate.", "mlp.expert_scales.")):
        return "routers"
    return _PARTS[name.partition(".")[0]]


def _total(arch: Arch, precision: Precision, shapes: Mapping[str, Shape]) -> Formula:
    """Bytes of these parameters: one layer, or one expert, times the number of equal ones, plus parameters outside of
    layers."""
    groups: dict[str, list[tuple[str, Shape, StoredAs | None]]] = {}
    for name, shape in shapes.items():
        owner, own = _OWNER.match(name), name
        if owner is not None:
            own = name[owner.end() :]
        groups.setdefault("" if owner is None else owner[0], []).append((own, shape, _stored_as(arch, precision, name)))
    outside = groups.pop("", [])
    unit = "experts" if any(".experts." in owner for owner in groups) else "layers"
    alike = Counter(tuple(members) for members in groups.values())
    totals = [term(count, unit) * _members(members, precision) for members, count in alike.items()]
    return sum_of([*totals, _members(outside, precision)])


def _members(members: Iterable[tuple[str, Shape, StoredAs | None]], precision: Precision) -> Formula:
    """Bytes of these (name, shape, format)."""
    narrow, in_dtype, packed = NOTHING, NOTHING, NOTHING
    is_alike = precision.matrix_bytes == precision.dtype_bytes
    for name, shape, stored in members:
        label = _label(name)
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


def _label(parameter: str) -> str:
    """ "mlp.up.weight" -> "up", "mlp.up.bias" -> "up bias", "mlp.gate_up.part1.weight" -> "gate up part1"."""
    names = parameter.split(".")
    kind = names.pop()
    own = " ".join(names[-2 if names[-1].startswith("part") else -1 :]).replace("_", " ")
    return own if kind == "weight" else f"{own} {kind}"


def _kv(arch: Arch, precision: Precision, pool: Formula, num_ranks: int = 1) -> Formula:
    """Bytes of K and V on each rank for `pool` tokens. A block can serve any cache group, so it has planes for the
    largest one, each as large as the largest layer's K and V."""
    num_planes = max(group.num_planes for group in arch.cache_groups)
    start, end = Rank(0, num_ranks).kv_heads(arch.widest_heads)
    heads, head_dim = term(2) * term(num_planes, "layers") * term(end - start, "KV heads"), arch.widest_heads.head_dim
    if precision.kv_cache == "auto":
        return heads * term(head_dim).named("head") * pool * precision.dtype_bytes
    return heads * precision.head_bytes(head_dim) * pool


def _loading(arch: Arch, precision: Precision, num_ranks: int) -> Part:
    """Most bytes of one linear layer's weight beside its packed form: the matrix as read, and a byte a weight if it is
    quantized here. A tied head counts without the matrix as read, which is the embedding, unless it is widened."""
    widened = precision.dtype_bytes if precision.matrix_bytes != precision.dtype_bytes else NOTHING

    def read_as(name: str) -> Formula:
        if _stored_as(arch, precision, name) is None:
            return precision.matrix_bytes
        return term(1, "B") if arch.stored is not None else precision.dtype_bytes + term(1, "B")

    held = [
        (term(shape[0]) * term(shape[1])).named(_label(name)) * read_as(name)
        for name, shape in _parameters(arch, num_ranks).items()
        if len(shape) == 2 and _part_of(name) != "embedding"
    ]
    if arch.tie_embeddings:
        is_quantized = arch.stored is None and _stored_as(arch, precision, _TIED_HEAD) is not None
        beside = widened + term(1, "B") if is_quantized else term(0, "B")
        own = Rank(0, num_ranks).width(arch.vocab_size)
        held.append((term(own) * term(arch.hidden_size)).named("tied head") * beside)
    return Part("while loading", max(held, key=lambda formula: formula.value))


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with one decimal: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
