"""Rows as 8-bit floats, each with a scale found from its content; alone or fused with the operation that makes the row.
The format is e4m3: 4 bits of exponent, 3 of fraction, no infinity (Micikevicius et al. 2022, arXiv:2209.05433).

    scale = max |x| / 448, or 1 if that is 0        q = x / scale, saturated to +-448, rounded once, ties to even

With `has_groups` each 128 elements of a row have a scale of their own; the last may be fewer.

If a row holds a NaN or an infinity, so does its scale: the row's product is spoilt and the fault seen. A fused function
gives the results of the plain ones in turn, with the row between them rounded to its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.quantize_fp8 import reference
from inferd.kernels.registry import ROWS_SHARE_SUMS, Deferred, Implementation, Op, always

MAX_SIZE = 32768
"""Most elements that a program of 32 warps holds: 32 a thread."""
MAX_NORM_SIZE = 16384
"""With the residual and the weight as well, 32 a thread would spill."""

Quantized = tuple[Tensor, Tensor]
"""(q [..., K] float8_e4m3fn, scales fp32 [...], or [..., groups]): q * scale is about the row."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int


def _refuses_norm(key: Key) -> str | None:
    return _refuses_triton(key, MAX_NORM_SIZE)


def _refuses_triton(key: Key, max_size: int = MAX_SIZE) -> str | None:
    if key.size > max_size:
        return f"holds rows of at most {max_size}, not {key.size}"
    reason = gpu.refuses_weight(key.dtype, key.weight_dtype)
    return reason or gpu.refuses(key.device_type, key.dtype, key.weight_dtype, torch.float8_e4m3fn)


QUANTIZE_FP8: Op[Key, Callable[[Tensor, bool], Quantized]] = Op(
    "quantize_fp8",
    [
        Implementation("triton", Deferred(f"{__name__}.triton", "quantize_fp8"), _refuses_triton),
        Implementation("reference", reference.quantize_fp8, always),
    ],
)
RMS_NORM_FP8: Op[Key, Callable[[Tensor, Tensor, float, bool], Quantized]] = Op(
    "rms_norm_fp8",
    [
        Implementation("triton", Deferred(f"{__name__}.triton", "rms_norm_fp8"), _refuses_norm),
        Implementation("reference", reference.rms_norm_fp8, always, varies=ROWS_SHARE_SUMS),
    ],
)
ADD_RMS_NORM_FP8: Op[Key, Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Quantized, Tensor]]] = Op(
    "add_rms_norm_fp8",
    [
        Implementation("triton", Deferred(f"{__name__}.triton", "add_rms_norm_fp8"), _refuses_norm),
        Implementation("reference", reference.add_rms_norm_fp8, always, varies=ROWS_SHARE_SUMS),
    ],
)
SILU_MUL_FP8: Op[Key, Callable[[Tensor, bool], Quantized]] = Op(
    "silu_mul_fp8",
    [
        Implementation("triton", Deferred(f"{__name__}.triton", "silu_mul_fp8"), _refuses_triton),
        Implementation("reference", reference.silu_mul_fp8, always),
    ],
)
GELU_MUL_FP8: Op[Key, Callable[[Tensor, bool], Quantized]] = Op(
    "gelu_mul_fp8",
    [
        Implementation("triton", Deferred(f"{__name__}.triton", "gelu_mul_fp8"), _refuses_triton),
        Implementation("reference", reference.gelu_mul_fp8, always),
    ],
)


def quantize_fp8(x: Tensor, has_groups: bool = False) -> Quantized:
    """Quantize x [..., K]."""
    return QUANTIZE_FP8.resolve(Key(x.device.type, x.dtype, x.dtype, x.shape[-1]))(x, has_groups)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, has_groups: bool = False) -> Quantized:
    """Quantize rms_norm(x, weight, eps); x [..., K], weight [K]."""
    return RMS_NORM_FP8.resolve(_norm_key(x, weight))(x, weight, eps, has_groups)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, has_groups: bool = False
) -> tuple[Quantized, Tensor]:
    """(quantized rms_norm(x + residual, weight, eps), x + residual in x's dtype)."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    return ADD_RMS_NORM_FP8.resolve(_norm_key(x, weight))(x, residual, weight, eps, has_groups)


def silu_mul_fp8(gate_up: Tensor, has_groups: bool = False) -> Quantized:
    """Quantize silu(gate) * up; gate_up [..., 2K]."""
    return SILU_MUL_FP8.resolve(_gate_key(gate_up))(gate_up, has_groups)


def gelu_mul_fp8(gate_up: Tensor, has_groups: bool = False) -> Quantized:
    """Quantize gelu(gate) * up with the tanh form of gelu; gate_up [..., 2K]."""
    return GELU_MUL_FP8.resolve(_gate_key(gate_up))(gate_up, has_groups)


def _norm_key(x: Tensor, weight: Tensor) -> Key:
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}"
    return Key(x.device.type, x.dtype, weight.dtype, x.shape[-1])


def _gate_key(gate_up: Tensor) -> Key:
    assert gate_up.shape[-1] % 2 == 0, f"gate_up has an odd width: {gate_up.shape[-1]}"
    return Key(gate_up.device.type, gate_up.dtype, gate_up.dtype, gate_up.shape[-1] // 2)
