"""The weight map: which tensors a checkpoint must hold, and which rows of our fused parameters each fills.

It is computed without loading anything. The planner counts weights with it, and the loader copies them with it. Both
report every difference between a checkpoint and its config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TypeVar

from inferd.engine.arch.description import Arch, ArchError, GatedDelta, Mamba2, NormKind, QKNorm, ShortConv
from inferd.engine.arch.modelled import Modelled
from inferd.engine.arch.stored import BLOCK, FLOATS, Format, Layout, Stored, StoredTensor, is_in_blocks

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
_BESIDE_MLP = {
    "post_feedforward_layernorm_1.weight": "post_norm",
    "pre_feedforward_layernorm_2.weight": "experts_norm",
    "post_feedforward_layernorm_2.weight": "experts_post_norm",
    "router.scale": "router_norm",
    "router.per_expert_scale": EXPERT_SCALES,
}
"""Gemma 4's names, and ours, of what a layer has if it has both an MLP and experts."""

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


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A family's names of a layer's tensors, in fields that have our names. The defaults are Llama's names, which most
    families kept. Tensors that we fuse may be one or several in the checkpoint. None: there is no such tensor."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    mlp: str = "mlp"
    """Name of the module that holds the MLP or the experts."""
    router: str = "gate"
    score_bias: str = "gate.e_score_correction_bias"
    experts: str | None = None
    """Name of the module that holds router and experts, if it is not that of the MLP; empty: the layer."""
    shared: str = "mlp.shared_expert"
    """Name of the shared expert. That of its gate has `_gate` behind it."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    alternates_experts: bool = False
    """Whether the outputs of gates and ups alternate in a tensor of all experts of a layer, and are its columns."""
    up: str = "up_proj"
    """Name in an MLP without a gate."""
    down: str = "down_proj"
    delta_in: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    """Names of a Gated DeltaNet's input projections. If they are two, their rows lie by key head."""
    recurrent: str = "linear_attn"
    """Name of a Gated DeltaNet, of Mamba-2 or of a short convolution, whose tensors have the names of Qwen's, Mamba's
    or LFM2's."""
    final_norm: str = "norm"
    """Name of the norm behind the layers."""

    @property
    def of_experts(self) -> str:
        """Beginning of the names of a layer's router and experts."""
        module = self.mlp if self.experts is None else self.experts
        return f"{module}." if module else ""


LLAMA_NAMES = TensorNames()

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the embedding and of the matrix of the logits."""
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
    embedding = Source(EMBEDDING, (arch.vocab_size, arch.hidden_size), "embed.weight")
    sources: list[Source | QuantizedSource] = [embedding, *_norm(arch, f"model.{names.final_norm}", "norm")]
    formats = _Formats(arch.stored)
    for layer in range(arch.num_layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        for part in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            name = getattr(names, part)
            if name is not None:
                sources.extend(_norm(arch, f"{theirs}.{name}", f"{ours}.{part}"))
        if layer in arch.recurrent_layers:
            recurrent = _RECURRENT[type(arch.recurrent)]
            sources.extend(recurrent(arch, formats, names, f"{theirs}.{names.recurrent}", f"{ours}.recurrent"))
        else:
            sources.extend(_attention(arch, layer, formats, names, f"{theirs}.self_attn", f"{ours}.attention"))
        if arch.has_layer_scalars:
            sources.append(Source(f"{theirs}.layer_scalar", (1,), f"{ours}.scalar.weight"))
        if arch.layer_input_size:
            sources.extend(_layer_input(arch, formats, theirs, ours))
        if arch.has_experts(layer):
            sources.extend(_experts(arch, formats, names, theirs, f"{ours}.mlp"))
        if arch.has_mlp(layer):
            sources.extend(_mlp(arch, arch.mlp_size(layer), formats, names, theirs, f"{ours}.mlp"))
    if arch.layer_input_size:
        sources.extend(_layer_inputs(arch))
    ties = (Tie(HEAD, embedding.tensor),) if arch.tie_embeddings else ()
    if not ties:
        head = [("lm_head", None if arch.stored is None else arch.stored.head, arch.vocab_size)]
        sources.extend(_matrix(head, arch.hidden_size, "lm_head"))
    return WeightMap(
        tuple(source for source in sources if isinstance(source, Source)),
        tuple(source for source in sources if isinstance(source, QuantizedSource)),
        ties,
        _unread(arch),
    )


def _unread(arch: Arch) -> tuple[str, ...]:
    """Layers that read the K and V of others may be stored with projections and norms of their own."""
    layers = [layer for layer in arch.attention_layers if layer not in arch.kv_layers]
    names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return tuple(f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in names)


def modelled_weights(modelled: Modelled) -> WeightMap:
    """The tensors of a model that transformers' own code computes. None is fused with another."""
    sources = tuple(Source(tensor.name, tensor.shape, tensor.parameter) for tensor in modelled.tensors)
    (embedding,) = (source.tensor for source in sources if source.parameter == "embed.weight")
    return WeightMap(sources, ties=tuple(Tie(name, equals=embedding) for name in modelled.ties), unread=modelled.unread)


