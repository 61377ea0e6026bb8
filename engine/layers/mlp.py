"""The MLP of a layer, with a gate or without."""

from __future__ import annotations

from torch import Tensor

from inferd.engine.arch.description import Activation, Arch
from inferd.engine.arch.matrices import mlp
from inferd.engine.layers.branch import Act, Branch
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.gated_mul import gelu_mul, silu_mul
from inferd.kernels.ops.gelu import gelu
from inferd.kernels.ops.quantize_fp8 import MAX_SIZE, gelu_mul_fp8, silu_mul_fp8

GATES = {
    Activation.SILU: Act(silu_mul, "silu", silu_mul_fp8),
    Activation.GELU_TANH: Act(gelu_mul, "gelu", gelu_mul_fp8),
}
"""The activations of MLPs with a gate."""


class MLP:
    """down(activation(gate(x)) * up(x)) with gate and up in one matrix; in a family without a gate down(gelu(up(x))).
    x is [T, hidden]."""

    def __init__(self, arch: Arch, layer: int, place: Placement, branch: Branch) -> None:
        assert arch.has_gate or arch.activation is Activation.GELU_TANH
        before, down = mlp(arch, layer)
        self._act = GATES[arch.activation] if arch.has_gate else Act(gelu)
        self._branch, self._ranks, self._size = branch, place.ranks, down.num_inputs
        self._in, self._down = Linear(before, place), Linear(down, place, gather=place.ranks.outputs)
        own = place.ranks.own
        self._gathers_inputs = own.count > 1 and not own.splits_inputs
        """Then the inputs of `down` are quantized when all are there."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream (x, residual), [T, hidden] each, with this branch's result added."""
        has_groups = self._down.groups_of(x.shape[0])
        if has_groups is None or self._act.run_fp8 is None or self._size > MAX_SIZE or self._gathers_inputs:
            hidden, stream = self._branch.enter(self._in, x, residual, self._act)
            return self._branch.leave(self._down, self._ranks.inputs(hidden, self._size), stream)
        projected, stream = self._branch.enter(self._in, x, residual)
        return self._branch.leave(self._down, self._act.run_fp8(projected, has_groups), stream)
