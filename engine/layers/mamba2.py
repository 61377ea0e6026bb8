"""Mamba-2 of one layer: project, convolve, advance the state, gate and norm, project back.

The matrix of the first projection has the rows of the gate z, then those of x, B and C, and then of dt. The last
decides how much a token writes and forgets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.recurrent import Mamba2
from inferd.engine.layers.branch import Branch
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.recurrent import RecurrentLayer, StateContext
from inferd.kernels.ops.head_gate import silu_gate_norm
from inferd.kernels.ops.mamba2 import Weights, mamba2
from inferd.kernels.ops.short_conv import short_conv


class Mamba2Layer(RecurrentLayer):
    """Mamba-2."""

    _a_log: Tensor
    _dt_bias: Tensor
    _d: Tensor
    _norm: Tensor

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        super().__init__(arch, layer, place, branch)
        assert isinstance(arch.recurrent, Mamba2)
        self._sizes = arch.recurrent

    def mix(self, projected: Tensor, context: StateContext) -> Tensor:
        out, z = self.advance(projected, context)
        groups = (self._sizes.num_groups, self._sizes.out_size // self._sizes.num_groups)
        norm = self._norm.view(groups)
        return silu_gate_norm(out.view(len(out), *groups), z.view(len(z), *groups), norm, self._eps).flatten(1)

    def advance(self, projected: Tensor, context: StateContext) -> tuple[Tensor, Tensor]:
        """(results of the heads, gates z), [T, out_size] each, of projected inputs [T, in]. Advances the states."""
        z, xbc, dt = torch.split(projected, list(self._sizes.in_sizes), dim=1)
        xbc = short_conv(xbc, self._conv, context.inputs, context.rows, has_silu=True, bias=self._conv_bias)
        weights = Weights(self._a_log, self._dt_bias, self._d)
        return mamba2(xbc, dt, weights, context.matrices, context.rows), z
