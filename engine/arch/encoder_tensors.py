"""The tensors of an `EncoderArch`: our own, from which layers are built, and those of a checkpoint that fill them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from inferd.engine.arch.description import ArchError
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.matrices import norm, of_layer
from inferd.engine.arch.matrix import Axis, Component, LinearWeight, Weight, whole
from inferd.engine.arch.tensors import Formats, matrix_sources
from inferd.engine.arch.weights import AnySource, QuantizedSource, RowOrder, Source, Tensor, UpFirst, WeightMap

EMBEDDING_NORM = "embedding_norm"


def embedding(arch: EncoderArch) -> Weight:
    return _table("embed", arch.vocab_size, arch)


def position_table(arch: EncoderArch) -> Weight:
    assert arch.positions is not None
    return _table("positions", arch.positions.num_rows, arch)


def token_types(arch: EncoderArch) -> Weight:
    return _table("token_types", arch.num_token_types, arch)


def relative_bias(arch: EncoderArch) -> Weight:
    """A row for each bucket, with a number for each head."""
    assert arch.relative_bias is not None
    return whole("relative_bias", Component.ATTENTION, (arch.relative_bias.num_buckets, arch.num_heads))


def distances(arch: EncoderArch) -> Weight:
    """A row for each bucket of distances of both signs."""
    assert arch.disentangled is not None
    return whole("distances", Component.ATTENTION, (2 * arch.disentangled.num_buckets, arch.hidden_size))


def stream_norm(arch: EncoderArch, own: str, owner: str = "") -> Weight:
    """A norm of hidden states, of this name; or that of the embedding."""
    return norm(own, arch.embedding_size if own == EMBEDDING_NORM else arch.hidden_size, owner)


def projection(arch: EncoderArch) -> LinearWeight:
    """The matrix that makes hidden states of the embedding. It is small, and stays in the dtype."""
    rows, inputs = (Axis(arch.hidden_size),), (arch.embedding_size,)
    return LinearWeight("projection", Component.PROJECTION, rows, inputs, has_bias=True, is_quantizable=False)


def attention(arch: EncoderArch, layer: int) -> tuple[LinearWeight, LinearWeight]:
    """qkv and o of a layer."""
    heads = tuple(Axis(count * arch.head_dim, count) for count in arch.head_counts)
    outputs = (Axis.of_rows(arch.hidden_size),)
    part = Component.ATTENTION
    return (
        _linear(layer, "attention.qkv", part, heads, arch.hidden_size, arch.has_qkv_bias),
        _linear(layer, "attention.o", part, outputs, arch.attention_size, arch.has_o_bias),
    )


def mlp(arch: EncoderArch, layer: int) -> tuple[LinearWeight, LinearWeight]:
    """The matrices before and behind the activation."""
    wide, outputs = Axis.of_rows(arch.intermediate_size), (Axis.of_rows(arch.hidden_size),)
    own, rows = ("mlp.gate_up", (wide, wide)) if arch.has_gate else ("mlp.up", (wide,))
    return (
        _linear(layer, own, Component.MLP, rows, arch.hidden_size, arch.has_up_bias),
        _linear(layer, "mlp.down", Component.MLP, outputs, arch.intermediate_size, arch.has_down_bias),
    )


def classifier(arch: EncoderArch) -> tuple[LinearWeight, LinearWeight]:
    """The matrices before and behind the activation of the classifier. They are small, and stay in the dtype."""
    head = arch.classifier
    assert head is not None

    def of(own: str, num_rows: int, has_bias: bool) -> LinearWeight:
        rows, inputs = (Axis(num_rows),), (arch.hidden_size,)
        return LinearWeight(own, Component.HEAD, rows, inputs, has_bias=has_bias, is_quantizable=False)

    dense = of("classifier.dense", arch.hidden_size, head.has_dense_bias)
    return dense, of("classifier.out", head.num_labels, True)


def _table(own: str, num_rows: int, arch: EncoderArch) -> Weight:
    return whole(own, Component.EMBEDDING, (num_rows, arch.embedding_size))


def _linear(
    layer: int, own: str, component: Component, rows: tuple[Axis, ...], num_inputs: int, has_bias: bool
) -> LinearWeight:
    return LinearWeight(own, component, rows, (num_inputs,), of_layer(layer), has_bias=has_bias)


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """A family's names of tensors, in fields that have our names. The defaults are BERT's. Tensors that we fuse may be
    one or several in the checkpoint. Empty: there is no such tensor."""

    prefixes: tuple[str, ...]
    """Beginnings that a checkpoint may put before the names of all tensors but the head's."""
    embed: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    projection: str = ""
    relative_bias: str = ""
    distances: str = ""
    distance_norm: str = ""
    layer: str = "encoder.layer."
    """Beginning of the names of a layer's tensors, before its number."""
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    o: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    """With a gate, names of the gate and of the up; or that of one tensor that has the gate's rows first."""
    gate_up: tuple[str, str] | None = None
    """Names of the gate and of the up in a family whose MLP may have a gate, or none and the names above."""
    has_up_first: bool = False
    """Whether that one tensor has the up's rows first."""
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    classifier: tuple[str, str] = ("pooler.dense", "classifier")
    """Names of the classifier's two matrices."""
    classifier_norm: str = ""
    unread: tuple[str, ...] = ("pooler.", "cls.", "embeddings.position_ids")
    """Beginnings of the names of tensors that a checkpoint may hold and that are not read."""


