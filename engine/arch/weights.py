"""The weight map: which tensors a checkpoint must hold, and which rows of our fused parameters each fills.

The planner counts weights with it, and the loader copies them with it. Both report every difference between a
checkpoint and its config. `tensors` makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeVar

from inferd.engine.arch.stored import FLOATS, Format, Layout, StoredTensor

Shape = tuple[int, ...]

Tensor = TypeVar("Tensor")
"""Any value that stands for a tensor."""

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints store; they follow from config.json and are not read."""

KV_SCALE_SUFFIXES = (
    ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_proj.output_scale", ".k_proj.output_scale",
    ".v_proj.output_scale",
)  # fmt: skip
"""Scales from calibration for a KV cache in 8 bits. They are not read: here each head of a token has its own scale."""

ROUTER = "router"
"""Our name of the matrix that gives the logits of a layer's experts."""
SCORE_BIAS = f"{ROUTER}.score_bias"
"""Our name of the bias of the scores by which experts are chosen."""
SHARED_GATE = "shared_gate"
"""Our name of the matrix of one row that gives the gate of the shared expert."""

EXPERT_SCALES = "expert_scales"
"""Our name of the numbers that the weights of experts are multiplied by."""

_NAMES_SHOWN = 8
_OF_LAYER = re.compile(r"layers\.\d+\.(attention\.(qkv|o)|mlp\.(gate_up|up|down))")
PART_NAME = re.compile(r"\.part\d+$")
"""End of the name of a part of a matrix."""


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


RowOrder = Neighbours | ByKeyHead


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint that is not quantized; it becomes rows `row .. row + shape[0]` of `parameter`."""

    tensor: str
    shape: Shape
    parameter: str
    row: int = 0
    row_order: RowOrder | None = None
    dtypes: tuple[str, ...] = FLOATS
    """Dtypes that it may have, as safetensors headers name them."""

    @property
    def may_be_quantized(self) -> bool:
        """Whether it is a matrix of a linear layer other than the head, and no router or gate of experts."""
        is_in_layer = len(self.shape) == 2 and self.parameter.startswith("layers.")
        return is_in_layer and not self.parameter.endswith(
            (f".{ROUTER}.weight", f".{SHARED_GATE}.weight", f".{SCORE_BIAS}")
        )


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """A quantized matrix of the checkpoint. It becomes rows `row .. row + shape[0]` of our matrix `matrix`."""

    module: str
    """The checkpoint's name, without a tensor's suffix: `model.layers.0.mlp.down_proj`."""
    format: Format
    shape: tuple[int, int]
    matrix: str
    """Our name, or with `part1`, ... the name of one part of a matrix whose parts have different layouts."""
    row: int = 0
    index: int = 0
    """Number of sources of `matrix` before this one."""
    has_bias: bool = False
    """Whether the module has a bias, which is a `Source`. Some formats store zeros as a bias for one that has none."""
    row_order: RowOrder | None = None

    @property
    def parameter(self) -> str:
        return f"{self.matrix}.weight"

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """By their names in the checkpoint."""
        found = (t for t in self.format.tensors(*self.shape) if not (self.has_bias and t.suffix == "bias"))
        return {f"{self.module}.{tensor.suffix}": tensor for tensor in found}


@dataclass(frozen=True, slots=True)
class Part:
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
    def all_sources(self) -> tuple[Source | QuantizedSource, ...]:
        return (*self.sources, *self.quantized)

    def parameters(self) -> dict[str, Shape]:
        """Shape of each of our parameters; of a quantized matrix [out, in]. The rows of its sources follow one another
        without gap or overlap."""
        shapes: dict[str, Shape] = {}
        for source in sorted(self.all_sources, key=lambda source: (source.parameter, source.row)):
            rows = shapes.get(source.parameter, (0,))[0]
            assert source.row == rows, f"{source.parameter}: {source} does not start at row {rows}"
            # A number without axes is one row.
            shape = source.shape or (1,)
            shapes[source.parameter] = (rows + shape[0], *shape[1:])
        return shapes

    def layouts(self) -> dict[str, Layout]:
        """Layouts of the quantized matrices, by our names: `layers.0.mlp.down`."""
        return {source.matrix: source.format.layout for source in self.quantized}

    def parts(self) -> dict[str, tuple[Part, ...]]:
        """The parts of each of our matrices but the embedding. Most have one part."""
        layouts, rows = self.layouts(), dict[str, list[int]]()
        for source in self.all_sources:
            matrix = source.parameter.removesuffix(".weight")
            if len(source.shape) == 2 and matrix != "embed" and not matrix.endswith(f".{SCORE_BIAS}"):
                rows.setdefault(matrix, []).append(source.shape[0])
        found: dict[str, list[Part]] = {}
        for matrix, own in sorted(rows.items()):
            found.setdefault(PART_NAME.sub("", matrix), []).append(Part(tuple(own), layouts.get(matrix)))
        return {matrix: tuple(parts) for matrix, parts in found.items()}

    def modules(self) -> dict[str, tuple[Module, ...]]:
        """The modules of each matrix of attention and MLP, in the order of their rows: `layers.0.attention.qkv` has
        three, or one that holds all."""
        found: dict[str, list[Module]] = {}
        for source in sorted(self.all_sources, key=lambda source: (source.parameter, source.row)):
            matrix = PART_NAME.sub("", source.parameter.removesuffix(".weight"))
            if _OF_LAYER.fullmatch(matrix):
                name = source.tensor.removesuffix(".weight") if isinstance(source, Source) else source.module
                found.setdefault(matrix, []).append(Module(name, source.shape[0], source.shape[1], source.row_order))
        return {matrix: tuple(modules) for matrix, modules in found.items()}

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
