"""The weight map: which tensors a checkpoint must hold, and which rows of our fused parameters each fills.

The planner counts weights with it, and the loader copies them with it. Both report every difference between a
checkpoint and its config. `tensors` makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod
from typing import TypeVar

from inferd.engine.arch.matrix import LinearWeight, Shape, Weight
from inferd.engine.arch.stored import FLOATS, Format, Layout, StoredTensor

Tensor = TypeVar("Tensor")
"""Any value that stands for a tensor."""

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints store; they follow from config.json and are not read."""

KV_SCALE_SUFFIXES = (
    ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_proj.output_scale", ".k_proj.output_scale",
    ".v_proj.output_scale",
)  # fmt: skip
"""Scales from calibration for a KV cache in 8 bits. They are not read: here each head of a token has its own scale."""

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Order of the stored rows of q or k in a family whose rope turns neighbours: of every `head_rows` rows, the first
    `num_turned` are pairs of such."""

    head_rows: int
    num_turned: int

    def order(self, num_rows: int) -> list[int]:
        """The stored rows of whole heads in the order that kernels turn: after the first elements of all pairs come the
        second ones, and then those that do not turn."""
        turned = range(self.num_turned)
        head = [*turned[::2], *turned[1::2], *range(self.num_turned, self.head_rows)]
        return [first + row for first in range(0, num_rows, self.head_rows) for row in head]


@dataclass(frozen=True, slots=True)
class ByKeyHead:
    """Order of the stored rows of a Gated DeltaNet's projections that lie by key head: each has `sizes` rows, of q, k,
    v and z, or of b and a."""

    sizes: tuple[int, ...]

    def order(self, num_rows: int) -> list[int]:
        """The stored rows in the order of our matrix: those of q of all heads, then of k, and so on."""
        starts = accumulate(self.sizes, initial=0)
        parts = [range(start, start + size) for start, size in zip(starts, self.sizes, strict=False)]
        return [first + row for part in parts for first in range(0, num_rows, sum(self.sizes)) for row in part]


@dataclass(frozen=True, slots=True)
class UpFirst:
    """Order of the stored rows of an MLP's gate and up in one tensor that has those of the up first."""

    def order(self, num_rows: int) -> list[int]:
        """The stored rows in the order of our matrix: those of the gate, then those of the up."""
        return [*range(num_rows // 2, num_rows), *range(num_rows // 2)]


RowOrder = Neighbours | ByKeyHead | UpFirst


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint that is not quantized; it becomes rows `row .. row + shape[0]` of `parameter`."""

    tensor: str
    shape: Shape
    of: Weight
    row: int = 0
    part: int | None = None
    """Number of the part of the matrix that it becomes rows of; None: the matrix is one part."""
    row_order: RowOrder | None = None
    dtypes: tuple[str, ...] = FLOATS
    """Dtypes that it may have, as safetensors headers name them."""

    @classmethod
    def whole(cls, tensor: str, of: Weight) -> Source:
        """The one tensor that becomes all of a weight."""
        return cls(tensor, of.shape, of)

    @property
    def layout(self) -> None:
        """As of `QuantizedSource`."""

    @property
    def parameter(self) -> str:
        return self.of.parameter_of(self.part)

    @property
    def may_be_quantized(self) -> bool:
        """Whether a checkpoint may hold it quantized: it is a matrix of a layer, and no router or gate of experts."""
        return isinstance(self.of, LinearWeight) and self.of.is_quantizable and bool(self.of.owner)


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """A quantized matrix of the checkpoint. It becomes rows `row .. row + shape[0]` of our matrix `matrix`."""

    module: str
    """The checkpoint's name, without a tensor's suffix: `model.layers.0.mlp.down_proj`."""
    format: Format
    shape: tuple[int, int]
    of: LinearWeight
    row: int = 0
    part: int | None = None
    """As of `Source`. Parts have different layouts."""
    index: int = 0
    """Number of sources of `matrix` before this one."""
    row_order: RowOrder | None = None

    @property
    def layout(self) -> Layout:
        return self.format.layout

    @property
    def matrix(self) -> str:
        """Our name, or with `part1`, ... the name of one part."""
        return self.of.name_of(self.part)

    @property
    def parameter(self) -> str:
        return self.of.parameter_of(self.part)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """By their names in the checkpoint. Some formats store zeros as a bias for a module that has none."""
        found = (t for t in self.format.tensors(*self.shape) if not (self.of.has_bias and t.suffix == "bias"))
        return {f"{self.module}.{tensor.suffix}": tensor for tensor in found}


AnySource = Source | QuantizedSource


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One of our parameters: a weight, its bias, or one part of it."""

    of: Weight
    shape: Shape
    """Its shape; of a quantized matrix [out, in]."""
    part: int | None = None
    first_row: int = 0
    """Number of rows of the weight in the parts before this one."""
    layout: Layout | None = None
    """None: numbers that are not quantized."""

    @property
    def label(self) -> str:
        """Name in the memory plan: "up", "up bias", "gate up part1"."""
        own = self.of.kind if self.part is None else f"{self.of.kind} part{self.part}"
        own = own.replace("_", " ")
        return own if self.of.leaf == "weight" else f"{own} {self.of.leaf}"


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Rows of one of our matrices, from modules that have one layout."""

    rows: tuple[int, ...]
    """Number of rows of each module."""
    layout: Layout | None
    """None: numbers that are not quantized."""

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class Module:
    """A linear module of the checkpoint, whose weight is [out_size, in_size]."""

    name: str
    """Name in the checkpoint: `model.layers.0.self_attn.q_proj`."""
    out_size: int
    in_size: int
    row_order: RowOrder | None = None


def _module(source: AnySource) -> Module:
    name = source.tensor.removesuffix(".weight") if isinstance(source, Source) else source.module
    return Module(name, source.shape[0], source.shape[1], source.row_order)


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor that a checkpoint may store although it must equal another one."""

    tensor: str
    equals: str


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All tensors of one architecture."""

    sources: tuple[Source, ...]
    quantized: tuple[QuantizedSource, ...] = ()
    ties: tuple[Tie, ...] = ()
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a checkpoint may hold and that are not read."""
    mtp_layer: str = ""
    """Beginning of the names of an MTP layer's tensors, if it has the number behind the last layer's. They are not
    read. Its projection `eh_proj` tells it from a layer that config.json does not count."""

    @property
    def all_sources(self) -> tuple[AnySource, ...]:
        return (*self.sources, *self.quantized)

    def _by_parameter(self) -> Iterator[list[AnySource]]:
        """The sources of each parameter, in the order of their rows."""
        ordered = sorted(self.all_sources, key=lambda source: (source.parameter, source.row))
        yield from (list(sources) for _, sources in groupby(ordered, key=lambda source: source.parameter))

    def parameters(self) -> dict[str, ParameterSpec]:
        """Our parameters by their names. The rows of the sources of each follow one another without gap or overlap."""
        found, first_rows = dict[str, ParameterSpec](), Counter[str]()
        for sources in self._by_parameter():
            first, rows = sources[0], 0
            for source in sources:
                assert source.row == rows, f"{source.parameter}: {source} does not start at row {rows}"
                rows += source.shape[0] if source.shape else 1  # a number without axes is one row
            of, shape = first.of, (rows, *first.shape[1:])
            found[first.parameter] = ParameterSpec(of, shape, first.part, first_rows[of.parameter], first.layout)
            first_rows[of.parameter] += rows
        return found

    def parts(self) -> dict[str, tuple[MatrixPart, ...]]:
        """The parts of each of our matrices, of which most have one."""
        found: dict[str, tuple[MatrixPart, ...]] = {}
        for sources in self._by_parameter():
            if isinstance(sources[0].of, LinearWeight):
                part = MatrixPart(tuple(source.shape[0] for source in sources), sources[0].layout)
                found[sources[0].of.name] = (*found.get(sources[0].of.name, ()), part)
        return found

    def modules(self) -> dict[str, tuple[Module, ...]]:
        """The modules of each matrix that LoRA adapters may update, in the order of their rows:
        `layers.0.attention.qkv` has three, or one that holds all."""
        found: dict[str, tuple[Module, ...]] = {}
        for sources in self._by_parameter():
            of = sources[0].of
            if isinstance(of, LinearWeight) and of.takes_adapters:
                found[of.name] = (*found.get(of.name, ()), *(_module(source) for source in sources))
        return found

    @property
    def num_elements(self) -> int:
        """Number of weights of the model. Tied weights count once, scales do not count."""
        return sum(prod(source.shape) for source in self.all_sources)

    def wrong_dtypes(self, found: Mapping[str, str]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """(tensor, its dtype, the dtypes that config.json allows) of each tensor with another dtype, as safetensors
        spells them."""
        known = {tie.tensor: FLOATS for tie in self.ties} | {source.tensor: source.dtypes for source in self.sources}
        known |= {name: tensor.dtypes for source in self.quantized for name, tensor in source.tensors.items()}
        pairs = [(name, dtype, known[name]) for name, dtype in sorted(found.items()) if name in known]
        return tuple(pair for pair in pairs if pair[1] not in pair[2])

    def unread_in(self, found: Iterable[str]) -> tuple[str, ...]:
        """Beginnings of the names among `found` that are not read."""
        has_layer = self.mtp_layer and any(name.startswith(f"{self.mtp_layer}eh_proj.") for name in found)
        return (*self.unread, self.mtp_layer) if has_layer else self.unread

    def compare(self, found: Mapping[str, Iterable[int]]) -> Contradictions:
        """Compares a checkpoint's tensor shapes with those that the config asks for."""
        wanted = {source.tensor: StoredTensor("", source.shape, source.dtypes) for source in self.sources}
        for source in self.quantized:
            wanted |= source.tensors
        required = {name for name, tensor in wanted.items() if not tensor.is_optional}
        wanted |= {tie.tensor: wanted[tie.equals] for tie in self.ties}
        unread = (*IGNORED_SUFFIXES, *KV_SCALE_SUFFIXES)
        left_out = self.unread_in(found)
        shapes = {name: tuple(shape) for name, shape in found.items() if not name.endswith(unread)}
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(left_out)}
        return Contradictions(
            missing=tuple(sorted(required - shapes.keys())),
            unexpected=tuple(sorted(shapes.keys() - wanted.keys())),
            wrong_shape=tuple(
                (name, wanted[name].shape, shape)
                for name, shape in sorted(shapes.items())
                if name in wanted and not wanted[name].accepts(shape)
            ),
        )


@dataclass(frozen=True, slots=True)
class Contradictions:
    """Differences between the headers of a checkpoint and its config. False if they agree."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong_shape: tuple[tuple[str, Shape, Shape], ...]
    """(tensor, shape by config.json, shape in the file)."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.wrong_shape)

    def __str__(self) -> str:
        shapes = [f"{name} is {list(file)}, by config.json {list(ours)}" for name, ours, file in self.wrong_shape]
        parts = (("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", shapes))
        return "; ".join(f"{len(names)} {what}: {_shorten(names)}" for what, names in parts if names)


def _shorten(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMES_SHOWN
    return ", ".join(listed[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
