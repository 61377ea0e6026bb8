"""RMS norm with its weight, alone or after a residual add."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
    """Over the last dimension, of `size`."""

    weight: Tensor

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        self.eps = eps
        self._parameter = Parameter((size,), place.dtype, place.device, self._take)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self._parameter

    def _take(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)
