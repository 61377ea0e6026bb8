"""Linear layers of a decoder fused with the operations around them, if there are few rows.

A fused kernel reads the activations once, and skips the roundings between the plain operations. Its results are closer
to the formula, so their bits differ. If no fused kernel can run, the plain operations run one after the other. A caller
that prefers its own plain operations asks `fuses` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from inferd.kernels.ops.gated_mul import gelu_mul, silu_mul
from inferd.kernels.ops.linear import few_rows_refuse
from inferd.kernels.ops.rms_norm import rms_norm
from inferd.kernels.registry import Deferred, Implementation, Op, always

Gate = Literal["silu", "gelu"]


@runtime_checkable
class FewRows(Protocol):
    """A bound linear layer that multiplies few rows by a kernel that can include neighbouring operations."""

    weight: Tensor
    """[out, in] in 16 bits, or in e4m3."""
    scales: Tensor | None
    """With e4m3: as in `linear_fp8`."""
    bias: Tensor | None

    def is_few(self, num_rows: int) -> bool:
        """Whether that kernel multiplies so many rows."""
        ...


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    is_few: bool
    """Whether there are at most 16 rows, or 8 if the weight is e4m3."""


_MAX_ROWS, _MAX_FP8_ROWS = 16, 8
_GROUP = 128
"""Inputs of a group, and rows of a block, that share a scale."""
_KERNELS = "inferd.kernels.ops.linear.cuda"
_VARIES = "more rows have other kernels"


def _norm_linear_plain(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, scales: Tensor | None
) -> Tensor:
    return torch.nn.functional.linear(rms_norm(x, norm, eps), _widened(weight, scales, x.dtype), bias)


def _linear_residual_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, scales: Tensor | None
) -> Tensor:
    return torch.nn.functional.linear(x, _widened(weight, scales, x.dtype), bias) + residual


def _gate_up_plain(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, gate: Gate, scales: Tensor | None
) -> Tensor:
    x = x if norm is None else rms_norm(x, norm, eps)
    projected = torch.nn.functional.linear(x, _widened(weight, scales, x.dtype))
    return silu_mul(projected) if gate == "silu" else gelu_mul(projected)


def _widened(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`, without scales of its own."""
    if scales is None:
        return weight
    rows, columns = weight.shape
    if scales.dim() == 1:
        return (weight.float() * scales[:, None]).to(dtype)
    wide = scales.repeat_interleave(_GROUP, 1)[:, :columns]
    return (weight.float() * (wide if len(wide) == rows else wide.repeat_interleave(_GROUP, 0)[:rows])).to(dtype)


def _refuses(key: Key) -> str | None:
    if not key.is_few:
        return f"takes at most {_MAX_ROWS} rows, or {_MAX_FP8_ROWS} with 8-bit weights"
    if key.weight_dtype not in (key.dtype, torch.float8_e4m3fn):
        return f"takes weights in the rows' {key.dtype} or in e4m3, not {key.weight_dtype}"
    return few_rows_refuse(key.device_type, key.dtype, key.weight_dtype)


def _refuses_norm(key: Key) -> str | None:
    if key.dtype == torch.float16:
        return "multiplies by the norm's factor last, and float16 may overflow before"
    return _refuses(key)


NORM_LINEAR: Op[Key, Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor | None], Tensor]] = Op(
    "norm_linear",
    [
        Implementation("triton", Deferred(_KERNELS, "norm_linear"), _refuses_norm, varies=_VARIES),
        Implementation("plain", _norm_linear_plain, always, varies=_VARIES),
    ],
)
LINEAR_RESIDUAL: Op[Key, Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]] = Op(
    "linear_residual",
    [
        Implementation("triton", Deferred(_KERNELS, "linear_residual"), _refuses, varies=_VARIES),
        Implementation("plain", _linear_residual_plain, always, varies=_VARIES),
    ],
)
GATE_UP_ACT: Op[Key, Callable[[Tensor, Tensor | None, float, Tensor, Gate, Tensor | None], Tensor]] = Op(
    "gate_up_act",
    [
        Implementation("triton", Deferred(_KERNELS, "gate_up_act"), _refuses_norm, varies=_VARIES),
        Implementation("plain", _gate_up_plain, always, varies=_VARIES),
    ],
)


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """rms_norm(x, norm, eps) W^T + b: x [T, in], norm [in], weight [out, in], bias [out]. `scales`: those of an e4m3
    weight, as in `linear_fp8`."""
    return NORM_LINEAR.resolve(_key(x, weight))(x, norm, eps, weight, bias, scales)


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, scales: Tensor | None = None
) -> Tensor:
    """x W^T + b + residual: x [T, in], weight [out, in], residual [T, out]; `scales` as in `norm_linear`."""
    assert residual.shape == (x.shape[0], weight.shape[0]) and residual.dtype == x.dtype
    return LINEAR_RESIDUAL.resolve(_key(x, weight))(x, weight, bias, residual, scales)


def gate_up_act(
    x: Tensor, weight: Tensor, gate: Gate, norm: Tensor | None = None, eps: float = 0.0, scales: Tensor | None = None
) -> Tensor:
    """act(g) * u with [g | u] = x W^T; weight [2I, in], result [T, I]. If `norm` is given, x is normed first; `scales`
    as in `norm_linear`."""
    assert weight.shape[0] % 2 == 0
    return GATE_UP_ACT.resolve(_key(x, weight))(x, norm, eps, weight, gate, scales)


def fuses(op: Op[Key, Any], x: Tensor, weight: Tensor) -> bool:
    """Whether `op` runs as one kernel for this weight and rows such as those of x [T, in]."""
    return op.choice(_key(x, weight)).chosen == "triton"


def _key(x: Tensor, weight: Tensor) -> Key:
    most = _MAX_FP8_ROWS if weight.dtype == torch.float8_e4m3fn else _MAX_ROWS
    return Key(x.device.type, x.dtype, weight.dtype, x.shape[0] <= most)
