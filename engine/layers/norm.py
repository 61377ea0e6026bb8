"""Norms of the stream of hidden states, alone or fused with the add before them, stand-ins for a norm, and factors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch, NormKind
from inferd.engine.arch.matrices import norm, scalar
from inferd.engine.arch.matrix import Weight
from inferd.engine.layers.placement import Placement
from inferd.kernels.ops.layer_norm import add_layer_norm, layer_norm
from inferd.kernels.ops.quantize_fp8 import Quantized, add_rms_norm_fp8, rms_norm_fp8
from inferd.kernels.ops.rms_norm import add_rms_norm, rms_norm
from inferd.kernels.ops.scaled_add import added, scaled


class Transform(Protocol):
    """[T, hidden] -> [T, hidden]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Norm(Transform, Protocol):
    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        ...


class RMSNorm:
    """RMS norm over the last dimension. The weight is `factor` times the stored one, plus `offset`. If they change it,
    it is kept in fp32."""

    weight: Tensor

    def __init__(self, weight: Weight, eps: float, place: Placement, offset: float = 0.0, factor: float = 1.0) -> None:
        self.eps, self._offset, self._factor = eps, offset, factor
        place.take(weight, self._take, torch.float32 if offset or factor != 1.0 else None)

    def _take(self, weight: Tensor) -> None:
        weight = weight if self._factor == 1.0 else weight.mul_(self._factor)
        self.weight = weight.add_(self._offset) if self._offset else weight

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps)

    def quantized(self, x: Tensor, residual: Tensor | None, has_groups: bool) -> tuple[Quantized, Tensor]:
        """(norm of the stream (x, residual) as FP8 numbers and scales, the stream)."""
        if residual is None:
            return rms_norm_fp8(x, self.weight, self.eps, has_groups), x
        return add_rms_norm_fp8(x, residual, self.weight, self.eps, has_groups)


class LayerNorm:
    """Layer norm over the last dimension, with weight and bias. Without a stored bias it has zeros."""

    _weight: Tensor
    _bias: Tensor

    def __init__(self, weight: Weight, eps: float, place: Placement, *, has_bias: bool = True) -> None:
        self._eps, self._has_bias = eps, has_bias
        place.take(weight, self._take_weight)
        if has_bias:
            place.take(weight.bias, self._take_bias)

    def _take_weight(self, weight: Tensor) -> None:
        self._weight = weight
        if not self._has_bias:
            self._bias = torch.zeros_like(weight)

    def _take_bias(self, bias: Tensor) -> None:
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x, residual, self._weight, self._bias, self._eps)


class NoNorm:
    """Stand-in for a norm that a family leaves out."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = added(x, residual)
        return total, total


class Scale:
    """Multiplies by a number."""

    def __init__(self, multiplier: float) -> None:
        self._multiplier = multiplier

    def __call__(self, x: Tensor) -> Tensor:
        return scaled(x, self._multiplier)


class LayerScalar:
    """Multiplies the stream by a stored number."""

    _multiplier: float

    def __init__(self, layer: int, place: Placement) -> None:
        place.take(scalar(layer), self._take)

    def _take(self, number: Tensor) -> None:
        self._multiplier = float(number)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The stream (x, residual), [T, hidden] each, times the number."""
        return scaled(x if residual is None else added(x, residual), self._multiplier)


def stream_norm(arch: Arch, place: Placement, own: str, owner: str = "") -> Norm:
    """The family's norm of hidden states, of this name."""
    if arch.norm is NormKind.LAYER:
        return LayerNorm(norm(own, arch.hidden_size, owner), arch.norm_eps, place)
    return rms_norm_of(arch, place, own, arch.hidden_size, owner)


def rms_norm_of(arch: Arch, place: Placement, own: str, size: int, owner: str = "") -> RMSNorm:
    """The family's RMS norm of this name, over `size` entries."""
    offset = 1.0 if arch.norm is NormKind.RMS_ONE_PLUS else 0.0
    return RMSNorm(norm(own, size, owner), arch.norm_eps, place, offset)
