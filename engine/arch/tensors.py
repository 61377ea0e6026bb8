"""Makes the weight map of an architecture, from a family's names of tensors, without loading anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from inferd.engine.arch.description import Arch, ArchError, GatedDelta, Mamba2, NormKind, QKNorm, ShortConv
from inferd.engine.arch.modelled import Modelled
from inferd.engine.arch.stored import BLOCK, Format, Stored, is_in_blocks
from inferd.engine.arch.weights import (
    EXPERT_SCALES,
    ROUTER,
    SCORE_BIAS,
    SHARED_GATE,
    ByKeyHead,
    Neighbours,
    QuantizedSource,
    Source,
    Tensor,
    Tie,
    WeightMap,
)

_BESIDE_MLP = {
    "post_feedforward_layernorm_1.weight": "post_norm",
    "pre_feedforward_layernorm_2.weight": "experts_norm",
    "post_feedforward_layernorm_2.weight": "experts_post_norm",
    "router.scale": "router_norm",
    "router.per_expert_scale": EXPERT_SCALES,
}
"""Gemma 4's names, and ours, of what a layer has if it has both an MLP and experts."""


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
