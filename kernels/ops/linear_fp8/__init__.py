"""y = (x_q w_q^T) * s_x * s_w + b in FP8 (e4m3): weights as they are stored, activations quantized at each call. The
C++ kernel and the one for few rows on a GPU leave activations as they are.

    y[m, n] = s_x[m] * s_w[n] * sum over k of x_q[m, k] * w_q[n, k] + b[n]

with a scale for each output row of the weight, or, as DeepSeek-V3 stores them (arXiv:2412.19437, section 3.3),

    y[m, n] = sum over blocks j of s_x[m, j] * s_w[n / 128, j] * (sum over k in j of x_q[m, k] * w_q[n, k]) + b[n]

with a scale for each 128 x 128 block of the weight and each 128 inputs of a token. A group of 128 inputs of one output
row may have a scale of its own instead: s_w[n, j]. The shape of the scales says which of the three it is. For few rows
the floor is reading the weight: half the bytes of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.linear import few_rows_refuse
from inferd.kernels.ops.linear_fp8 import cpu, cuda, reference
from inferd.kernels.ops.linear_fp8.activations import (
    Activations,
    Multiply,
    Product,
    quantize_groups,
    quantize_rows,
    quantize_static,
    quantize_weight,
)
from inferd.kernels.ops.linear_fp8.reference import BLOCK
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = [
    "BLOCK", "FP8", "LINEAR_FP8", "LINEAR_FP8_FEW_ROWS", "Activations", "Apply", "Key", "TakesFp8", "linear_fp8",
    "quantize_groups", "quantize_rows", "quantize_static", "quantize_weight",
]  # fmt: skip

FP8 = torch.float8_e4m3fn
"""Sign, 4 bits of exponent, 3 of mantissa; the largest is 448 (OCP 8-bit Floating Point Specification 1.0)."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    """Dtype of activations and results."""
    out_size: int
    in_size: int
    has_groups: bool
    """Whether 128 inputs share a scale, and not all of a row."""
    is_invariant: bool


_FEW_ROWS_VARY = "more rows have other kernels"
_SCALED_MM_VARIES = "its library chooses a kernel by the number of rows"

Apply = Callable[[Tensor], Tensor]
Bind = Callable[[Tensor, Tensor, Tensor | None, Activations], Apply]


def _refuses_scaled_mm(key: Key) -> str | None:
    if key.has_groups:
        return "takes a scale for each row, not for 128 inputs"
    if key.is_invariant:
        return _SCALED_MM_VARIES
    return cuda.refuses(key.device_type, key.dtype, key.out_size, key.in_size)


def _refuses_scaled_groups(key: Key) -> str | None:
    if not key.has_groups:
        return "takes a scale for 128 inputs, not for each row"
    if key.is_invariant:
        return _SCALED_MM_VARIES
    return cuda.refuses_groups(key.device_type, key.dtype, key.out_size, key.in_size)


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype, FP8)


def _bind_reference(q: Tensor, scales: Tensor, bias: Tensor | None, quantize: Activations) -> Product:
    return Product.on(q.device, quantize, reference.bind(q, scales, bias))


LINEAR_FP8: Op[Key, Bind] = Op(
    "linear_fp8",
    [
        Implementation("cpp", cpu.bind, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("scaled_mm", cuda.bind_rows, _refuses_scaled_mm, varies=_SCALED_MM_VARIES),
        Implementation("scaled_mm_groups", cuda.bind_groups, _refuses_scaled_groups, varies=_SCALED_MM_VARIES),
        Implementation("triton", Deferred(f"{__name__}.triton", "bind"), _refuses_triton),
        Implementation("reference", _bind_reference, always),
    ],
)


def _refuses_few_rows(key: Key) -> str | None:
    return _FEW_ROWS_VARY if key.is_invariant else few_rows_refuse(key.device_type, key.dtype, FP8)


@runtime_checkable
class TakesFp8(Protocol):
    """A bound layer that multiplies activations which kernels before it may quantize."""

    multiply: Multiply

    def groups_of(self, num_rows: int) -> bool | None:
        """`Product.fused_groups` of so many rows."""
        ...


LINEAR_FP8_FEW_ROWS: Op[Key, Callable[[Tensor, Tensor, Tensor | None, Any], Apply]] = Op(
    "linear_fp8_few_rows",
    [
        Implementation(
            "triton_few_rows", Deferred(f"{__name__}.triton", "FewOrMany"), _refuses_few_rows, varies=_FEW_ROWS_VARY
        ),
        Implementation("none", lambda _q, _scales, _bias, many: many, always),
    ],
)
"""The layer (q, scales, bias) with a kernel of its own for few rows, and the given layer for more."""


def linear_fp8(
    q: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    quantize: Activations | None = None,
    *,
    is_invariant: bool = False,
) -> Apply:
    """The layer as a function of x [T, in] in `dtype` that gives [T, out] in `dtype`.

    q [out, in] e4m3; scales fp32, [out], or [out or blocks of out, groups of in]; bias [out] of any float dtype.
    `quantize` quantizes x; by default row by row or, with scales of groups, in groups of 128 inputs. Up to 8 rows in 16
    bits are not quantized on a GPU, and the layer is a `linear.fused.FewRows`. `is_invariant`: a row's bits must depend
    on that row alone, on a GPU too, so all rows are quantized.
    """
    out_size, in_size = q.shape
    has_groups, num_groups = scales.dim() == 2, -(-in_size // BLOCK)
    allowed = [(out_size, num_groups), (-(-out_size // BLOCK), num_groups)] if has_groups else [(out_size,)]
    assert q.dtype == FP8 and scales.dtype == torch.float32 and scales.shape in allowed, (q.dtype, scales.shape)
    key = Key(q.device.type, dtype, out_size, in_size, has_groups, is_invariant)
    many = LINEAR_FP8.resolve(key)(q, scales, bias, quantize or (quantize_groups if has_groups else quantize_rows))
    return LINEAR_FP8_FEW_ROWS.resolve(key)(q, scales, bias, many)
