"""Mamba-2 of one layer: project, convolve, advance the state, gate and norm, project back.

The matrix of the first projection has the rows of the gate z, then those of x, B and C, and then of dt. The last
decides how much a token writes and forgets.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch, Mamba2
from inferd.engine.arch.matrices import recurrent, recurrent_weights
from inferd.engine.layers.branch import Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.recurrent import StateContext
from inferd.kernels.head_gate import silu_gate_norm
from inferd.kernels.mamba2 import Weights, mamba2
from inferd.kernels.short_conv import short_conv


class Mamba2Layer:
    """Mamba-2 of a step's tokens x [T, hidden]."""

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        assert isinstance(arch.recurrent, Mamba2)
        self._sizes, self._eps, self._branch = arch.recurrent, arch.norm_eps, branch
        self._in, self._out = (Linear(matrix, place) for matrix in recurrent(arch, layer))
        self._small: dict[str, Tensor] = {}
        for name, weight in recurrent_weights(arch, layer).items():
            place.take(weight, partial(self._take, name), torch.float32)

    def _take(self, name: str, tensor: Tensor) -> None:
        self._small[name] = tensor.squeeze(1).t().contiguous() if name == "conv" else tensor

    def __call__(self, x: Tensor, residual: Tensor | None, context: StateContext) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        projected, stream = self._branch.enter(self._in, x, residual)
        context.keep(projected)
        out, z = self.advance(projected, context)
        groups = (self._sizes.num_groups, self._sizes.out_size // self._sizes.num_groups)
        norm = self._small["norm"].view(groups)
        gated = silu_gate_norm(out.view(len(out), *groups), z.view(len(z), *groups), norm, self._eps)
        return self._branch.leave(self._out, gated.flatten(1), stream)

    def advance(self, projected: Tensor, context: StateContext) -> tuple[Tensor, Tensor]:
        """(results of the heads, gates z), [T, out_size] each, of projected inputs [T, in]. Advances the states."""
        z, xbc, dt = torch.split(projected, list(self._sizes.in_sizes), dim=1)
        small, rows = self._small, context.rows
        bias = small.get("conv_bias")
        xbc = short_conv(xbc, small["conv"], context.inputs, rows, has_silu=True, bias=bias)
        weights = Weights(small["a_log"], small["dt_bias"], small["d"])
        return mamba2(xbc, dt, weights, context.matrices, rows), z
