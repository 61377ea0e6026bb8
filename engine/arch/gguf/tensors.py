"""Names and forms of the tensors in GGUF files: which tensor of the original checkpoint each is, and how to undo what
the conversion changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferd.engine.arch.gguf.config import FACTOR_TENSORS, GgufFamily
from inferd.engine.arch.gguf.header import GgufTensor
from inferd.engine.arch.tensors import TensorNames

_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")
_SINKS = ("attn_sinks", "weight")
"""Their original name has no ending."""
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class Conversion:
    """How the values in a GGUF file differ from those of the original tensor."""

    paired_heads: int = 0
    """Number of heads whose rows are stored in pairs: row i of a head is followed by its row i + half of the head. 0 if
    the rows have the original order."""
    excess: float = 0.0
    """Number that was added to every value."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor in its file."""

    tensor: GgufTensor
    file: Path
    conversion: Conversion


class OriginalNames:
    """Turns the names of one file into those of the original checkpoint."""

    def __init__(self, family: GgufFamily, names: TensorNames, num_heads: int, num_kv_heads: int) -> None:
        self._family = family
        self._in_layer = dict(_in_layer(names, family.mlp_norm))
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if family.pairs_rows else {}

    def of(self, name: str) -> tuple[str, Conversion] | None:
        """(original name, conversion) of the tensor `name`; None if the model needs no such tensor. A name that is not
        known stays as it is."""
        if name in FACTOR_TENSORS:
            return None
        layer = _LAYER.fullmatch(name)
        if layer is not None and (layer[2], layer[3]) == _SINKS:
            return f"model.layers.{int(layer[1])}.self_attn.sinks", Conversion()
        if layer is not None and layer[2] in self._in_layer:
            original = f"model.layers.{int(layer[1])}.{self._in_layer[layer[2]]}.{layer[3]}"
            return original, Conversion(self._heads.get(layer[2], 0), self._excess(layer[2], layer[3]))
        outside, _, kind = name.rpartition(".")
        if outside in _OUTSIDE:
            return f"{_OUTSIDE[outside]}.{kind}", Conversion(excess=self._excess(outside, kind))
        return name, Conversion()

    def _excess(self, name: str, kind: str) -> float:
        return self._family.norm_excess if name.endswith("norm") and kind == "weight" else 0.0


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
    attention |= {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
    yield from ((theirs, f"self_attn.{original}") for theirs, original in attention.items())
    mlp = {"ffn_up": names.up, "ffn_down": names.down}
    mlp["ffn_up" if len(names.gate_up) == 1 else "ffn_gate"] = names.gate_up[0]
    mlp |= {"ffn_gate_inp": names.router}
    mlp |= {
        f"ffn_{part}_exps": f"experts.{part}_proj" for part in ("gate", "up", "down")
    }  # of all experts: see stacked
    yield from ((theirs, f"{names.mlp}.{original}") for theirs, original in mlp.items())
