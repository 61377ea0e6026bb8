"""Memory as a plan: what a model takes in a precision, part by part, each with the formula that gave it.

Works from an `Arch` alone, so config.json is enough. No torch and no device: the same arithmetic answers before
anything is loaded, sizes the KV pool, and is compared with what was allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add

from inferd.engine.api.formula import NOTHING, Formula, term
from inferd.engine.api.precision import (
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

BASE_BYTES = 256 * 2**20
"""Anonymous memory of the two processes before a model: engine 154 MiB with torch imported, server 80 MiB, and what
their allocators keep (measured: torch 2.13 for CPUs, Python 3.11, 2 cores of an AMD EPYC Zen 4, 2026-11-21)."""

_FP32_BYTES = 4
_MLP_COPIES = 4
"""fp32 tensors of [tokens, intermediate] beside the projections' own result: made by the plain kernel, and about what
the allocator keeps of a step of the C++ ones, which make none."""
_LOGITS_COPIES = 13
"""fp32 tensors of [rows, vocabulary] that sampling holds at once: top-p over a flat distribution, the most there is
without logprobs, which add half as much (measured: 128 rows of 32,000, 2 cores of an AMD EPYC Zen 4, 2026-11-21)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the engine is to hold at once."""

    num_seqs: int
    """Slots: requests that run together."""
    max_model_len: int
    """Tokens of one sequence, prompt and output."""
    step_tokens: int
    """Most tokens of one step."""
    block_size: int


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan."""

    name: str
    formula: Formula

    @property
    def num_bytes(self) -> int:
        return self.formula.value


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
        weight_parts(arch, precision),
        Part("KV cache", _planes(arch) * pool * precision.dtype_bytes),
        working_parts(arch, precision, work),
        _loading(arch, precision),
    )


def weight_parts(arch: Arch, precision: Precision) -> tuple[Part, ...]:
    """Embedding, attention, MLP, norms and head, as far as the model has them."""
    shapes: dict[str, dict[str, Shape]] = {}
    for name, shape in _parameters(arch).items():
        shapes.setdefault(_part_of(name), {})[name] = shape
    dtype_bytes = precision.dtype_bytes
    parts = []
    for name in ("embedding", "attention", "MLP", "norms"):
        parts.append(Part(name, _total(shapes.pop(name, {}), _stored_as(arch, precision, name), dtype_bytes)))
    head = shapes.pop("head", {})
    assert not shapes, f"parameters that no part of the plan holds: {shapes}"
    if arch.tie_embeddings:
        # A CPU packs the head, so that its copy of the embedding's weights is another layout of the same numbers.
        head["packed copy of the embedding.weight"] = (arch.vocab_size, arch.hidden_size)
    parts.append(Part("head", _total(head, _stored_as(arch, precision, "head"), dtype_bytes)))
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
    return term(num_blocks, "blocks") * term(work.block_size, "tokens")


def pool_for(arch: Arch, work: Workload, num_full: int) -> Formula:
    """Places for `num_full` sequences of `work.max_model_len` tokens, a window's layers holding what they can see."""
    length, block_size = work.max_model_len, work.block_size
    blocks = [group.max_blocks(length, work.step_tokens, block_size) for group in arch.cache_groups]
    if [num_blocks * block_size for num_blocks in blocks] == [length]:
        return term(length, "tokens") * term(num_full, "sequences")
    held = _sum(term(count) * term(num) if count > 1 else term(num) for num, count in Counter(blocks).items())
    return held * term(block_size, "tokens a block") * term(num_full, "sequences")


def blocks_per_seq(arch: Arch, num_tokens: int, work: Workload) -> int:
    """KV blocks that one sequence of `num_tokens` holds at most, in all its cache groups."""
    return sum(group.max_blocks(num_tokens, work.step_tokens, work.block_size) for group in arch.cache_groups)


def block_bytes(arch: Arch, precision: Precision, block_size: int) -> int:
    return (_planes(arch) * precision.dtype_bytes).value * block_size


