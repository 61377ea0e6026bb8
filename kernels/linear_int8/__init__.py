"""y = x W^T + b with W in 8 bits, in groups of inputs of an output row that share a scale, or with one scale for a row.
Activations are quantized to 8 bits at each call.

    y[m, n] = b[n] + sum over groups g of x_scale[m, g] * scale[n, g] * sum over k in g of x_q[m, k] * q[n, k]

`quantized.py` has the layouts: zero points, minimums and orders of inputs. A group's sum is an exact integer, and
groups are added in order in fp32, so a row's result depends on that row alone.

Compared with oneDNN's product of the same integers: 1.2 to 1.9 times as fast for 1 to 8 rows, 1.03 to 1.13 times for
32, 0.96 to 1.0 times for 256. Only this side's time includes the quantization of x (2 cores of a Zen 4, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.linear_int8 import cpu, reference
from inferd.kernels.quantized import Apply, Bind, Key, Matrix
from inferd.kernels.registry import Implementation, Op, always

MAX_IN_SIZE = 65536
"""Most inputs of a layer: sums of so many products of 127 x 255 fit 32 bits."""

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]

QUANTIZE_INT8: Op[Key, Quantize] = Op(
    "quantize_int8",
    [
        Implementation("cpp", cpu.quantize, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", reference.quantize, always),
    ],
)
LINEAR_INT8: Op[Key, Bind] = Op(
    "linear_int8",
    [
        Implementation("cpp", cpu.bind, cpu.refuses),
        Implementation("reference", reference.bind, always),
    ],
)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> (q [out, in] int8 in -127..127, scales [out, 1] fp32)."""
    return QUANTIZE_INT8.resolve(Key(weight.device.type, weight.dtype))(weight)


def linear_int8(
    q: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    zeros: Tensor | None = None,
    minimums: Tensor | None = None,
    order: Tensor | None = None,
) -> Apply:
    """The layer as a function of x [T, in] in `dtype` that gives [T, out] in `dtype`. `Matrix` says what the tensors
    hold; q is [out, in] int8. They are needed during this call only."""
    assert q.dtype == torch.int8
    assert q.shape[1] <= MAX_IN_SIZE, f"{q.shape[1]} inputs; at most {MAX_IN_SIZE} can be summed in 32 bits"
    matrix = Matrix(q, scales, bias, zeros, minimums, order)
    return LINEAR_INT8.resolve(matrix.key(dtype))(matrix)