class _Formats:
    """The format of each linear module of the layers."""

    def __init__(self, stored: Stored | None) -> None:
        self._default = None if stored is None else stored.layers
        self._exceptions = {} if stored is None else dict(stored.exceptions)

    def of(self, module: str) -> Format | None:
        return self._exceptions.get(module, self._default)


def _norm(arch: Arch, tensor: str, parameter: str) -> Iterator[Source]:
    yield Source(f"{tensor}.weight", (arch.hidden_size,), f"{parameter}.weight")
    if arch.norm is NormKind.LAYER:
        yield Source(f"{tensor}.bias", (arch.hidden_size,), f"{parameter}.bias")


def _attention(
    arch: Arch, layer: int, formats: _Formats, names: TensorNames, theirs: str, ours: str
) -> Iterator[Source | QuantizedSource]:
    heads, sizes = arch.heads(layer), arch.qkv_sizes(layer)
    projections = names.qkv[: len(sizes)]
    qkv = _linear(formats, theirs, projections, sizes, arch.attention_in_size, f"{ours}.qkv", arch.has_qkv_bias)
    yield from _reordered(arch, qkv, tuple(f"{theirs}.{name}" for name in names.qkv[:2]))
    yield from _linear(formats, theirs, (names.o,), (arch.hidden_size,), heads.q_size, f"{ours}.o", arch.has_o_bias)
    if arch.has_sinks:
        yield Source(f"{theirs}.sinks", (arch.num_heads,), f"{ours}.sinks.weight")
    if arch.qk_norm is not QKNorm.NONE:
        is_per_head = arch.qk_norm is QKNorm.HEAD
        norms = (names.q_norm, "q_norm", heads.q_size), (names.k_norm, "k_norm", heads.kv_size)
        for name, own, size in norms[: len(sizes)]:
            yield Source(f"{theirs}.{name}.weight", (heads.head_dim if is_per_head else size,), f"{ours}.{own}.weight")


def _reordered(
    arch: Arch, qkv: Iterable[Source | QuantizedSource], turned: tuple[str, ...]
) -> Iterator[Source | QuantizedSource]:
    """Sources of q, k and v, with the order of their rows in the modules `turned`."""
    rope = next((rope for rope in arch.ropes if rope is not None and rope.turns_neighbours), None)
    neighbours = None if rope is None else Neighbours(arch.head_dim, rope.rotary_dim)
    for source in qkv:
        module = source.module if isinstance(source, QuantizedSource) else source.tensor.rpartition(".")[0]
        if neighbours is None or module not in turned:
            yield source
            continue
        if isinstance(source, QuantizedSource) and is_in_blocks(source.format) and arch.head_dim % BLOCK:
            raise ArchError(f"{module}: heads must be whole FP8 blocks of {BLOCK} rows, but have {arch.head_dim}")
        yield replace(source, row_order=neighbours)


def _delta(
    arch: Arch, formats: _Formats, names: TensorNames, theirs: str, ours: str
) -> Iterator[Source | QuantizedSource]:
    """A Gated DeltaNet layer. Its convolution has one row of weights for each channel."""
    delta = arch.recurrent
    assert isinstance(delta, GatedDelta)
    heads, by_head = (delta.num_value_heads,), len(names.delta_in) == 2
    qkv, z, b, a = delta.in_sizes
    in_sizes = (qkv + z, b + a) if by_head else (qkv, z, b, a)
    projections = _linear(formats, theirs, names.delta_in, in_sizes, arch.hidden_size, f"{ours}.in", has_bias=False)
    yield from _by_key_head(delta, projections) if by_head else projections
    yield from _linear(
        formats, theirs, ("out_proj",), (arch.hidden_size,), delta.value_size, f"{ours}.out", has_bias=False
    )
    yield Source(f"{theirs}.conv1d.weight", (delta.conv_size, 1, delta.conv_width), f"{ours}.conv.weight")
    yield Source(f"{theirs}.A_log", heads, f"{ours}.a_log")
    yield Source(f"{theirs}.dt_bias", heads, f"{ours}.dt_bias")
    yield Source(f"{theirs}.norm.weight", (delta.value_dim,), f"{ours}.norm.weight")


