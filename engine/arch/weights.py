"""Which tensors a checkpoint must hold, and where each goes in our fused parameters, computed without loading anything.

The planner counts by it, the loader copies by it, and both name every contradiction by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from inferd.engine.arch.description import Arch

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


def standard_weights(arch: Arch) -> WeightMap:
    """The names that Llama gave its tensors and most families kept."""
    embedding = Source("model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size), "embed.weight")
    sources = [embedding, Source("model.norm.weight", (arch.hidden_size,), "norm.weight")]
    for layer in range(arch.num_layers):
        sources.extend(_attention(arch, layer))
        sources.extend(_mlp(arch, layer))
    if arch.tie_embeddings:
        return WeightMap(tuple(sources), (Tie("lm_head.weight", embedding.tensor),))
    return WeightMap((*sources, Source("lm_head.weight", embedding.shape, "lm_head.weight")))


def _attention(arch: Arch, layer: int) -> Iterator[Source]:
    theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
    yield Source(f"{theirs}.input_layernorm.weight", (arch.hidden_size,), f"{ours}.attention_norm.weight")
    qkv = (("q_proj", arch.q_size), ("k_proj", arch.kv_size), ("v_proj", arch.kv_size))
    row = 0
    for name, size in qkv:
        tensor = f"{theirs}.self_attn.{name}"
        yield Source(f"{tensor}.weight", (size, arch.hidden_size), f"{ours}.attention.qkv.weight", row)
        if arch.has_qkv_bias:
            yield Source(f"{tensor}.bias", (size,), f"{ours}.attention.qkv.bias", row)
        row += size
    if arch.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Source(f"{theirs}.self_attn.{name}.weight", (arch.head_dim,), f"{ours}.attention.{name}.weight")
    tensor = f"{theirs}.self_attn.o_proj"
    yield Source(f"{tensor}.weight", (arch.hidden_size, arch.q_size), f"{ours}.attention.o.weight")
    if arch.has_o_bias:
        yield Source(f"{tensor}.bias", (arch.hidden_size,), f"{ours}.attention.o.bias")


def _mlp(arch: Arch, layer: int) -> Iterator[Source]:
    theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
    yield Source(f"{theirs}.post_attention_layernorm.weight", (arch.hidden_size,), f"{ours}.mlp_norm.weight")
    for name, row in (("gate_proj", 0), ("up_proj", arch.intermediate_size)):
        tensor = f"{theirs}.mlp.{name}"
        yield Source(f"{tensor}.weight", (arch.intermediate_size, arch.hidden_size), f"{ours}.mlp.gate_up.weight", row)
        if arch.has_mlp_bias:
            yield Source(f"{tensor}.bias", (arch.intermediate_size,), f"{ours}.mlp.gate_up.bias", row)
    tensor = f"{theirs}.mlp.down_proj"
    yield Source(f"{tensor}.weight", (arch.hidden_size, arch.intermediate_size), f"{ours}.mlp.down.weight")
    if arch.has_mlp_bias:
        yield Source(f"{tensor}.bias", (arch.hidden_size,), f"{ours}.mlp.down.bias")
