"""Scale and add in plain PyTorch, rounded after each."""

from __future__ import annotations

from torch import Tensor


def scaled_add(x: Tensor, multiplier: float, residual: Tensor | None) -> Tensor:
    scaled = x if multiplier == 1.0 else x * multiplier
    return scaled if residual is None else scaled + residual
