"""Weights as they are."""

from __future__ import annotations

from torch import Tensor

from inferd.engine.quant.scheme import Apply
from inferd.kernels.linear import linear


class Dense:
    """The weight in the model's dtype."""

    name = "dense"

    def check(self, out_size: int, in_size: int) -> None:
        """Every shape is kept."""

    def bind(self, weight: Tensor, bias: Tensor | None) -> Apply:
        return linear(weight, bias)


DENSE = Dense()
