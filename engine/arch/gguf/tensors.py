"""Names and forms of the tensors in GGUF files: which tensor of the original checkpoint each is, and how to undo what
the conversion changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from inferd.engine.arch.gguf.header import GgufTensor
from inferd.engine.arch.gguf.metadata import FACTOR_TENSORS, GgufFamily
from inferd.engine.arch.gguf.orders import Order, Pairs, TiledHeads
from inferd.engine.arch.recurrent import GatedDelta, Recurrent
from inferd.engine.arch.tensors import TensorNames

_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "cls.output": "score",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_FINAL_NORMS = ("output_norm", "token_embd_norm")
"""Names of the norm behind the layers. LFM2's is called after the embedding, as in its checkpoints."""
_KINDS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Conversion:
    """How the values in a GGUF file differ from those of the original tensor."""

    rows: Order | None = None
    """Order of the rows; None: the original one."""
    columns: TiledHeads | None = None
    """Order of the values in each row."""
    excess: float = 0.0
    """Number that was added to every value."""
    is_decay: bool = False
    """Whether a value x of the original is stored as -exp(x)."""


PLAIN = Conversion()


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor in its file."""

    tensor: GgufTensor
    file: Path
    conversion: Conversion


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of a model that its tensors' forms depend on."""

    num_layers: int
    """Number of layers without those that only draft."""
    num_heads: int
    num_kv_heads: int
    recurrent: Recurrent | None = None


class OriginalNames:
    """Turns the names of one file into those of the original checkpoint."""

    def __init__(self, family: GgufFamily, names: TensorNames, sizes: Sizes) -> None:
        self._family, self._names, self._sizes = family, names, sizes
        self._in_layer = {
            **{
                f"{theirs}.{kind}": f"{original}.{kind}"
                for theirs, original in _in_layer(names, family.mlp_norm)
                for kind in _KINDS
            },
            **_without_kind(names),
        }
        self._conversions = _conversions(family, sizes)

    def of(self, tensor: GgufTensor) -> tuple[str, GgufTensor, Conversion] | None:
        """(original name, the tensor with its original shape, conversion); None if the model needs no such tensor. A
        name that is not known stays as it is."""
        name = tensor.name
        if name in FACTOR_TENSORS:
            return None
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            found = self._of_layer(int(layer[1]), layer[2])
            return found or name, _reshaped(tensor, layer[2]), self._conversion(layer[2])
        outside, _, kind = name.rpartition(".")
        if outside in _FINAL_NORMS:
            return f"model.{self._names.final_norm}.{kind}", tensor, self._conversion(name)
        return (f"{_OUTSIDE[outside]}.{kind}" if outside in _OUTSIDE else name), tensor, self._conversion(name)

    def _of_layer(self, layer: int, name: str) -> str | None:
        """The original name of the tensor `name` of a layer; None if it is not known."""
        behind = layer - self._sizes.num_layers
        if behind < 0 or not self._family.mtp:
            original = self._in_layer.get(name)
            return None if original is None else f"model.layers.{layer}.{original}"
        part, _, kind = name.rpartition(".")
        if part.startswith("nextn."):
            own = self._family.mtp.get(part.removeprefix("nextn."))
            return None if own is None else f"{own.format(layer=layer)}.{kind}"
        original = self._in_layer.get(name)
        return None if original is None else self._family.mtp[""].format(layer=layer, mtp=behind) + original

    def _conversion(self, name: str) -> Conversion:
        found = self._conversions.get(name.removesuffix(".bias").removesuffix(".weight"), PLAIN)
        is_norm = name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
        return replace(found, excess=self._family.norm_excess) if is_norm and self._family.norm_excess else found


def _conversions(family: GgufFamily, sizes: Sizes) -> dict[str, Conversion]:
    """Conversion of the tensors of a layer, by their names without "weight" or "bias"."""
    found: dict[str, Conversion] = {"ssm_a": Conversion(is_decay=True)}
    if family.pairs_rows:
        found |= {"attn_q": Conversion(Pairs(sizes.num_heads)), "attn_k": Conversion(Pairs(sizes.num_kv_heads))}
    if not family.tiles_value_heads or not isinstance(sizes.recurrent, GatedDelta):
        return found
    delta = sizes.recurrent
    share = delta.num_value_heads // delta.num_key_heads
    if share == 1:
        return found
    single = TiledHeads(delta.num_key_heads, share)
    values = replace(single, head_size=delta.value_dim)
    behind_keys = replace(values, first=delta.conv_size - delta.out_size)
    return {
        "ssm_a": Conversion(single, is_decay=True),
        **dict.fromkeys(("ssm_dt", "ssm_alpha", "ssm_beta"), Conversion(single)),
        **dict.fromkeys(("attn_qkv", "ssm_conv1d"), Conversion(behind_keys)),
        "attn_gate": Conversion(values),
        "ssm_out": Conversion(columns=values),
    }