def _by_key_head(
    delta: GatedDelta, projections: Iterable[Source | QuantizedSource]
) -> Iterator[Source | QuantizedSource]:
    """Sources of q, k, v and z in one matrix, and of b and a in another, whose rows lie by key head."""
    share = delta.num_value_heads // delta.num_key_heads
    qkvz = ByKeyHead((delta.key_dim, delta.key_dim, share * delta.value_dim, share * delta.value_dim))
    for source, order in zip(projections, (qkvz, ByKeyHead((share, share))), strict=True):
        if isinstance(source, QuantizedSource) and is_in_blocks(source.format):
            raise ArchError(
                f"{source.module}: its rows lie by head, so FP8 blocks of {BLOCK} rows, which share scales, are not "
                "supported; give a checkpoint with another format of this matrix"
            )
        yield replace(source, row_order=order)


def _mamba2(
    arch: Arch, formats: _Formats, _: TensorNames, theirs: str, ours: str
) -> Iterator[Source | QuantizedSource]:
    """A Mamba-2 layer. Its convolution has one row of weights for each channel."""
    mamba = arch.recurrent
    assert isinstance(mamba, Mamba2)
    wide, narrow, heads = mamba.inner_size, arch.hidden_size, (mamba.num_heads,)
    yield from _linear(formats, theirs, ("in_proj",), mamba.in_sizes, narrow, f"{ours}.in", mamba.has_bias)
    yield from _linear(formats, theirs, ("out_proj",), (narrow,), wide, f"{ours}.out", mamba.has_bias)
    yield Source(f"{theirs}.conv1d.weight", (mamba.conv_size, 1, mamba.conv_width), f"{ours}.conv.weight")
    if mamba.has_conv_bias:
        yield Source(f"{theirs}.conv1d.bias", (mamba.conv_size,), f"{ours}.conv.bias")
    yield Source(f"{theirs}.A_log", heads, f"{ours}.a_log")
    yield Source(f"{theirs}.dt_bias", heads, f"{ours}.dt_bias")
    yield Source(f"{theirs}.D", heads, f"{ours}.d")
    yield Source(f"{theirs}.norm.weight", (wide,), f"{ours}.norm.weight")


def _short_conv(
    arch: Arch, formats: _Formats, _: TensorNames, theirs: str, ours: str
) -> Iterator[Source | QuantizedSource]:
    """A gated short convolution, with one row of weights for each channel."""
    conv, size = arch.recurrent, arch.hidden_size
    assert isinstance(conv, ShortConv)
    yield from _linear(formats, theirs, ("in_proj",), (3 * size,), size, f"{ours}.in", conv.has_bias)
    yield from _linear(formats, theirs, ("out_proj",), (size,), size, f"{ours}.out", conv.has_bias)
    yield Source(f"{theirs}.conv.weight", (size, 1, conv.conv_width), f"{ours}.conv.weight")
    if conv.has_bias:
        yield Source(f"{theirs}.conv.bias", (size,), f"{ours}.conv.bias")


_RECURRENT: Mapping[type, Callable[..., Iterator[Source | QuantizedSource]]] = {
    GatedDelta: _delta,
    Mamba2: _mamba2,
    ShortConv: _short_conv,
}
"""Sources of a recurrent layer, by its kind."""


def _mlp(
    arch: Arch, wide: int, formats: _Formats, names: TensorNames, theirs: str, ours: str
) -> Iterator[Source | QuantizedSource]:
    theirs = f"{theirs}.{names.mlp}"
    narrow, has_bias = arch.hidden_size, arch.has_mlp_bias
    if arch.has_gate:
        yield from _linear(formats, theirs, names.gate_up, (wide, wide), narrow, f"{ours}.gate_up", has_bias)
    else:
        yield from _linear(formats, theirs, (names.up,), (wide,), narrow, f"{ours}.up", has_bias)
    yield from _linear(formats, theirs, (names.down,), (narrow,), wide, f"{ours}.down", has_bias)


def _layer_inputs(arch: Arch) -> Iterator[Source]:
    """The table and the projection that give all layers their inputs, side by side."""
    size = arch.num_layers * arch.layer_input_size
    yield Source("model.embed_tokens_per_layer.weight", (arch.vocab_size, size), "layer_embed.weight")
    yield Source("model.per_layer_model_projection.weight", (size, arch.hidden_size), "layer_projection.weight")
    yield Source("model.per_layer_projection_norm.weight", (arch.layer_input_size,), "layer_projection_norm.weight")


