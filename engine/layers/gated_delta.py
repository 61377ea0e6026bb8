"""Gated DeltaNet of one layer: project, convolve, advance the state, norm and gate each head, project back.

The matrix of the first projection has the rows of q, k and v, then those of the gate z, and then of b and a. These
decide how much a token writes and forgets.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch, GatedDelta
from inferd.engine.arch.matrices import recurrent, recurrent_weights
from inferd.engine.layers.branch import Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.recurrent import StateContext
from inferd.kernels.gated_delta import Gates, gated_delta
from inferd.kernels.head_gate import norm_silu_gate
from inferd.kernels.short_conv import short_conv


class GatedDeltaNet:
    """Gated DeltaNet of a step's tokens x [T, hidden]."""

    _conv: Tensor
    """[conv_width, channels] fp32."""
    _a_log: Tensor
    _dt_bias: Tensor
    _norm: Tensor

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        delta = arch.recurrent
        assert isinstance(delta, GatedDelta)
        self._delta, self._eps, self._branch = delta, arch.norm_eps, branch
        self._in, self._out = (Linear(matrix, place) for matrix in recurrent(arch, layer))
        for name, weight in recurrent_weights(arch, layer).items():
            place.take(weight, partial(self._take, name), torch.float32)

    def _take(self, name: str, tensor: Tensor) -> None:
        setattr(self, f"_{name}", tensor.squeeze(1).t().contiguous() if name == "conv" else tensor)

    def __call__(self, x: Tensor, residual: Tensor | None, context: StateContext) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        projected, stream = self._branch.enter(self._in, x, residual)
        context.keep(projected)
        out, z = self.advance(projected, context)
        heads = (len(out), self._delta.num_value_heads, self._delta.value_dim)
        gated = norm_silu_gate(out.view(heads), z.view(heads), self._norm, self._eps)
        return self._branch.leave(self._out, gated.flatten(1), stream)

    def advance(self, projected: Tensor, context: StateContext) -> tuple[Tensor, Tensor]:
        """(results of the heads, gates z), [T, out_size] each, of projected inputs [T, in]. Advances the states."""
        qkv, z, b, a = torch.split(projected, list(self._delta.in_sizes), dim=1)
        qkv = short_conv(qkv, self._conv, context.inputs, context.rows, has_silu=True)
        return gated_delta(qkv, Gates(b, a, self._a_log, self._dt_bias), context.matrices, context.rows), z
