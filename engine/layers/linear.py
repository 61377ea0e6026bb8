"""A linear layer's names and shapes. What its weight is kept in, and who multiplies, is its placement's scheme."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.engine.quant.scheme import Apply, Given


class Linear:
    """[T, in_size] -> [T, out_size]. Usable once its parameters were written.

    Raises `QuantizationError` for a shape that the placement's scheme cannot keep.
    """

    def __init__(self, in_size: int, out_size: int, place: Placement, has_bias: bool = False) -> None:
        place.scheme.check(out_size, in_size)
        self._scheme = place.scheme
        self._apply: Apply | None = None
        needed = dict(place.scheme.takes(out_size, in_size, place.dtype))
        if has_bias:
            needed["bias"] = Given((out_size,), place.dtype)
        self._parameters = {
            name: Parameter(given.shape, given.dtype, place.device, partial(self._take, name))
            for name, given in needed.items()
        }
        self._taken: dict[str, Tensor] = {}

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def take_weight(self, weight: Tensor) -> None:
        """Use `weight` [out_size, in_size], which is not kept where the scheme has a form of its own."""
        self._take("weight", weight)

    def _take(self, name: str, tensor: Tensor) -> None:
        self._taken[name] = tensor
        if len(self._taken) == len(self._parameters):
            self._apply = self._scheme.bind(**{"bias": None, **self._taken})
            self._taken.clear()

    def __call__(self, x: Tensor) -> Tensor:
        assert self._apply is not None, "a linear layer was called before its weights were loaded"
        return self._apply(x)