def _layer_input(arch: Arch, formats: _Formats, theirs: str, ours: str) -> Iterator[Source | QuantizedSource]:
    """The matrices and the norm by which a layer adds its input to the stream."""
    size, hidden = arch.layer_input_size, arch.hidden_size
    yield from _linear(formats, theirs, ("per_layer_input_gate",), (size,), hidden, f"{ours}.input.gate", False)
    yield from _linear(formats, theirs, ("per_layer_projection",), (hidden,), size, f"{ours}.input.projection", False)
    yield Source(f"{theirs}.post_per_layer_input_norm.weight", (hidden,), f"{ours}.input.norm.weight")


def _experts(
    arch: Arch, formats: _Formats, names: TensorNames, theirs: str, ours: str
) -> Iterator[Source | QuantizedSource]:
    """A router, which is never quantized, and the gated MLP of each expert, the shared one included."""
    experts, narrow = arch.experts, arch.hidden_size
    assert experts is not None and arch.has_gate
    wide, has_bias = experts.intermediate_size, experts.has_bias
    shared, theirs = f"{theirs}.{names.shared}", f"{theirs}.{names.of_experts}"
    yield Source(f"{theirs}{names.router}.weight", (experts.num_experts, narrow), f"{ours}.{ROUTER}.weight")
    if has_bias:
        yield Source(f"{theirs}{names.router}.bias", (experts.num_experts,), f"{ours}.{ROUTER}.bias")
    if experts.has_score_bias:
        shape = (experts.num_experts,) if experts.has_sigmoid else (1, experts.num_experts)
        yield Source(f"{theirs}{names.score_bias}", shape, f"{ours}.{SCORE_BIAS}")
    if experts.beside_mlp:
        for name, own in _BESIDE_MLP.items():
            size = experts.num_experts if own == EXPERT_SCALES else narrow
            yield Source(f"{theirs}{name}", (size,), f"{ours}.{own}.weight")
    for expert in range(experts.num_experts):
        module, own = f"{theirs}experts.{expert}", f"{ours}.experts.{expert}"
        yield from _linear(formats, module, names.gate_up, (wide, wide), narrow, f"{own}.gate_up", has_bias)
        yield from _linear(formats, module, (names.down,), (narrow,), wide, f"{own}.down", has_bias)
    if experts.shared_size:
        module, own, wide = shared, f"{ours}.shared", experts.shared_size
        if experts.has_shared_gate:
            yield Source(f"{module}_gate.weight", (1, narrow), f"{ours}.{SHARED_GATE}.weight")
        yield from _linear(formats, module, names.gate_up, (wide, wide), narrow, f"{own}.gate_up", False)
        yield from _linear(formats, module, (names.down,), (narrow,), wide, f"{own}.down", False)


def _linear(
    formats: _Formats,
    theirs: str,
    tensors: tuple[str, ...],
    out_sizes: tuple[int, ...],
    in_size: int,
    ours: str,
    has_bias: bool,
) -> Iterator[Source | QuantizedSource]:
    """Sources of one of our matrices, [sum(out_sizes), in_size]: one module for each size, or one module for all."""
    sizes = out_sizes if len(tensors) > 1 else (sum(out_sizes),)
    modules = [f"{theirs}.{name}" for name in tensors]
    pairs = list(zip(modules, sizes, strict=True))
    yield from _matrix([(module, formats.of(module), size) for module, size in pairs], in_size, ours, has_bias)
    if has_bias:
        row = 0
        for module, size in pairs:
            yield Source(f"{module}.bias", (size,), f"{ours}.bias", row)
            row += size


def _matrix(
    modules: list[tuple[str, Format | None, int]], in_size: int, ours: str, has_bias: bool = False
) -> Iterator[Source | QuantizedSource]:
    """Sources of one of our matrices from (module, its format, its number of rows). Modules that follow one another in
    one layout are one part of it."""
    parts: list[list[tuple[str, Format | None, int]]] = []
    row, layout = 0, None
    for module, form, size in modules:
        own = None if form is None else form.layout
        if not parts or own != layout or not (own is None or own.may_begin_at(row)):
            parts.append([])
            row, layout = 0, own
        parts[-1].append((module, form, size))
        row += size
    for number, part in enumerate(parts):
        matrix, row = (ours if len(parts) == 1 else f"{ours}.part{number}"), 0
        for index, (module, form, size) in enumerate(part):
            if form is None:
                yield Source(f"{module}.weight", (size, in_size), f"{matrix}.weight", row)
            else:
                reason = form.refuses(size, in_size)
                if reason is not None:
                    raise ArchError(f"{module} [{size}, {in_size}] {reason}")
                yield QuantizedSource(module, form, (size, in_size), matrix, row, index, has_bias)
            row += size
