"""Layer normalisation over the last dimension, alone or fused with the residual add before it.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias        (Ba et al. 2016, arXiv:1607.06450)

Means are taken in fp32, and a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.registry import ROWS_SHARE_SUMS, Deferred, Implementation, Op, always

_MAX_TRITON_SIZE = 16384
"""Most elements that a program of 32 warps holds: 16 a thread."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    size: int


def _refuses_triton(key: Key) -> str | None:
    if key.size > _MAX_TRITON_SIZE:
        return f"holds rows of at most {_MAX_TRITON_SIZE}, not {key.size}"
    return gpu.refuses(key.device_type, key.dtype)


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Sums in fp32, one rounding at the end."""
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.to(torch.float32) + bias.to(torch.float32)).to(x.dtype)


def reference_added(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return reference_layer_norm(total, weight, bias, eps), total


def cpp_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(x, None, weight, bias, None, out, eps)
    return out


def cpp_added(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _run(x, residual.contiguous(), weight, bias, total, out, eps)
    return out, total


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, total: Tensor | None, out: Tensor, eps: float
) -> None:
    assert weight.dtype == bias.dtype == x.dtype and weight.is_contiguous() and bias.is_contiguous()
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    native.function("inferd_layer_norm")(
        rows.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        0 if total is None else total.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        rows.shape[1],
        eps,
        native.DTYPE_CODES[rows.dtype],
        torch.get_num_threads(),
    )


LAYER_NORM: Op[Key, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = Op(
    "layer_norm",
    [
        Implementation("cpp", cpp_layer_norm, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "layer_norm"), _refuses_triton),
        Implementation("reference", reference_layer_norm, always, varies=ROWS_SHARE_SUMS),
    ],
)
ADD_LAYER_NORM: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Op(
    "add_layer_norm",
    [
        Implementation("cpp", cpp_added, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "add_layer_norm"), _refuses_triton),
        Implementation("reference", reference_added, always, varies=ROWS_SHARE_SUMS),
    ],
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise each row of x [..., H] by weight and bias [H]; returns x's shape and dtype."""
    return LAYER_NORM.resolve(_key(x, weight, bias))(x, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised x + residual, x + residual), both [..., H] in x's dtype."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    return ADD_LAYER_NORM.resolve(_key(x, weight, bias))(x, residual, weight, bias, eps)


def _key(x: Tensor, weight: Tensor, bias: Tensor) -> Key:
    assert weight.shape == bias.shape == x.shape[-1:], f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}"
    return Key(x.device.type, x.dtype, x.shape[-1])
