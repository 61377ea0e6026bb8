"""Which tensors a checkpoint must hold, and where each goes in our fused parameters, computed without loading anything.

The planner counts by it, the loader copies by it, and both name every contradiction by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from inferd.engine.arch.description import Arch, NormKind, QKNorm

Shape = tuple[int, ...]

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints store and that follow from config.json."""

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint; it becomes rows `row .. row + shape[0]` of `parameter`."""

    tensor: str
    shape: Shape
    parameter: str
    row: int = 0


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor that may be stored beside the one that it must equal."""

    tensor: str
    equals: str


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All tensors of one architecture."""

    sources: tuple[Source, ...]
    ties: tuple[Tie, ...] = ()

    def parameters(self) -> dict[str, Shape]:
        """Shape of each of our parameters. The rows given by its sources touch and do not overlap."""
        shapes: dict[str, Shape] = {}
        for source in sorted(self.sources, key=lambda source: (source.parameter, source.row)):
            rows = shapes.get(source.parameter, (0,))[0]
            assert source.row == rows, f"{source.parameter}: {source.tensor} starts at row {source.row}, not {rows}"
            shapes[source.parameter] = (rows + source.shape[0], *source.shape[1:])
        return shapes

    @property
    def num_elements(self) -> int:
        """Weights of the model, tied ones counted once."""
        return sum(prod(source.shape) for source in self.sources)

    def compare(self, found: Mapping[str, Iterable[int]]) -> Contradictions:
        """What a checkpoint with these tensor shapes has too little, too much, or in another shape."""
        expected = {source.tensor: source.shape for source in self.sources}
        optional = {tie.tensor: expected[tie.equals] for tie in self.ties}
        shapes = {name: tuple(shape) for name, shape in found.items() if not name.endswith(IGNORED_SUFFIXES)}
        wanted = expected | optional
        return Contradictions(
            missing=tuple(sorted(expected.keys() - shapes.keys())),
            unexpected=tuple(sorted(shapes.keys() - wanted.keys())),
            wrong_shape=tuple(
                (name, wanted[name], shape)
                for name, shape in sorted(shapes.items())
                if name in wanted and shape != wanted[name]
            ),
        )


@dataclass(frozen=True, slots=True)
class Contradictions:
    """How the headers of a checkpoint differ from its config; false where they agree."""

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
    """What a family calls the tensors of a layer, by what we call them; the defaults are Llama's, which most families
    kept. Tensors that we fuse may be one or several in the checkpoint. None: there is no such tensor."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    up: str = "up_proj"
    """Of an MLP without a gate."""
    down: str = "down_proj"


LLAMA_NAMES = TensorNames()


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
    return WeightMap((*sources, Source("lm_head.weight", embedding.shape, "lm_head.weight")))


def _norm(arch: Arch, tensor: str, parameter: str) -> Iterator[Source]:
    yield Source(f"{tensor}.weight", (arch.hidden_size,), f"{parameter}.weight")
    if arch.norm is NormKind.LAYER:
        yield Source(f"{tensor}.bias", (arch.hidden_size,), f"{parameter}.bias")


def _attention(arch: Arch, names: TensorNames, theirs: str, ours: str) -> Iterator[Source]:
    sizes = (arch.q_size, arch.kv_size, arch.kv_size)
    yield from _linear(theirs, names.qkv, sizes, arch.hidden_size, f"{ours}.qkv", arch.has_qkv_bias)
    yield from _linear(theirs, (names.o,), (arch.hidden_size,), arch.q_size, f"{ours}.o", arch.has_o_bias)
    if arch.qk_norm is not QKNorm.NONE:
        is_per_head = arch.qk_norm is QKNorm.HEAD
        for name, size in (("q_norm", arch.q_size), ("k_norm", arch.kv_size)):
            yield Source(f"{theirs}.{name}.weight", (arch.head_dim if is_per_head else size,), f"{ours}.{name}.weight")


def _mlp(arch: Arch, names: TensorNames, theirs: str, ours: str) -> Iterator[Source]:
    wide, narrow, has_bias = arch.intermediate_size, arch.hidden_size, arch.has_mlp_bias
    if arch.has_gate:
        yield from _linear(theirs, names.gate_up, (wide, wide), narrow, f"{ours}.gate_up", has_bias)
    else:
        yield from _linear(theirs, (names.up,), (wide,), narrow, f"{ours}.up", has_bias)
    yield from _linear(theirs, (names.down,), (narrow,), wide, f"{ours}.down", has_bias)


def _linear(
    theirs: str, tensors: tuple[str, ...], out_sizes: tuple[int, ...], in_size: int, ours: str, has_bias: bool
) -> Iterator[Source]:
    """The rows of one of our matrices, [sum(out_sizes), in_size]: from a tensor per size, or from one of all."""
    row = 0
    for name, out_size in zip(tensors, out_sizes if len(tensors) > 1 else (sum(out_sizes),), strict=True):
        yield Source(f"{theirs}.{name}.weight", (out_size, in_size), f"{ours}.weight", row)
        if has_bias:
            yield Source(f"{theirs}.{name}.bias", (out_size,), f"{ours}.bias", row)
        row += out_size
