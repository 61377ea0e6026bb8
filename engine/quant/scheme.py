"""What a linear layer keeps its weight in. A layer owns names and shapes, a scheme the numbers and who multiplies them.

A scheme that reads a checkpoint's own quantized format differs from these in what it is given, not in what it calls:
the kernels take integers and scales, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Apply = Callable[[Tensor], Tensor]


class QuantizationError(ValueError):
    """A layer cannot be kept in what was asked for: its shape, the rule, and what would work."""


class Scheme(Protocol):
    """One way to keep a weight matrix."""

    @property
    def name(self) -> str: ...

    def check(self, out_size: int, in_size: int) -> None:
        """Raises `QuantizationError` for a shape that it cannot keep, before anything is loaded."""
        ...

    def bind(self, weight: Tensor, bias: Tensor | None) -> Apply:
        """x [T, in] -> [T, out] with weight [out, in] and bias [out], all in one dtype.

        The weight is needed during the call alone, unless the scheme keeps it as it is.
        """
        ...
