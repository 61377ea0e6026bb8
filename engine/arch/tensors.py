"""Makes the weight map of an architecture, from a family's names of tensors, without loading anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from inferd.engine.arch.description import Arch, ArchError, NormKind, QKNorm
from inferd.engine.arch.matrices import (
    attention,
    classifier,
    embedding,
    expert,
    expert_scales,
    head,
    layer_embedding,
    layer_input,
    layer_projection,
    mlp,
    norm,
    of_layer,
    recurrent,
    recurrent_weights,
    router,
    scalar,
    score_bias,
    shared_expert,
    shared_gate,
    sinks,
)
from inferd.engine.arch.matrix import LinearWeight
from inferd.engine.arch.modelled import Modelled
from inferd.engine.arch.recurrent import GatedDelta, ShortConv
from inferd.engine.arch.stored import BLOCK, Format, Stored, is_in_blocks
from inferd.engine.arch.weights import (
    AnySource,
    ByKeyHead,
    Neighbours,
    QuantizedSource,
    Source,
    Tensor,
    Tie,
    WeightMap,
)

_NORMS_BESIDE_MLP = {
    "post_feedforward_layernorm_1.weight": "post_norm",
    "pre_feedforward_layernorm_2.weight": "experts_norm",
    "post_feedforward_layernorm_2.weight": "experts_post_norm",
    "router.scale": "router_norm",
}
"""Gemma 4's names, and ours, of the norms of a layer that has both an MLP and experts."""


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
    """Names of a Gated DeltaNet's input projections. Rows of those that hold two of the four lie by key head."""
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

EMBEDDING, HEAD, CLASSIFIER = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
"""Names of the embedding, of the matrix of the logits, and of that of a classifier."""
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
    sources: list[AnySource] = [*_embedding(arch)]
    sources.extend(_norm(arch, f"model.{names.final_norm}", "norm"))
    formats = Formats(arch.stored)
    for layer in range(arch.num_layers):
        theirs, owner = f"model.layers.{layer}", of_layer(layer)
        for part in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            name = getattr(names, part)
            if name is not None:
                sources.extend(_norm(arch, f"{theirs}.{name}", part, owner))
        if layer in arch.recurrent_layers:
            sources.extend(_recurrent(arch, layer, formats, names, f"{theirs}.{names.recurrent}"))
        else:
            sources.extend(_attention(arch, layer, formats, names, f"{theirs}.self_attn"))
        if arch.has_layer_scalars:
            sources.append(Source.whole(f"{theirs}.layer_scalar", scalar(layer)))
        if arch.layer_input_size:
            sources.extend(_layer_input(arch, layer, formats, theirs))
        if arch.has_experts(layer):
            sources.extend(_experts(arch, layer, formats, names, theirs))
        if arch.has_mlp(layer):
            sources.extend(_mlp(mlp(arch, layer), formats, f"{theirs}.{names.mlp}", names))
    if arch.layer_input_size:
        sources.extend(_layer_inputs(arch))
    if arch.num_labels:
        sources.append(Source.whole(CLASSIFIER, classifier(arch)))
    ties = (Tie(HEAD, EMBEDDING),) if arch.tie_embeddings else ()
    if not ties and arch.has_head:
        form, matrix = None if arch.stored is None else arch.stored.head, head(arch)
        sources.extend(matrix_sources([("lm_head", form, matrix.num_rows)], matrix))
    return WeightMap(
        tuple(source for source in sources if isinstance(source, Source)),
        tuple(source for source in sources if isinstance(source, QuantizedSource)),
        ties,
        _unread(arch),
    )


def _embedding(arch: Arch) -> Iterable[AnySource]:
    weight = embedding(arch)
    if not isinstance(weight, LinearWeight):
        return (Source.whole(EMBEDDING, weight),)
    assert arch.stored is not None
    return matrix_sources([(EMBEDDING.removesuffix(".weight"), arch.stored.embedding, weight.num_rows)], weight)


def _unread(arch: Arch) -> tuple[str, ...]:
    """Layers that read the K and V of others may be stored with projections and norms of their own, and a model that
    draws no tokens with a head."""
    layers = [layer for layer in arch.attention_layers if layer not in arch.kv_layers]
    names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    head = () if arch.has_head else ("lm_head.",)
    return *(f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in names), *head


def modelled_weights(modelled: Modelled) -> WeightMap:
    """The tensors of a model that transformers' own code computes. None is fused with another."""
    sources = tuple(Source(tensor.name, tensor.shape, tensor.of) for tensor in modelled.tensors)
    (table,) = (source.tensor for source in sources if source.of.name == "embed")
    return WeightMap(sources, ties=tuple(Tie(name, equals=table) for name in modelled.ties), unread=modelled.unread)