SPLIT_GATE = ("mlp.gate", "mlp.up")
"""Names of the gate and the up if they lie one by one in a family that has one tensor of both."""


def named_in_full(tensors: Mapping[str, Tensor], names: EncoderNames) -> dict[str, Tensor]:
    """The same tensors without the family's prefix, which a model with a head has, and by today's names of norms: old
    checkpoints say `gamma` and `beta`. Raises `ArchError` if two tensors get one name."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in names.prefixes if name.startswith(prefix)), "")
        own = name.removeprefix(prefix)
        for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
            own = own.removesuffix(old) + new if own.endswith(old) else own
        if own in found:
            raise ArchError(f"the checkpoint stores {own} twice, once with a prefix as {prefix or names.prefixes[0]}")
        found[own] = tensor
    return found


def weight_map(arch: EncoderArch, names: EncoderNames) -> WeightMap:
    """Every tensor of `arch` in a checkpoint that uses `names`, without prefixes."""
    gate_up = SPLIT_GATE if arch.splits_gate else names.gate_up if arch.has_gate else None
    names = names if gate_up is None else replace(names, up=gate_up)
    sources: list[AnySource] = [*_embeddings(arch, names)]
    if arch.projected_from is not None:
        sources += _modules(Formats(None), "", (names.projection,), projection(arch))
    formats = Formats(arch.stored)
    for layer in range(arch.num_stored_layers):
        theirs, owner = f"{names.layer}{layer}.", of_layer(layer)
        (qkv, o), (up, down) = attention(arch, layer), mlp(arch, layer)
        sources += _modules(formats, theirs, names.qkv, qkv)
        sources += _modules(formats, theirs, (names.o,), o)
        sources += _modules(formats, theirs, names.up, up, UpFirst() if names.has_up_first else None)
        sources += _modules(formats, theirs, (names.down,), down)
        if arch.has_attention_norm(layer):
            sources += _norm(arch, theirs + names.attention_norm, stream_norm(arch, "attention_norm", owner))
        sources += _norm(arch, theirs + names.mlp_norm, stream_norm(arch, "mlp_norm", owner))
    if arch.has_pre_norms:
        sources += _norm(arch, names.final_norm, stream_norm(arch, "norm"))
    if arch.classifier is not None:
        for module, matrix in zip(names.classifier, classifier(arch), strict=True):
            sources += _modules(Formats(None), "", (module,), matrix)
        if arch.classifier.has_norm:
            sources += _norm(arch, names.classifier_norm, stream_norm(arch, "classifier.norm"))
    plain = tuple(source for source in sources if isinstance(source, Source))
    quantized = tuple(source for source in sources if isinstance(source, QuantizedSource))
    read = {source.tensor for source in plain}
    unread = tuple(name for name in names.unread if not any(tensor.startswith(name) for tensor in read))
    return WeightMap(plain, quantized, unread=unread)


def _embeddings(arch: EncoderArch, names: EncoderNames) -> Iterator[Source]:
    yield Source.whole(f"{names.embed}.weight", embedding(arch))
    if arch.positions is not None:
        yield Source.whole(f"{names.positions}.weight", position_table(arch))
    if arch.num_token_types:
        yield Source.whole(f"{names.token_types}.weight", token_types(arch))
    if arch.relative_bias is not None:
        yield Source.whole(f"{names.relative_bias}.weight", relative_bias(arch))
    if arch.disentangled is not None:
        yield Source.whole(f"{names.distances}.weight", distances(arch))
        if arch.disentangled.has_norm:
            yield from _norm(arch, names.distance_norm, stream_norm(arch, "distance_norm"))
    if arch.has_embedding_norm:
        yield from _norm(arch, names.embedding_norm, stream_norm(arch, EMBEDDING_NORM))


def _norm(arch: EncoderArch, module: str, weight: Weight) -> Iterator[Source]:
    yield Source.whole(f"{module}.weight", weight)
    if arch.has_norm_bias:
        yield Source.whole(f"{module}.bias", weight.bias)


def _modules(
    formats: Formats, theirs: str, modules: tuple[str, ...], matrix: LinearWeight, order: RowOrder | None = None
) -> Iterable[AnySource]:
    """Sources of one of our matrices: one module for each of its blocks of rows, or one for all."""
    sizes = (matrix.num_rows,) if len(modules) == 1 else tuple(axis.size for axis in matrix.rows)
    named = [(f"{theirs}{module}", size) for module, size in zip(modules, sizes, strict=True)]
    for source in matrix_sources([(module, formats.of(module), size) for module, size in named], matrix):
        yield replace(source, row_order=order)
    if matrix.has_bias:
        for (module, size), row in zip(named, accumulate(sizes, initial=0), strict=False):
            yield Source(f"{module}.bias", (size,), matrix.bias, row, row_order=order)
