"""Weights as they are."""

from __future__ import annotations

from torch import Tensor

from inferd.engine.quant.scheme import Apply, FromWeight
from inferd.kernels.linear import ANY, Choices, linear


class Dense(FromWeight):
    """The weight in the model's dtype."""

    name = "dense"

    def __init__(self, choices: Choices = ANY) -> None:
        self._choices = choices

    def check(self, out_size: int, in_size: int) -> None:
        """Every shape is kept."""

    def bind(self, weight: Tensor, bias: Tensor | None) -> Apply:
        return linear(weight, bias, self._choices)


DENSE = Dense()
