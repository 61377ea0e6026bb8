"""RMS normalisation over the last dimension, alone or fused with the residual add before it.

    y = x / sqrt(mean(x^2) + eps) * weight        (Zhang and Sennrich 2019, arXiv:1910.07467)

The mean is taken in fp32, and a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.registry import ROWS_SHARE_SUMS, Deferred, Implementation, Op, always

_MAX_TRITON_SIZE = 32768
"""Most elements that a program of 32 warps holds: 32 a thread."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int


def _refuses_triton(key: Key) -> str | None:
    if key.size > _MAX_TRITON_SIZE:
        return f"holds rows of at most {_MAX_TRITON_SIZE}, not {key.size}"
    reason = gpu.refuses_weight(key.dtype, key.weight_dtype)
    return reason or gpu.refuses(key.device_type, key.dtype, key.weight_dtype)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Sums in fp32, one rounding at the end."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(torch.float32)).to(x.dtype)


def reference_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return reference_rms_norm(total, weight, eps), total


def cpp_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(_rows(x), None, weight, None, out, eps)
    return out


def cpp_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _run(_rows(x), residual.contiguous(), weight, total, out, eps)
    return out, total


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _run(rows: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    assert weight.dtype in (rows.dtype, torch.float32) and weight.is_contiguous()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    native.function("inferd_rms_norm")(
        rows.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        0 if total is None else total.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        rows.shape[1],
        eps,
        native.DTYPE_CODES[rows.dtype],
        native.DTYPE_CODES[weight.dtype],
        torch.get_num_threads(),
    )


RMS_NORM: Op[Key, Callable[[Tensor, Tensor, float], Tensor]] = Op(
    "rms_norm",
    [
        Implementation("cpp", cpp_rms_norm, lambda key: native.refuses(key.device_type, key.dtype, key.weight_dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "rms_norm"), _refuses_triton),
        Implementation("reference", reference_rms_norm, always, varies=ROWS_SHARE_SUMS),
    ],
)
ADD_RMS_NORM: Op[Key, Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Op(
    "add_rms_norm",
    [
        Implementation(
            "cpp", cpp_add_rms_norm, lambda key: native.refuses(key.device_type, key.dtype, key.weight_dtype)
        ),
        Implementation("triton", Deferred(f"{__name__}.triton", "add_rms_norm"), _refuses_triton),
        Implementation("reference", reference_add_rms_norm, always, varies=ROWS_SHARE_SUMS),
    ],
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x [..., H] by weight [H]; returns x's shape and dtype."""
    return RMS_NORM.resolve(_key(x, weight))(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised x + residual, x + residual), both [..., H] in x's dtype."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    return ADD_RMS_NORM.resolve(_key(x, weight))(x, residual, weight, eps)


def _key(x: Tensor, weight: Tensor) -> Key:
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}"
    return Key(x.device.type, x.dtype, weight.dtype, x.shape[-1])
