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

from inferd.kernels.gated_mul import gelu_mul, silu_mul
from inferd.kernels.linear import few_rows_refuse
from inferd.kernels.registry import Deferred, Implementation, Op, always
from inferd.kernels.rms_norm import rms_norm

Gate = Literal["silu", "gelu"]


@runtime_checkable
class FewRows(Protocol):
    """A bound linear layer that multiplies few rows by a kernel that can include neighbouring operations."""

    weight: Tensor
    bias: Tensor | None

    def is_few(self, num_rows: int) -> bool:
        """Whether that kernel multiplies so many rows."""
        ...


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    is_few: bool
    """Whether there are at most 16 rows."""


_MAX_ROWS = 16
_KERNELS = "inferd.kernels.linear.cuda"
_VARIES = "more rows have other kernels"


def _norm_linear_plain(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(rms_norm(x, norm, eps), weight, bias)


def _linear_residual_plain(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias) + residual


def _gate_up_plain(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, gate: Gate) -> Tensor:
    x = x if norm is None else rms_norm(x, norm, eps)
    projected = torch.nn.functional.linear(x, weight)
    return silu_mul(projected) if gate == "silu" else gelu_mul(projected)


def _refuses(key: Key) -> str | None:
    if not key.is_few:
        return f"takes at most {_MAX_ROWS} rows"
    return few_rows_refuse(key.device_type, key.dtype)


def _refuses_norm(key: Key) -> str | None:
    if key.dtype == torch.float16:
        return "multiplies by the norm's factor last, and float16 may overflow before"
    return _refuses(key)


NORM_LINEAR: Op[Key, Callable[[Tensor, Tensor, float, Tensor, Tensor | None], Tensor]] = Op(
    "norm_linear",
    [
        Implementation("triton", Deferred(_KERNELS, "norm_linear"), _refuses_norm, varies=_VARIES),
        Implementation("plain", _norm_linear_plain, always, varies=_VARIES),
    ],
)
LINEAR_RESIDUAL: Op[Key, Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]] = Op(
    "linear_residual",
    [
        Implementation("triton", Deferred(_KERNELS, "linear_residual"), _refuses, varies=_VARIES),
        Implementation("plain", _linear_residual_plain, always, varies=_VARIES),
    ],
)
GATE_UP_ACT: Op[Key, Callable[[Tensor, Tensor | None, float, Tensor, Gate], Tensor]] = Op(
    "gate_up_act",
    [
        Implementation("triton", Deferred(_KERNELS, "gate_up_act"), _refuses_norm, varies=_VARIES),
        Implementation("plain", _gate_up_plain, always, varies=_VARIES),
    ],
)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rms_norm(x, norm, eps) W^T + b: x [T, in], norm [in], weight [out, in], bias [out]."""
    return NORM_LINEAR.resolve(_key(x))(x, norm, eps, weight, bias)


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """x W^T + b + residual: x [T, in], weight [out, in], residual [T, out]."""
    assert residual.shape == (x.shape[0], weight.shape[0]) and residual.dtype == x.dtype
    return LINEAR_RESIDUAL.resolve(_key(x))(x, weight, bias, residual)


def gate_up_act(x: Tensor, weight: Tensor, gate: Gate, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """act(g) * u with [g | u] = x W^T; weight [2I, in], result [T, I]. If `norm` is given, x is normed first."""
    assert weight.shape[0] % 2 == 0
    return GATE_UP_ACT.resolve(_key(x))(x, norm, eps, weight, gate)


def fuses(op: Op[Key, Any], x: Tensor) -> bool:
    """Whether `op` runs as one kernel for rows such as those of x [T, in]."""
    return op.choice(_key(x)).chosen == "triton"


def _key(x: Tensor) -> Key:
    return Key(x.device.type, x.dtype, x.shape[0] <= _MAX_ROWS)