def _without_kind(names: TensorNames) -> dict[str, str]:
    """Name in a GGUF file -> name in the original checkpoint, of the tensors of a layer that lack "weight" or "bias" in
    one of them."""
    return {
        "attn_sinks.weight": "self_attn.sinks",
        "exp_probs_b.bias": f"{names.of_experts}{names.score_bias}",
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": f"{names.of_experts}router.scale",
        "ffn_down_exps.scale": f"{names.of_experts}router.per_expert_scale",
        "ssm_a": f"{names.recurrent}.A_log",
        "ssm_d": f"{names.recurrent}.D",
        "ssm_dt.bias": f"{names.recurrent}.dt_bias",
    }


def _in_layer(names: TensorNames, mlp_norm: str) -> Iterator[tuple[str, str]]:
    """(name in a GGUF file, name in the original checkpoint) of the tensors in a layer, without "weight" or "bias"."""
    norms = {
        "attn_norm": names.attention_norm,
        "post_attention_norm": names.attention_post_norm,
        "post_ffw_norm": names.mlp_post_norm,
    }
    known = {theirs: original for theirs, original in norms.items() if original is not None}
    yield from (known if names.mlp_norm is None else known | {mlp_norm: names.mlp_norm}).items()
    qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",)
    attention = {**dict(zip(qkv, names.qkv, strict=True)), "attn_output": names.o}
    attention |= {"attn_q_norm": names.q_norm, "attn_k_norm": names.k_norm}
    yield from ((theirs, f"self_attn.{original}") for theirs, original in attention.items())
    mlp = {"ffn_up": names.up, "ffn_down": names.down}
    mlp["ffn_up" if len(names.gate_up) == 1 else "ffn_gate"] = names.gate_up[0]
    yield from ((theirs, f"{names.mlp}.{original}") for theirs, original in mlp.items())
    yield "ffn_gate_inp", f"{names.of_experts}{names.router}"
    # Those of all experts in one tensor: see arch/stacked.
    yield from ((f"ffn_{part}_exps", f"mlp.experts.{part}_proj") for part in ("gate", "up", "gate_up", "down"))
    shared = {"gate": names.gate_up[0], "up": names.up, "down": names.down}
    yield from ((f"ffn_{part}_shexp", f"{names.shared}.{original}") for part, original in shared.items())
    yield "ffn_gate_inp_shexp", f"{names.shared}_gate"
    yield from ((theirs, f"{names.recurrent}.{original}") for theirs, original in _recurrent(names))
    yield from _GEMMA4.items()


def _recurrent(names: TensorNames) -> Iterator[tuple[str, str]]:
    """The same of a recurrent layer, without the name of its module."""
    yield from {"ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}.items()
    yield from ((f"shortconv.{part}", part) for part in ("conv", "in_proj", "out_proj"))
    if len(names.delta_in) == 2:
        yield from zip(("ssm_in", "ssm_ba"), names.delta_in, strict=True)
        return
    yield "ssm_in", "in_proj"
    if len(names.qkv) > 1:
        scales = ("ssm_ba",) if len(names.delta_in) == 3 else ("ssm_beta", "ssm_alpha")
        yield from zip(("attn_qkv", "attn_gate", *scales), names.delta_in, strict=True)


_GEMMA4 = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Gemma 4's norms around experts, and its inputs of layers."""


def _reshaped(tensor: GgufTensor, name: str) -> GgufTensor:
    """The tensor `name` of a layer in the shape of the original one, whose values have the same order."""
    shape = _SHAPES.get(name, tuple)(tensor.shape)
    return tensor if shape == tensor.shape else replace(tensor, shape=shape)


Shape = tuple[int, ...]


def _flat(shape: Shape) -> Shape:
    rows, *others = shape
    return (rows, *(size for size in others if size != 1)) if len(shape) != 2 else (rows * others[0],)


def _of_channels(shape: Shape) -> Shape:
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


_SHAPES: Mapping[str, Callable[[Shape], Shape]] = {
    **dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm.weight"), _flat),
    **dict.fromkeys(("ssm_conv1d.weight", "shortconv.conv.weight"), _of_channels),
}
"""Original shapes of tensors that the conversion gave other axes."""