def working_parts(arch: Arch, precision: Precision, work: Workload) -> tuple[Part, ...]:
    """What is held beside weights and KV. Activations and logits are estimates; the rest is exact."""
    return (
        Part("rotary", _rotary(arch, work)),
        Part("slots", _slots(arch, work)),
        Part("activations", _activations(arch, precision, work)),
        Part("logits", _logits(arch, precision, work)),
        Part("processes", term(BASE_BYTES // 2**20, "MiB") * term(2**20, "B")),
    )


def _stored_as(arch: Arch, precision: Precision, part: str) -> StoredAs | None:
    """What the matrices of this part are stored in; None: the dtype."""
    if part in ("embedding", "norms"):
        return None
    if arch.stored is None:
        return (HEAD_STORED_AS if part == "head" else LINEARS_STORED_AS)[precision.quantization]
    if part == "head" and not arch.stored.has_head:
        return None
    return FP8_BLOCKS if arch.stored.scales is Scales.BLOCK else FP8


@lru_cache(maxsize=8)
def _parameters(arch: Arch) -> Mapping[str, Shape]:
    """Weights and biases. Scales follow from how the weights are stored."""
    parameters = weights(arch).parameters()
    return {name: shape for name, shape in parameters.items() if not name.endswith("_scale")}


def _part_of(parameter: str) -> str:
    name = parameter.split(".", 2)[2] if parameter.startswith("layers.") else parameter
    if "norm" in name:
        return "norms"
    return {"embed": "embedding", "attention": "attention", "mlp": "MLP", "lm_head": "head"}[name.partition(".")[0]]


def _total(shapes: Mapping[str, Shape], stored: StoredAs | None, dtype_bytes: Formula) -> Formula:
    """Bytes of these parameters: those of one layer, times the layers that are like it, and those of no layer."""
    by_layer: dict[str, list[tuple[str, Shape]]] = {}
    for name, shape in shapes.items():
        layer, own = name.split(".", 2)[1:] if name.startswith("layers.") else ("", name)
        by_layer.setdefault(layer, []).append((own, shape))
    outside = by_layer.pop("", [])
    alike = Counter(tuple(members) for members in by_layer.values())
    totals = [term(count, "layers") * _members(members, stored, dtype_bytes) for members, count in alike.items()]
    return _sum([*totals, _members(outside, stored, dtype_bytes)])


def _members(members: Iterable[tuple[str, Shape]], stored: StoredAs | None, dtype_bytes: Formula) -> Formula:
    in_dtype, packed = NOTHING, NOTHING
    for name, shape in members:
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


def _planes(arch: Arch) -> Formula:
    """Elements of K and V that one place of a block holds: a block serves any group, so it is that of the largest."""
    num_planes = max(len(group.layers) for group in arch.cache_groups)
    return term(2) * term(num_planes, "layers") * term(arch.num_kv_heads, "KV heads") * _head(arch)


def _head(arch: Arch) -> Formula:
    return term(arch.head_dim).named("head")


def _rotary(arch: Arch, work: Workload) -> Formula:
    tables = {rope for rope in arch.ropes if rope is not None}
    widths = sorted(rope.rotary_dim for rope in tables)
    return term(work.max_model_len, "positions") * _sum(term(width) for width in widths) * term(_FP32_BYTES, "B")


def _slots(arch: Arch, work: Workload) -> Formula:
    """Ids as int64 and block ids as int32: a row for each request that runs."""
    ids = term(work.max_model_len + 1, "ids") * term(8, "B")
    num_blocks = -(-work.max_model_len // work.block_size)
    tables = term(len(arch.cache_groups), "tables") * term(num_blocks, "blocks") * term(4, "B")
    return term(work.num_seqs, "slots") * (ids + tables)


def _activations(arch: Arch, precision: Precision, work: Workload) -> Formula:
    """Input, residual and sum of a layer, and what its MLP makes on the way; attention makes less."""
    dtype_bytes = precision.dtype_bytes
    per_token = term(3) * term(arch.hidden_size) * dtype_bytes
    projected = term(2 if arch.has_gate else 1) * dtype_bytes
    per_token += term(arch.intermediate_size) * (projected + term(_MLP_COPIES) * term(_FP32_BYTES, "B"))
    return term(work.step_tokens, "tokens") * per_token


def _logits(arch: Arch, precision: Precision, work: Workload) -> Formula:
    num_rows = min(work.num_seqs, work.step_tokens)
    copies = precision.dtype_bytes + term(_LOGITS_COPIES) * term(_FP32_BYTES, "B")
    return term(num_rows, "rows") * term(arch.vocab_size) * copies


def _loading(arch: Arch, precision: Precision) -> Part:
    """The most that one linear layer's weight takes beside its packed form: as it was read, and as bytes if quantized
    here. A tied head is read into the embedding, which stays."""
    quantized = term(0 if precision.quantization == "none" or arch.stored is not None else 1, "B")

    def read_as(name: str) -> Formula:
        is_stored = arch.stored is not None and _stored_as(arch, precision, _part_of(name)) is not None
        return term(1, "B") if is_stored else precision.dtype_bytes + quantized

    held = [
        (term(shape[0]) * term(shape[1])).named(_label(name)) * read_as(name)
        for name, shape in _parameters(arch).items()
        if len(shape) == 2 and _part_of(name) != "embedding"
    ]
    if arch.tie_embeddings:
        held.append((term(arch.vocab_size) * term(arch.hidden_size)).named("tied head") * quantized)
    return Part("while loading", max(held, key=lambda formula: formula.value))


def _sum(formulas: Iterable[Formula]) -> Formula:
    return reduce(add, formulas, NOTHING)


def format_bytes(num_bytes: float) -> str:
    """Bytes as people read them: binary units, one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
