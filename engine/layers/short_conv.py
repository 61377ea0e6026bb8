"""The short convolution of one layer of LFM2: project, gate, convolve, gate again, project back.

The matrix of the first projection has the rows of the gate before the convolution, of the gate behind it, and of its
input.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch, ShortConv
from inferd.engine.arch.matrices import recurrent, recurrent_weights
from inferd.engine.layers.branch import Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.recurrent import StateContext
from inferd.kernels.short_conv import short_conv


class ShortConvLayer:
    """Gated short convolution of a step's tokens x [T, hidden]."""

    _conv: Tensor
    """[conv_width, hidden] fp32."""
    _conv_bias: Tensor | None = None

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        assert isinstance(arch.recurrent, ShortConv)
        self._branch = branch
        self._in, self._out = (Linear(matrix, place) for matrix in recurrent(arch, layer))
        for name, weight in recurrent_weights(arch, layer).items():
            place.take(weight, partial(self._take, name), torch.float32)

    def _take(self, name: str, tensor: Tensor) -> None:
        setattr(self, f"_{name}", tensor.squeeze(1).t().contiguous() if name == "conv" else tensor)

    def __call__(self, x: Tensor, residual: Tensor | None, context: StateContext) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        projected, stream = self._branch.enter(self._in, x, residual)
        context.keep(projected)
        return self._branch.leave(self._out, self.advance(projected, context), stream)

    def advance(self, projected: Tensor, context: StateContext) -> Tensor:
        """The gated convolution [T, hidden] of projected inputs [T, in]. Advances the states."""
        before, behind, inputs = projected.chunk(3, dim=1)
        return short_conv(
            inputs,
            self._conv,
            context.inputs,
            context.rows,
            has_silu=False,
            bias=self._conv_bias,
            gates=(before, behind),
        )
