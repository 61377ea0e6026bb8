"""A residual branch: attention or the MLP of a layer. It begins with norm and projection, and ends with projection and
add.

The stream of hidden states between layers is held as (x, residual). It is their sum, which the next norm's kernel adds
on its way; if residual is None, it is x alone. A linear layer may have one kernel that fuses norm and projection, or
projection and add. If it has, that kernel runs; otherwise norm, projection and add run one after another. If the linear
layer multiplies FP8 activations, the norm's kernel quantizes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import of_layer
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.norm import NoNorm, Norm, RMSNorm, Scale, Step, stream_norm
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.linear.fused import Gate
from inferd.kernels.ops.quantize_fp8 import MAX_NORM_SIZE, Quantized
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
    """The norm before a branch of a layer, and the step that its result passes before it is added to the stream."""

    norm: Norm
    after: Step

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
