"""Gated DeltaNet of one layer: project, convolve, advance the state, norm and gate each head, project back.

The matrix of the first projection has the rows of q, k and v, then those of the gate z, and then of b and a. These
decide how much a token writes and forgets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.recurrent import GatedDelta
from inferd.engine.layers.branch import Branch
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.recurrent import RecurrentLayer, StateContext
from inferd.kernels.ops.gated_delta import Gates, gated_delta
from inferd.kernels.ops.head_gate import norm_silu_gate
from inferd.kernels.ops.short_conv import short_conv


class GatedDeltaNet(RecurrentLayer):
    """Gated DeltaNet."""

    _a_log: Tensor
    _dt_bias: Tensor
    _norm: Tensor

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        super().__init__(arch, layer, place, branch)
        assert isinstance(arch.recurrent, GatedDelta)
        self._delta = arch.recurrent

    def mix(self, projected: Tensor, context: StateContext) -> Tensor:
        out, z = self.advance(projected, context)
        heads = (len(out), self._delta.num_value_heads, self._delta.value_dim)
        return norm_silu_gate(out.view(heads), z.view(heads), self._norm, self._eps).flatten(1)

    def advance(self, projected: Tensor, context: StateContext) -> tuple[Tensor, Tensor]:
        """(results of the heads, gates z), [T, out_size] each, of projected inputs [T, in]. Advances the states."""
        qkv, z, b, a = torch.split(projected, list(self._delta.in_sizes), dim=1)
        qkv = short_conv(qkv, self._conv, context.inputs, context.rows, has_silu=True)
        return gated_delta(qkv, Gates(b, a, self._a_log, self._dt_bias), context.matrices, context.rows), z
