"""x * multiplier and x + residual, each rounded to the dtype: the ends of a layer's branch that has no norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype)


def cpp(x: Tensor, multiplier: float, residual: Tensor | None) -> Tensor:
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    native.function("inferd_scaled_add")(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
        x.numel(),
        multiplier,
        native.DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def reference(x: Tensor, multiplier: float, residual: Tensor | None) -> Tensor:
    product = x if multiplier == 1.0 else x * multiplier
    return product if residual is None else product + residual


SCALED_ADD: Op[Key, Callable[[Tensor, float, Tensor | None], Tensor]] = Op(
    "scaled_add",
    [
        Implementation("cpp", cpp, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "scaled_add"), _refuses_triton),
        Implementation("reference", reference, always),
    ],
)


def scaled(x: Tensor, multiplier: float) -> Tensor:
    """x * multiplier, with x's shape and dtype."""
    return SCALED_ADD.resolve(Key(x.device.type, x.dtype))(x, multiplier, None)


def added(x: Tensor, residual: Tensor) -> Tensor:
    """x + residual, both of one shape and dtype."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    return SCALED_ADD.resolve(Key(x.device.type, x.dtype))(x, 1.0, residual)
