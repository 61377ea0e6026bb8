"""y = x W^T + b with W in 4 bits, in groups of inputs of an output row that share a scale. Activations are quantized at
each call, to 8 bits and in the same groups.

    y[m, n] = b[n] + sum over groups g of x_scale[m, g] * scale[n, g] * sum over k in g of x_q[m, k] * (q[n, k] - 8)

`quantized.py` has the layouts: zero points, minimums, tables of values and orders of inputs. A group's sum is an exact
integer, and groups are added in order in fp32, so a row's result depends on that row alone. The arithmetic of groups of
32 is that of llama.cpp's q4_0 with q8_0, except for scales in bfloat16: no weight is too small for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.linear_int4 import cpu, reference
from inferd.kernels.quantized import Apply, Bind, Key, Matrix, Table
from inferd.kernels.registry import Implementation, Op, always

GROUP_SIZE = reference.GROUP_SIZE
"""Inputs that share a scale in what `quantize_int4` makes."""

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]

QUANTIZE_INT4: Op[Key, Quantize] = Op(
    "quantize_int4",
    [
        Implementation("cpp", cpu.quantize, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", reference.quantize, always),
    ],
)
LINEAR_INT4: Op[Key, Bind] = Op(
    "linear_int4",
    [
        Implementation("cpp", cpu.bind, cpu.refuses),
        Implementation("reference", reference.bind, always),
    ],
)


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> (q [out, in] uint8 in 0..15, scales [out, in / 32] bfloat16).

    A weight is about scale * (q - 8). Several scales are tried for each group; the least squared error wins.
    """
    assert weight.shape[1] % GROUP_SIZE == 0, f"{weight.shape[1]} inputs are no multiple of {GROUP_SIZE}"
    return QUANTIZE_INT4.resolve(Key(weight.device.type, weight.dtype))(weight)


def linear_int4(
    q: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    zeros: Tensor | None = None,
    minimums: Tensor | None = None,
    table: Table = "centred",
    order: Tensor | None = None,
) -> Apply:
    """The layer as a function of x [T, in] in `dtype` that gives [T, out] in `dtype`. `Matrix` says what the tensors
    hold; q is [out, in] uint8 in 0..15. They are needed during this call only."""
    assert q.dtype == torch.uint8
    matrix = Matrix(q, scales, bias, zeros, minimums, order, table)
    return LINEAR_INT4.resolve(matrix.key(dtype))(matrix)
