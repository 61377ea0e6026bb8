"""A linear layer's names and shapes. What its weight is kept in, and who multiplies, is its placement's scheme."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.engine.quant.scheme import Apply


class Linear:
    """[T, in_size] -> [T, out_size]. Usable once its parameters were written.

    Raises `QuantizationError` for a shape that the placement's scheme cannot keep.
    """

    def __init__(self, in_size: int, out_size: int, place: Placement, has_bias: bool = False) -> None:
        place.scheme.check(out_size, in_size)
        self._scheme = place.scheme
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._apply: Apply | None = None
        self._weight_parameter = Parameter((out_size, in_size), place.dtype, place.device, self.take_weight)
        self._bias_parameter = Parameter((out_size,), place.dtype, place.device, self._take_bias) if has_bias else None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self._weight_parameter
        if self._bias_parameter is not None:
            yield "bias", self._bias_parameter

    def take_weight(self, weight: Tensor) -> None:
        """Use `weight` [out_size, in_size], which is not kept where the scheme has a form of its own."""
        self._weight = weight
        self._bind_when_complete()

    def _take_bias(self, bias: Tensor) -> None:
        self._bias = bias
        self._bind_when_complete()

    def _bind_when_complete(self) -> None:
        if self._weight is None or (self._bias_parameter is not None and self._bias is None):
            return
        self._apply = self._scheme.bind(self._weight, self._bias)
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._apply is not None, "a linear layer was called before its weights were loaded"
        return self._apply(x)
