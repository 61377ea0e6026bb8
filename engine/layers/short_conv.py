"""The short convolution of one layer of LFM2: project, gate, convolve, gate again, project back.

The matrix of the first projection has the rows of the gate before the convolution, of the gate behind it, and of its
input.
"""

from __future__ import annotations

from torch import Tensor

from inferd.engine.layers.recurrent import RecurrentLayer, StateContext
from inferd.kernels.ops.short_conv import short_conv


class ShortConvLayer(RecurrentLayer):
    """Gated short convolution."""

    def mix(self, projected: Tensor, context: StateContext) -> Tensor:
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
