"""Inputs that each layer gets from the token itself, beside the stream (Gemma 4's per-layer embeddings): how they are
computed, and what a layer does with its own."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import layer_embedding, layer_input, layer_projection, of_layer
from inferd.engine.layers.branch import GATES
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import rms_norm_of, stream_norm
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.embed import embed
from inferd.kernels.ops.join import join
from inferd.kernels.ops.scaled_add import added, scaled


class LayerInputs:
    """The inputs of all layers: a row of a table and a normed projection of the token's embedding, added up. Every rank
    computes them whole."""

    _table: Tensor

    def __init__(self, arch: Arch, place: Placement) -> None:
        own, total = arch.layer_input_size, arch.num_layers * arch.layer_input_size
        self._dtype, self._own, self._total = place.dtype, own, total
        place.take(layer_embedding(arch), self._take_table, place.recipe.narrow)
        self._projection = Linear(layer_projection(arch), place)
        self._norm = rms_norm_of(arch, place, "layer_projection_norm", own)
        self._table_multiplier = float(torch.tensor(own**0.5, dtype=place.dtype))
        self._projection_multiplier = arch.hidden_size**-0.5

    def _take_table(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Each layer's [T, layer_input_size], from token_ids [T] and their embeddings x [T, hidden]."""
        projected = scaled(self._projection(x), self._projection_multiplier)
        normed = self._norm(projected.view(-1, self._own)).view(-1, self._total)
        rows = scaled(embed(token_ids, self._table, self._dtype), self._table_multiplier)
        return torch.split(scaled(added(normed, rows), 0.5**0.5), self._own, dim=1)


class LayerInput:
    """Adds norm(projection(activation(gate(stream)) * input)) to the stream, for one layer's input."""

    def __init__(self, arch: Arch, layer: int, place: Placement) -> None:
        self._gate, self._projection = (Linear(matrix, place) for matrix in layer_input(arch, layer))
        self._norm, self._act = stream_norm(arch, place, "input.norm", of_layer(layer)), GATES[arch.activation]

    def __call__(self, x: Tensor, residual: Tensor | None, own_input: Tensor) -> tuple[Tensor, Tensor]:
        """The stream (x, residual), [T, hidden] each, with the result for own_input [T, layer_input_size] added."""
        stream = x if residual is None else added(x, residual)
        return self._norm(self._projection(self._act.run(join([self._gate(stream), own_input])))), stream
