"""Tensors that hold the matrices of all experts of a layer, as GGUF files and some directories have them: which part of
them each expert's matrix is. It knows names and shapes only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from inferd.engine.arch.tensors import TensorNames

_STACKED = re.compile(r"(model\.layers\.\d+\.)(?:(?:mlp|block_sparse_moe)\.)?experts\.(\w+?)_proj(?:\.(weight|bias))?")
_ALTERNATING = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
_GRANITE = re.compile(r"(model\.layers\.\d+\.)block_sparse_moe\.(input|output)_linear\.(weight)")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")
_ALTERNATING_KINDS = {
    "": ("weight", 3), "_bias": ("bias", 2), "_blocks": ("weight_packed", 4), "_scales": ("weight_scale", 3)
}  # fmt: skip
"""End of the name of a tensor of all experts -> (end of the name of each expert's, number of axes): weights [experts,
inputs, outputs], biases [experts, outputs], and in MXFP4 numbers [experts, outputs, groups, bytes] and scales [experts,
outputs, groups]."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one expert in a tensor [experts, rows, ...]."""

    expert: int
    first_row: int
    num_rows: int
    shape: tuple[int, ...]
    """Shape of the expert's own tensor. Axes behind its rows become one."""
    step: int = 1
    """Distance of its rows from one another."""
    is_transposed: bool = False
    """Whether the tensor is [experts, ..., rows]."""


def slices(name: str, shape: tuple[int, ...], names: TensorNames) -> Iterator[tuple[str, Slice]]:
    """(name of an expert's tensor, its place) for all in the tensor; nothing if it is no stack of experts."""
    if 0 in shape:
        return
    alternating = _ALTERNATING.fullmatch(name) if names.alternates_experts else None
    match = alternating or _STACKED.fullmatch(name) or _GRANITE.fullmatch(name)
    if match is None:
        return
    gate_up, down = names.gate_up, (names.down,)
    parts = {
        "gate_up": gate_up,
        "input": gate_up,
        "gate": gate_up[:1],
        "up": gate_up[-1:],
        "down": down,
        "output": down,
    }
    own = parts.get(match[2], ())
    suffix, num_axes = _ALTERNATING_KINDS[match[3]] if alternating else (match[3] or "weight", 2 + (match[3] != "bias"))
    is_transposed = alternating is not None and suffix == "weight"
    if not own or len(shape) != num_axes:
        return
    all_rows, inner = (shape[2], shape[1:2]) if is_transposed else (shape[1], shape[2:])
    num_rows, left = divmod(all_rows, len(own))
    if left:
        return
    own_shape = (num_rows, *([math.prod(inner)] if inner else []))
    for expert in range(shape[0]):
        for index, part in enumerate(own):
            first, step = (index, len(own)) if alternating else (index * num_rows, 1)
            place = Slice(expert, first, num_rows, own_shape, step, is_transposed)
            yield f"{match[1]}{names.of_experts}experts.{expert}.{part}.{suffix}", place


def router_name(name: str, names: TensorNames) -> str:
    """The family's name of a router. Beside stacked experts it may have transformers' own name."""
    match = _ROUTER.fullmatch(name)
    return name if match is None else f"{match[1]}{names.of_experts}{names.router}.weight"
