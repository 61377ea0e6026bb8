"""A residual branch: attention or the MLP of a layer. It begins with norm and projection, and ends with projection and
add. The MLP is here, with a gate or without.

The stream of hidden states between layers is held as (x, residual). It is their sum, which the next norm's kernel adds
on its way; if residual is None, it is x alone. A linear layer may have one kernel that fuses norm and projection, or
projection and add. If it has, that kernel runs; otherwise norm, projection and add run one after another. If the linear
layer multiplies FP8 activations, the norm's kernel quantizes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from inferd.engine.arch.description import Activation, Arch
from inferd.engine.arch.matrices import mlp, of_layer
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import NoNorm, Norm, RMSNorm, Scale, Transform, stream_norm
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.gated_mul import gelu_erf_mul, gelu_mul, silu_mul
from inferd.kernels.ops.gelu import gelu
from inferd.kernels.ops.linear.fused import Gate
from inferd.kernels.ops.quantize_fp8 import MAX_NORM_SIZE, MAX_SIZE, Quantized, gelu_mul_fp8, silu_mul_fp8
from inferd.kernels.ops.scaled_add import added


@dataclass(frozen=True, slots=True)
class Act:
    """The activation after a projection."""

    run: Callable[[Tensor], Tensor]
    gate: Gate | None = None
    """Name of the activation for the fused kernel; None if that kernel does not have it."""
    run_fp8: Callable[[Tensor, bool], Quantized] | None = None
    """The activation with FP8 results, with a scale for each group or row; None if no kernel has it."""


class Branch:
    """The norm before a branch of a layer, and the transform that its result passes before the add to the stream."""

    norm: Norm
    after: Transform

    def __init__(
        self, arch: Arch, layer: int, place: Placement, before: str, after: str, norm: Norm | None = None
    ) -> None:
        """`before` and `after`: names of the norms, if the family has them. `norm`: that of another branch, which this
        one has too."""
        own = stream_norm(arch, place, before, of_layer(layer)) if arch.has_pre_norms and norm is None else NoNorm()
        self.norm = own if norm is None else norm
        if arch.has_post_norms:
            self.after = stream_norm(arch, place, after, of_layer(layer))
        else:
            self.after = NoNorm() if arch.residual_multiplier == 1.0 else Scale(arch.residual_multiplier)

    def enter(
        self, linear: Linear, x: Tensor, residual: Tensor | None, act: Act | None = None
    ) -> tuple[Tensor, Tensor]:
        """(act(linear(norm(stream))), stream), for the stream (x, residual), [T, hidden] each."""
        norm, gate = self.norm, None if act is None else act.gate
        if isinstance(norm, RMSNorm) and (act is None or gate) and linear.fuses_norm(x, gate):
            stream = x if residual is None else added(x, residual)
            return linear.after_norm(stream, norm.weight, norm.eps, gate), stream
        normed: Tensor | Quantized
        has_groups = linear.groups_of(x.shape[0])
        if has_groups is not None and isinstance(norm, RMSNorm) and x.shape[1] <= MAX_NORM_SIZE:
            normed, stream = norm.quantized(x, residual, has_groups)
        else:
            normed, stream = self.normed(x, residual)
        projected = linear(normed)
        return projected if act is None else act.run(projected), stream

    def normed(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(stream), stream), for the stream (x, residual), [T, hidden] each."""
        return (self.norm(x), x) if residual is None else self.norm.add(x, residual)

    def leave(self, linear: Linear, x: Tensor | Quantized, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream [T, hidden] with after(linear(x)) added, as (x, residual)."""
        if isinstance(self.after, NoNorm) and isinstance(x, Tensor) and linear.fuses_add(x):
            return linear.add_to(stream, x), None
        return self.after(linear(x)), stream


GATES = {
    Activation.SILU: Act(silu_mul, "silu", silu_mul_fp8),
    Activation.GELU_TANH: Act(gelu_mul, "gelu", gelu_mul_fp8),
    Activation.GELU_ERF: Act(gelu_erf_mul),
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
