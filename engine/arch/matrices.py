"""The matrices of an `Arch`, part by part.

The layers are built from them, and `tensors` says which tensors of a checkpoint fill them. `matrix` says what is known
of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from inferd.engine.arch.description import Arch
from inferd.engine.arch.heads import Heads
from inferd.engine.arch.matrix import Axis, Component, LinearWeight, Weight, whole
from inferd.engine.arch.recurrent import Mamba2, ShortConv


def of_layer(layer: int) -> str:
    """Name of a layer as owner."""
    return f"layers.{layer}."


def kv_axis(heads: Heads) -> Axis:
    """The numbers of K, or of V, of all heads of a layer."""
    return Axis(heads.kv_size, heads.num_kv_heads, repeats=True)


def embedding(arch: Arch) -> Weight:
    """A matrix if it keeps the blocks of its file."""
    shape = (arch.vocab_size, arch.hidden_size)
    if arch.stored is not None and arch.stored.embedding is not None:
        return LinearWeight.whole("embed", Component.EMBEDDING, shape)
    return whole("embed", Component.EMBEDDING, shape)


def layer_embedding(arch: Arch) -> Weight:
    """The table of the layers' inputs, side by side."""
    shape = (arch.vocab_size, arch.num_layers * arch.layer_input_size)
    return whole("layer_embed", Component.EMBEDDING, shape)


def norm(own: str, size: int, owner: str = "") -> Weight:
    return whole(own, Component.NORMS, (size,), owner)


def scalar(layer: int) -> Weight:
    """The number that the stream is multiplied by after a layer."""
    return norm("scalar", 1, of_layer(layer))


def head(arch: Arch) -> LinearWeight:
    """The matrix of the logits."""
    return LinearWeight("lm_head", Component.HEAD, (Axis.of_rows(arch.num_logits),), (arch.hidden_size,))


def classifier(arch: Arch) -> LinearWeight:
    """The matrix of the logits of labels. It is small, and every rank has it."""
    rows, inputs = (Axis(arch.num_labels),), (arch.hidden_size,)
    return LinearWeight("classifier", Component.HEAD, rows, inputs, is_quantizable=False)


def attention(arch: Arch, layer: int) -> tuple[LinearWeight, LinearWeight]:
    """qkv and o of a layer with attention."""
    heads, hidden = arch.heads(layer), arch.hidden_size
    q_size, *others = arch.qkv_sizes(layer)
    rows, outputs = (Axis(q_size, heads.num_heads), *(kv_axis(heads) for _ in others)), Axis.of_rows(hidden)
    before = _linear(layer, "attention.qkv", Component.ATTENTION, rows, arch.attention_in_size, arch.has_qkv_bias)
    behind = _linear(layer, "attention.o", Component.ATTENTION, (outputs,), heads.q_size, arch.has_o_bias)
    split = replace(behind, split_inputs=Axis(heads.q_size, heads.num_heads))
    return replace(before, takes_adapters=True), replace(split, takes_adapters=True)


def sinks(arch: Arch, layer: int) -> Weight:
    """The scores of attention heads that have no value."""
    return Weight("attention.sinks", Component.ATTENTION, (Axis.of_rows(arch.num_heads),), (), of_layer(layer))


def recurrent(arch: Arch, layer: int) -> tuple[LinearWeight, LinearWeight]:
    """The projections before and behind the state of a recurrent layer. One process computes it."""
    assert arch.recurrent is not None
    sizes, hidden, has_bias = arch.recurrent, arch.hidden_size, arch.recurrent.has_bias
    rows = tuple(Axis(size) for size in sizes.in_sizes)
    return (
        _linear(layer, "recurrent.in", Component.RECURRENT, rows, hidden, has_bias),
        _linear(layer, "recurrent.out", Component.RECURRENT, (Axis(hidden),), sizes.out_size, has_bias),
    )


def recurrent_weights(arch: Arch, layer: int) -> dict[str, Weight]:
    """The tensors of a recurrent layer beside its projections. Its convolution has a row of weights for each
    channel."""
    sizes = arch.recurrent
    assert sizes is not None

    def of(own: str, *shape: int, leaf: str = "weight") -> Weight:
        return whole(own, Component.RECURRENT, shape, of_layer(layer), leaf)

    found = {"conv": of("recurrent.conv", sizes.conv_size, 1, sizes.conv_width)}
    if sizes.has_conv_bias:
        found["conv_bias"] = found["conv"].bias
    if isinstance(sizes, ShortConv):
        return found
    for leaf in ("a_log", "dt_bias", "d") if isinstance(sizes, Mamba2) else ("a_log", "dt_bias"):
        found[leaf] = of("recurrent", sizes.state_shape[0], leaf=leaf)
    size = sizes.out_size if isinstance(sizes, Mamba2) else sizes.value_dim
    return {**found, "norm": norm("recurrent.norm", size, of_layer(layer))}


