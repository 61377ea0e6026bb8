"""Tensors that hold the matrices of all experts of a layer, as GGUF files and some directories have them: which part of
them each expert's matrix is. It knows names and shapes only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from inferd.engine.arch.weights import TensorNames

_STACKED = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(\w+?)_proj(?:\.weight)?")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one expert in a tensor [experts, rows, inputs]."""

    expert: int
    first_row: int
    num_rows: int


def slices(name: str, shape: tuple[int, ...], names: TensorNames) -> Iterator[tuple[str, Slice]]:
    """(name of an expert's matrix, its place) for all matrices in the tensor; nothing if it is no stack of matrices."""
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3 or len(names.gate_up) != 2:
        return
    gate, up = names.gate_up
    own = {"gate_up": (gate, up), "gate": (gate,), "up": (up,), "down": (names.down,)}.get(match[2], ())
    if not own or shape[1] % len(own):
        return
    num_rows = shape[1] // len(own)
    for expert in range(shape[0]):
        for index, part in enumerate(own):
            found = f"{match[1]}{names.mlp}.experts.{expert}.{part}.weight"
            yield found, Slice(expert, index * num_rows, num_rows)


def router_name(name: str, names: TensorNames) -> str:
    """The family's name of a router. Beside stacked experts it may have transformers' own name."""
    match = _ROUTER.fullmatch(name)
    return name if match is None else f"{match[1]}{names.mlp}.{names.router}.weight"
