"""Layers with a recurrent state in the place of attention, and their states in one step: which rows they belong to, and
what is kept of drafts.

A kind of layer says how its state advances. The rest is the same: project, convolve, advance, project back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import recurrent, recurrent_weights
from inferd.engine.layers.branch import Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.states import StateRows, keep_rows


class Drafted(NamedTuple):
    """Projected inputs of a step's drafts, from which states go on behind those that turn out to be right."""

    projected: Tensor
    """[drafts, in] for each layer: what its input projection gave."""
    tokens: Tensor
    """[drafts] int64: index of each draft among the step's tokens."""
    num_drafts: Tensor
    """[1] int64."""


@dataclass(slots=True)
class StateContext:
    """One layer's states in one step."""

    rows: StateRows
    matrices: Tensor
    """[slots, heads, ...] fp32: holds the rows' states, and receives those behind them."""
    inputs: Tensor
    """[slots, conv_width - 1, channels]: the last inputs of the convolution, likewise."""
    drafted: Drafted | None = None
    """The layer's part; None if steps verify no drafts."""

    def keep(self, projected: Tensor) -> None:
        """Keep those of the projected inputs [T, in] that are drafts'."""
        if self.drafted is not None:
            keep_rows(projected, self.drafted.projected, self.drafted.tokens, self.drafted.num_drafts)


@dataclass(frozen=True, slots=True)
class States:
    """All layers' states in one step, by their order among the recurrent layers."""

    rows: StateRows
    matrices: Tensor
    inputs: Tensor
    drafted: Drafted | None = None
    """With `projected` [layers, drafts, in]."""

    def of(self, plane: int) -> StateContext:
        drafted = self.drafted
        if drafted is not None:
            drafted = drafted._replace(projected=drafted.projected[plane])
        return StateContext(self.rows, self.matrices[plane], self.inputs[plane], drafted)


class RecurrentLayer(ABC):
    """A layer of a step's tokens x [T, hidden]. It keeps each of its small tensors in fp32, as `_` and the tensor's
    name."""

    _conv: Tensor
    """[conv_width, channels]"""
    _conv_bias: Tensor | None = None

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        self._eps, self._branch = arch.norm_eps, branch
        self._in, self._out = (Linear(matrix, place) for matrix in recurrent(arch, layer))
        for name, weight in recurrent_weights(arch, layer).items():
            place.take(weight, partial(self._take, name), torch.float32)

    def _take(self, name: str, tensor: Tensor) -> None:
        setattr(self, f"_{name}", tensor.squeeze(1).t().contiguous() if name == "conv" else tensor)

    def __call__(self, x: Tensor, residual: Tensor | None, context: StateContext) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        projected, stream = self._branch.enter(self._in, x, residual)
        context.keep(projected)
        return self._branch.leave(self._out, self.mix(projected, context), stream)

    @abstractmethod
    def mix(self, projected: Tensor, context: StateContext) -> Tensor:
        """Inputs [T, out_size] of the projection back, from projected inputs [T, in]. Advances the states."""

    def advance(self, projected: Tensor, context: StateContext) -> object:
        """Advances the states by projected inputs [T, in], for the states alone."""
        return self.mix(projected, context)
