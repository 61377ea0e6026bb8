"""y = x W^T + b, with the weight in whatever form the device computes fastest in.

On a CPU the weight is packed once by oneDNN: that runs at the memory's bandwidth for few rows and at the machine's
matrix peak for many, and from two rows up a row's bits do not depend on the number of rows (measured: torch 2.13,
AVX-512, fp32 and bf16), so a lone row is padded to two. F.linear in fp32 has no such property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.layers.parameter import Parameter
from inferd.engine.layers.placement import Placement
from inferd.kernels.registry import Implementation, Op, always

_PACKED_ROWS_HINT = 32
_PACKED_DTYPES = (torch.float32, torch.bfloat16)

Apply = Callable[[Tensor], Tensor]
Bind = Callable[[Tensor, Tensor | None], Apply]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _bind_packed(weight: Tensor, bias: Tensor | None) -> Apply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS_HINT)

    def apply(x: Tensor) -> Tensor:
        rows = x if x.shape[0] > 1 else torch.cat([x, x])
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return out[: x.shape[0]]

    return apply


def _bind_plain(weight: Tensor, bias: Tensor | None) -> Apply:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _refuses_packed(key: Key) -> str | None:
    if key.device_type != "cpu":
        return "oneDNN packs for the CPU"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch was built without oneDNN"
    if key.dtype not in _PACKED_DTYPES:
        return f"packs float32 and bfloat16, not {key.dtype}"
    if key.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 matrix product"
    return None


LINEAR: Op[Key, Bind] = Op(
    "linear",
    [
        Implementation("onednn_packed", _bind_packed, _refuses_packed),
        Implementation("torch", _bind_plain, always),
    ],
)


class Linear:
    """[T, in_size] -> [T, out_size]. Usable once its parameters were written."""

    def __init__(self, in_size: int, out_size: int, place: Placement, has_bias: bool = False) -> None:
        self._bind = LINEAR.resolve(Key(place.device.type, place.dtype))
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
        """Use `weight` [out_size, in_size], which is not kept where it is packed."""
        self._weight = weight
        self._bind_when_complete()

    def _take_bias(self, bias: Tensor) -> None:
        self._bias = bias
        self._bind_when_complete()

    def _bind_when_complete(self) -> None:
        if self._weight is None or (self._bias_parameter is not None and self._bias is None):
            return
        self._apply = self._bind(self._weight, self._bias)
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._apply is not None, "a linear layer was called before its weights were loaded"
        return self._apply(x)