class Formats:
    """The format of each linear module of the layers."""

    def __init__(self, stored: Stored | None) -> None:
        self._default = None if stored is None else stored.layers
        self._exceptions = {} if stored is None else dict(stored.exceptions)

    def of(self, module: str) -> Format | None:
        return self._exceptions.get(module, self._default)


def _norm(arch: Arch, tensor: str, own: str, owner: str = "") -> Iterator[Source]:
    weight = norm(own, arch.hidden_size, owner)
    yield Source.whole(f"{tensor}.weight", weight)
    if arch.norm is NormKind.LAYER:
        yield Source.whole(f"{tensor}.bias", weight.bias)


def _attention(arch: Arch, layer: int, formats: Formats, names: TensorNames, theirs: str) -> Iterator[AnySource]:
    heads, owner, (qkv, o) = arch.heads(layer), of_layer(layer), attention(arch, layer)
    projections = _linear(formats, theirs, names.qkv[: len(qkv.rows)], qkv)
    yield from _reordered(arch, projections, tuple(f"{theirs}.{name}" for name in names.qkv[:2]))
    yield from _linear(formats, theirs, (names.o,), o)
    if arch.has_sinks:
        yield Source.whole(f"{theirs}.sinks", sinks(arch, layer))
    if arch.qk_norm is not QKNorm.NONE:
        is_per_head = arch.qk_norm is QKNorm.HEAD
        norms = (names.q_norm, "q_norm", heads.q_size), (names.k_norm, "k_norm", heads.kv_size)
        for name, own, size in norms[: len(qkv.rows)]:
            weight = norm(f"attention.{own}", heads.head_dim if is_per_head else size, owner)
            yield Source.whole(f"{theirs}.{name}.weight", weight)


def _reordered(arch: Arch, qkv: Iterable[AnySource], turned: tuple[str, ...]) -> Iterator[AnySource]:
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


def _recurrent(arch: Arch, layer: int, formats: Formats, names: TensorNames, theirs: str) -> Iterator[AnySource]:
    """A Gated DeltaNet, a Mamba-2 layer, or a short convolution."""
    (before, behind), sizes = recurrent(arch, layer), arch.recurrent
    if isinstance(sizes, GatedDelta) and len(names.delta_in) < 4:
        qkv, z, b, a = sizes.in_sizes
        own = (qkv + z, b + a) if len(names.delta_in) == 2 else (qkv, z, b + a)
        yield from _by_key_head(sizes, _linear(formats, theirs, names.delta_in, before, own))
    else:
        in_names = names.delta_in if isinstance(sizes, GatedDelta) else ("in_proj",)
        yield from _linear(formats, theirs, in_names, before)
    yield from _linear(formats, theirs, ("out_proj",), behind)
    conv = "conv" if isinstance(sizes, ShortConv) else "conv1d"
    for name, weight in recurrent_weights(arch, layer).items():
        yield Source.whole(f"{theirs}.{_RECURRENT[name].format(conv)}", weight)


def _by_key_head(delta: GatedDelta, projections: Iterable[AnySource]) -> Iterator[AnySource]:
    """Sources of q, k, v and z in one matrix or two, and of b and a in another. In one matrix, their rows lie by key
    head."""
    share = delta.num_value_heads // delta.num_key_heads
    qkvz = ByKeyHead((delta.key_dim, delta.key_dim, share * delta.value_dim, share * delta.value_dim))
    *first, ba = projections
    yield from first if len(first) > 1 else _with_order(first[0], qkvz)
    yield from _with_order(ba, ByKeyHead((share, share)))


def _with_order(source: AnySource, order: ByKeyHead) -> Iterator[AnySource]:
    if isinstance(source, QuantizedSource) and is_in_blocks(source.format):
        raise ArchError(
            f"{source.module}: its rows lie by head, so FP8 blocks of {BLOCK} rows, which share scales, are not "
            "supported; give a checkpoint with another format of this matrix"
        )
    yield replace(source, row_order=order)


_RECURRENT = {
    "conv": "{}.weight", "conv_bias": "{}.bias", "a_log": "A_log", "dt_bias": "dt_bias", "d": "D", "norm": "norm.weight"
}  # fmt: skip
"""Names of a recurrent layer's tensors, by ours. `{}` stands for the convolution."""


