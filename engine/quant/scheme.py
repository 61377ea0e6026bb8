"""What a linear layer keeps its weight in. A layer owns names and shapes, a scheme the numbers and who multiplies them.

A scheme that reads a checkpoint's own quantized format differs from those that quantize a weight in what it is given,
not in what it calls: the kernels take numbers and scales, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Apply = Callable[[Tensor], Tensor]


class QuantizationError(ValueError):
    """A layer cannot be kept in what was asked for: its shape, the rule, and what would work."""


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that a layer is given before it can be used."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Scheme(Protocol):
    """One way to keep a weight matrix."""

    @property
    def name(self) -> str: ...

    def check(self, out_size: int, in_size: int) -> None:
        """Raises `QuantizationError` for a shape that it cannot keep, before anything is loaded."""
        ...

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> Mapping[str, Given]:
        """The tensors that `bind` needs besides the bias, by the names that the weight map gives them. `dtype` is that
        of activations and results."""
        ...

    @property
    def bind(self) -> Callable[..., Apply]:
        """Given what `takes` names as keywords, and `bias` [out] or None: x [T, in] -> [T, out].

        A tensor is needed during the call alone, unless the scheme keeps it as it is.
        """
        ...


class FromWeight:
    """Schemes that are given the weight [out, in] in the dtype of activations, and make of it what they keep."""

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> dict[str, Given]:
        return {"weight": Given((out_size, in_size), dtype)}
