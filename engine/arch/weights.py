"""The weight map: which tensors a checkpoint must hold, and which rows of our fused parameters each fills.

It is computed without loading anything. The planner counts weights with it, and the loader copies them with it. Both
report every difference between a checkpoint and its config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TypeVar

from inferd.engine.arch.description import BLOCK, Arch, ArchError, NormKind, QKNorm, Scales, StoredFp8

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

_NAMES_SHOWN = 8


class Form(Enum):
    """Kind of a tensor's numbers. The value holds the dtypes that they may have, as safetensors headers name them."""

    FLOAT = ("F64", "F32", "F16", "BF16")
    FP8 = ("F8_E4M3",)
    """Numbers to be multiplied by scales."""
    SCALE = ("F32", "BF16", "F16", "F64")
    """Scales of FP8 numbers: finite and above 0. The file may leave out axes of size 1."""


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint; it becomes rows `row .. row + num_rows` of `parameter`."""

    tensor: str
    shape: Shape
    parameter: str
    row: int = 0
    form: Form = Form.FLOAT
    repeats: int = 1
    """Number of the parameter's rows that one row of the tensor fills: the rows that share a scale."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.repeats

    def accepts(self, shape: Shape) -> bool:
        if self.form is not Form.SCALE:
            return shape == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor that a checkpoint may store although it must equal another one."""

    tensor: str
    equals: str


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All tensors of one architecture."""

    sources: tuple[Source, ...]
    ties: tuple[Tie, ...] = ()

    def parameters(self) -> dict[str, Shape]:
        """Shape of each of our parameters. The rows of its sources follow one another without gap or overlap."""
        shapes: dict[str, Shape] = {}
        for source in sorted(self.sources, key=lambda source: (source.parameter, source.row)):
            rows = shapes.get(source.parameter, (0,))[0]
            assert source.row == rows, f"{source.parameter}: {source.tensor} starts at row {source.row}, not {rows}"
            shapes[source.parameter] = (rows + source.num_rows, *source.shape[1:])
        return shapes

    @property
    def plain_matrices(self) -> frozenset[str]:
        """Matrices that are stored without quantization, by our names: `layers.0.mlp.down`."""
        matrices = (s for s in self.sources if len(s.shape) == 2 and s.form is Form.FLOAT)
        return frozenset(source.parameter.removesuffix(".weight") for source in matrices)

    @property
    def num_elements(self) -> int:
        """Number of weights of the model. Tied weights count once, scales do not count."""
        return sum(prod(source.shape) for source in self.sources if source.form is not Form.SCALE)

    def wrong_dtypes(self, found: Mapping[str, str]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """(tensor, its dtype, the dtypes that config.json allows) of each tensor with another dtype, as safetensors
        spells them."""
        forms = {tie.tensor: Form.FLOAT for tie in self.ties} | {s.tensor: s.form for s in self.sources}
        pairs = [(name, dtype, forms[name].value) for name, dtype in sorted(found.items()) if name in forms]
        return tuple(pair for pair in pairs if pair[1] not in pair[2])

    def compare(self, found: Mapping[str, Iterable[int]]) -> Contradictions:
        """Compares a checkpoint's tensor shapes with those that the config asks for."""
        sources = {source.tensor: source for source in self.sources}
        expected = {name: source.shape for name, source in sources.items()}
        optional = {tie.tensor: expected[tie.equals] for tie in self.ties}
        unread = (*IGNORED_SUFFIXES, *KV_SCALE_SUFFIXES)
        shapes = {name: tuple(shape) for name, shape in found.items() if not name.endswith(unread)}
        wanted = expected | optional
        return Contradictions(
            missing=tuple(sorted(expected.keys() - shapes.keys())),
            unexpected=tuple(sorted(shapes.keys() - wanted.keys())),
            wrong_shape=tuple(
                (name, wanted[name], shape)
                for name, shape in sorted(shapes.items())
                if name in wanted and not (sources[name].accepts(shape) if name in sources else shape == wanted[name])
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


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A family's names of a layer's tensors, in fields that have our names. The defaults are Llama's names, which most
    families kept. Tensors that we fuse may be one or several in the checkpoint. None: there is no such tensor."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    up: str = "up_proj"
    """Name in an MLP without a gate."""
    down: str = "down_proj"


LLAMA_NAMES = TensorNames()

_BODY = "model."
"""Prefix of every tensor's name but the head's."""


def named_in_full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by the names of a generating model. An embedding model may be stored without the parts that
    generate; then its names lack `model.`, as in `layers.0.mlp.up_proj.weight`."""
    if "embed_tokens.weight" not in tensors or any(name.startswith(_BODY) for name in tensors):
        return dict(tensors)
    return {name if name.startswith("lm_head.") else _BODY + name: tensor for name, tensor in tensors.items()}


def weight_map(arch: Arch, names: TensorNames) -> WeightMap:
    """Every tensor of `arch` in a checkpoint that uses `names`."""
    embedding = Source("model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size), "embed.weight")
    sources = [embedding, *_norm(arch, "model.norm", "norm")]
    for layer in range(arch.num_layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        for part in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            name = getattr(names, part)
            if name is not None:
                sources.extend(_norm(arch, f"{theirs}.{name}", f"{ours}.{part}"))
        sources.extend(_attention(arch, names, f"{theirs}.self_attn", f"{ours}.attention"))
        sources.extend(_mlp(arch, names, f"{theirs}.mlp", f"{ours}.mlp"))
    if arch.tie_embeddings:
        return WeightMap(tuple(sources), (Tie("lm_head.weight", embedding.tensor),))
    stored = arch.stored if arch.stored is not None and arch.stored.has_head else None
    return WeightMap((*sources, *_matrix(stored, "lm_head", (arch.vocab_size, arch.hidden_size), "lm_head", 0)))


def _norm(arch: Arch, tensor: str, parameter: str) -> Iterator[Source]:
    yield Source(f"{tensor}.weight", (arch.hidden_size,), f"{parameter}.weight")
    if arch.norm is NormKind.LAYER:
        yield Source(f"{tensor}.bias", (arch.hidden_size,), f"{parameter}.bias")


def _attention(arch: Arch, names: TensorNames, theirs: str, ours: str) -> Iterator[Source]:
    sizes = (arch.q_size, arch.kv_size, arch.kv_size)
    stored = arch.stored
    yield from _linear(stored, theirs, names.qkv, sizes, arch.hidden_size, f"{ours}.qkv", arch.has_qkv_bias)
    yield from _linear(stored, theirs, (names.o,), (arch.hidden_size,), arch.q_size, f"{ours}.o", arch.has_o_bias)
    if arch.qk_norm is not QKNorm.NONE:
        is_per_head = arch.qk_norm is QKNorm.HEAD
        for name, size in (("q_norm", arch.q_size), ("k_norm", arch.kv_size)):
            yield Source(f"{theirs}.{name}.weight", (arch.head_dim if is_per_head else size,), f"{ours}.{name}.weight")


def _mlp(arch: Arch, names: TensorNames, theirs: str, ours: str) -> Iterator[Source]:
    wide, narrow, has_bias = arch.intermediate_size, arch.hidden_size, arch.has_mlp_bias
    if arch.has_gate:
        yield from _linear(arch.stored, theirs, names.gate_up, (wide, wide), narrow, f"{ours}.gate_up", has_bias)
    else:
        yield from _linear(arch.stored, theirs, (names.up,), (wide,), narrow, f"{ours}.up", has_bias)
    yield from _linear(arch.stored, theirs, (names.down,), (narrow,), wide, f"{ours}.down", has_bias)


def _linear(
    stored: StoredFp8 | None,
    theirs: str,
    tensors: tuple[str, ...],
    out_sizes: tuple[int, ...],
    in_size: int,
    ours: str,
    has_bias: bool,
) -> Iterator[Source]:
    """Sources of one of our matrices, [sum(out_sizes), in_size]: one tensor for each size, or one tensor for all."""
    if stored is not None and _is_plain(stored, [f"{theirs}.{name}" for name in tensors]):
        stored = None
    row = 0
    for name, out_size in zip(tensors, out_sizes if len(tensors) > 1 else (sum(out_sizes),), strict=True):
        yield from _matrix(stored, f"{theirs}.{name}", (out_size, in_size), ours, row)
        if has_bias:
            yield Source(f"{theirs}.{name}.bias", (out_size,), f"{ours}.bias", row)
        row += out_size


def _is_plain(stored: StoredFp8, modules: list[str]) -> bool:
    """Whether modules that we fuse were left out of quantization. Raises `ArchError` if only some of them were."""
    plain = [module for module in modules if module in stored.plain]
    others = [module for module in modules if module not in stored.plain]
    if plain and others:
        raise ArchError(
            f"quantization_config leaves out {', '.join(plain)} and not {', '.join(others)}: they are multiplied as "
            "one matrix, so leave out all of them or none"
        )
    return bool(plain)


def _matrix(stored: StoredFp8 | None, theirs: str, shape: tuple[int, int], ours: str, row: int) -> Iterator[Source]:
    """Sources of a weight, which fills our matrix from `row` on, and of the scales stored with it."""
    if stored is None:
        yield Source(f"{theirs}.weight", shape, f"{ours}.weight", row)
        return
    out_size, in_size = shape
    yield Source(f"{theirs}.weight", shape, f"{ours}.weight", row, Form.FP8)
    scale = f"{theirs}.{stored.weight_scale}"
    match stored.scales:
        case Scales.TENSOR:
            yield Source(scale, (1, 1), f"{ours}.weight_scale", row, Form.SCALE, out_size)
        case Scales.ROW:
            yield Source(scale, (out_size, 1), f"{ours}.weight_scale", row, Form.SCALE)
        case Scales.BLOCK:
            if row % BLOCK:
                raise ArchError(
                    f"{theirs} begins at row {row} of {ours}, which is inside a block of {BLOCK} rows with one scale"
                )
            blocks = (-(-out_size // BLOCK), -(-in_size // BLOCK))
            yield Source(scale, blocks, f"{ours}.weight_scale", row // BLOCK, Form.SCALE)
    if stored.input_scale is not None:
        yield Source(f"{theirs}.{stored.input_scale}", (1, 1), f"{ours}.input_scale", row, Form.SCALE, out_size)