def mlp(arch: Arch, layer: int) -> tuple[LinearWeight, LinearWeight]:
    """The matrices before and behind the activation of a layer's MLP."""
    before, down = _mlp(arch, of_layer(layer), "mlp.", Component.MLP, arch.mlp_size(layer), arch.has_mlp_bias)
    return replace(before, takes_adapters=True), replace(down, takes_adapters=True)


def expert(arch: Arch, layer: int, index: int) -> tuple[LinearWeight, LinearWeight]:
    """The same of one expert."""
    assert arch.experts is not None
    experts, owner = arch.experts, f"{of_layer(layer)}mlp.experts.{index}."
    return _mlp(arch, owner, "", Component.EXPERTS, experts.intermediate_size, experts.has_bias)


def shared_expert(arch: Arch, layer: int) -> tuple[LinearWeight, LinearWeight]:
    """The same of the expert that every token goes to."""
    assert arch.experts is not None
    return _mlp(arch, of_layer(layer), "mlp.shared.", Component.MLP, arch.experts.shared_size, has_bias=False)


def router(arch: Arch, layer: int) -> LinearWeight:
    """The matrix of the logits of a layer's experts."""
    assert arch.experts is not None
    return _gate(arch, layer, "mlp.router", arch.experts.num_experts, arch.experts.has_bias)


def score_bias(arch: Arch, layer: int) -> Weight:
    """The bias of the scores by which experts are chosen. Families with a softmax store it as a row."""
    assert arch.experts is not None
    count = arch.experts.num_experts
    shape = (count,) if arch.experts.has_sigmoid else (1, count)
    return whole("mlp.router", Component.ROUTERS, shape, of_layer(layer), "score_bias")


def expert_scales(arch: Arch, layer: int) -> Weight:
    """The numbers that the weights of experts are multiplied by."""
    assert arch.experts is not None
    return whole("mlp.expert_scales", Component.ROUTERS, (arch.experts.num_experts,), of_layer(layer))


def shared_gate(arch: Arch, layer: int) -> LinearWeight:
    """The matrix of one row that gives the gate of the shared expert."""
    return _gate(arch, layer, "mlp.shared_gate", 1, has_bias=False)


def layer_projection(arch: Arch) -> LinearWeight:
    """The matrix that gives all layers their inputs, side by side."""
    shape = (arch.num_layers * arch.layer_input_size, arch.hidden_size)
    return LinearWeight.whole("layer_projection", Component.LAYER_INPUTS, shape)


def layer_input(arch: Arch, layer: int) -> tuple[LinearWeight, LinearWeight]:
    """The matrices by which a layer adds its input to the stream."""
    size, hidden, part = Axis(arch.layer_input_size), Axis(arch.hidden_size), Component.LAYER_INPUTS
    return (
        _linear(layer, "input.gate", part, (size,), hidden.size),
        _linear(layer, "input.projection", part, (hidden,), size.size),
    )


def state_projection(arch: Arch, num_inputs: int) -> LinearWeight:
    """The matrix by which a draft head reads hidden states."""
    return _linear(0, "fc", Component.PROJECTION, (Axis(arch.hidden_size),), num_inputs)


def token_offsets(num_tokens: int) -> Weight:
    """Number i is the id of a draft head's token i in the served vocabulary, less i."""
    return whole("token_offsets", Component.TOKEN_IDS, (num_tokens,), leaf="")


def layer_matrices(arch: Arch) -> Iterator[LinearWeight]:
    """All matrices of attention, MLP and experts, layer by layer."""
    for layer in range(arch.num_layers):
        if layer not in arch.recurrent_layers:
            yield from attention(arch, layer)
        if arch.has_experts(layer):
            assert arch.experts is not None
            for index in range(arch.experts.num_experts):
                yield from expert(arch, layer, index)
            if arch.experts.shared_size:
                yield from shared_expert(arch, layer)
        if arch.has_mlp(layer):
            yield from mlp(arch, layer)


def _linear(
    layer: int, own: str, component: Component, rows: tuple[Axis, ...], num_inputs: int, has_bias: bool = False
) -> LinearWeight:
    return LinearWeight(own, component, rows, (num_inputs,), of_layer(layer), has_bias=has_bias)


def _mlp(
    arch: Arch, owner: str, prefix: str, component: Component, size: int, has_bias: bool
) -> tuple[LinearWeight, LinearWeight]:
    wide, hidden, name = Axis.of_rows(size), arch.hidden_size, "gate_up" if arch.has_gate else "up"
    rows, outputs = (wide, wide) if arch.has_gate else (wide,), (Axis.of_rows(hidden),)
    before = LinearWeight(f"{prefix}{name}", component, rows, (hidden,), owner, has_bias=has_bias)
    return before, LinearWeight(
        f"{prefix}down", component, outputs, (size,), owner, has_bias=has_bias, split_inputs=wide
    )


def _gate(arch: Arch, layer: int, own: str, num_rows: int, has_bias: bool) -> LinearWeight:
    found = _linear(layer, own, Component.ROUTERS, (Axis(num_rows),), arch.hidden_size, has_bias)
    return replace(found, is_quantizable=False)