def _mlp(
    matrices: tuple[LinearWeight, LinearWeight], formats: Formats, theirs: str, names: TensorNames
) -> Iterator[AnySource]:
    """The matrices of an MLP, or of an expert."""
    before, down = matrices
    yield from _linear(formats, theirs, names.gate_up if len(before.rows) > 1 else (names.up,), before)
    yield from _linear(formats, theirs, (names.down,), down)


def _layer_inputs(arch: Arch) -> Iterator[Source]:
    """The table and the projection that give all layers their inputs, side by side."""
    yield Source.whole("model.embed_tokens_per_layer.weight", layer_embedding(arch))
    yield Source.whole("model.per_layer_model_projection.weight", layer_projection(arch))
    weight = norm("layer_projection_norm", arch.layer_input_size)
    yield Source.whole("model.per_layer_projection_norm.weight", weight)


def _layer_input(arch: Arch, layer: int, formats: Formats, theirs: str) -> Iterator[AnySource]:
    """The matrices and the norm by which a layer adds its input to the stream."""
    gate, projection = layer_input(arch, layer)
    yield from _linear(formats, theirs, ("per_layer_input_gate",), gate)
    yield from _linear(formats, theirs, ("per_layer_projection",), projection)
    weight = norm("input.norm", arch.hidden_size, of_layer(layer))
    yield Source.whole(f"{theirs}.post_per_layer_input_norm.weight", weight)


def _experts(arch: Arch, layer: int, formats: Formats, names: TensorNames, theirs: str) -> Iterator[AnySource]:
    """A router, which is never quantized, and the gated MLP of each expert, the shared one included."""
    experts = arch.experts
    assert experts is not None and arch.has_gate
    shared, theirs = f"{theirs}.{names.shared}", f"{theirs}.{names.of_experts}"
    yield from _linear(Formats(None), theirs.removesuffix("."), (names.router,), router(arch, layer))
    if experts.has_score_bias:
        yield Source.whole(f"{theirs}{names.score_bias}", score_bias(arch, layer))
    if experts.beside_mlp:
        for name, own in _NORMS_BESIDE_MLP.items():
            yield Source.whole(f"{theirs}{name}", norm(f"mlp.{own}", arch.hidden_size, of_layer(layer)))
        yield Source.whole(f"{theirs}router.per_expert_scale", expert_scales(arch, layer))
    for index in range(experts.num_experts):
        yield from _mlp(expert(arch, layer, index), formats, f"{theirs}experts.{index}", names)
    if experts.shared_size:
        if experts.has_shared_gate:
            yield Source.whole(f"{shared}_gate.weight", shared_gate(arch, layer))
        yield from _mlp(shared_expert(arch, layer), formats, shared, names)


def _linear(
    formats: Formats, theirs: str, tensors: tuple[str, ...], matrix: LinearWeight, sizes: tuple[int, ...] | None = None
) -> Iterator[AnySource]:
    """Sources of one of our matrices: one module for each of `sizes` (default: its blocks of rows), or one for all."""
    if len(tensors) == 1:
        sizes = (matrix.num_rows,)
    sizes = sizes or tuple(axis.size for axis in matrix.rows)
    modules = [(f"{theirs}.{name}", size) for name, size in zip(tensors, sizes, strict=True)]
    yield from matrix_sources([(module, formats.of(module), size) for module, size in modules], matrix)
    if matrix.has_bias:
        starts = accumulate(sizes, initial=0)
        for (module, size), row in zip(modules, starts, strict=False):
            yield Source(f"{module}.bias", (size,), matrix.bias, row)


def matrix_sources(modules: list[tuple[str, Format | None, int]], matrix: LinearWeight) -> Iterator[AnySource]:
    """Sources of one of our matrices from (module, its format, its number of rows). Modules that follow one another in
    one layout are one part of it."""
    parts: list[list[tuple[str, Format | None, int]]] = []
    row, layout, in_size = 0, None, matrix.num_inputs
    for module, form, size in modules:
        own = None if form is None else form.layout
        if not parts or own != layout or not (own is None or own.may_begin_at(row)):
            parts.append([])
            row, layout = 0, own
        parts[-1].append((module, form, size))
        row += size
    for number, part in enumerate(parts):
        own_number, row = (None if len(parts) == 1 else number), 0
        for index, (module, form, size) in enumerate(part):
            if form is None:
                yield Source(f"{module}.weight", (size, in_size), matrix, row, own_number)
            else:
                reason = form.refuses(size, in_size)
                if reason is not None:
                    raise ArchError(f"{module} [{size}, {in_size}] {reason}")
                yield QuantizedSource(module, form, (size, in_size), matrix, row, own_number, index)
            row += size
