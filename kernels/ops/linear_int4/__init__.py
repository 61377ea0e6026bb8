"""y = x W^T + b with W in 4 bits, in groups of inputs of an output row that share a scale. Activations are quantized at
each call, to 8 bits and in groups of 16 or 32; on a GPU they stay as they are.

`quantized.py` has the layouts (zero points, minimums, tables of values and orders of inputs) and the arithmetic. The
arithmetic of symmetric groups of 32 is that of llama.cpp's q4_0 with q8_0, except for scales in bfloat16: no weight is
too small for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops import int_product, quantized
from inferd.kernels.ops.linear_int4 import quantize
from inferd.kernels.ops.quantized import Apply, Bind, Key, Matrix, Table
from inferd.kernels.registry import Deferred, Implementation, Op, always

GROUP_SIZE = quantize.GROUP_SIZE
"""Inputs that share a scale and a minimum in what `quantize_int4` makes."""

Quantize = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

QUANTIZE_INT4: Op[Key, Quantize] = Op(
    "quantize_int4",
    [
        Implementation("cpp", quantize.cpp, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", quantize.reference, always),
    ],
)
LINEAR_INT4: Op[Key, Bind] = Op(
    "linear_int4",
    [
        Implementation("cpp", partial(int_product.bind, "linear_int4"), int_product.refuses),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "bind"), quantized.refuses_triton, varies=quantized.VARIES
        ),
        Implementation(
            "triton_invariant", Deferred(f"{__name__}.triton", "bind_invariant"), quantized.refuses_invariant
        ),
        Implementation("reference", quantized.bind, always),
    ],
)


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] of any float dtype -> (q [out, in] uint8 in 0..15, scales, minimums), the latter [out, in / 32]
    in fp16: w is about scale * q + minimum. With NaN or infinity a group has a scale of NaN.

    The smallest weight of a group becomes 0 or -0.5, and the largest 15 or 15.5, before all are rounded and cut to
    0..15. Each of these four tries has a scale and a minimum of least squares. The best wins. Its scale is rounded to
    fp16 before the minimum is found, and both before the final q.

    Squared error of normal weights, relative to their squares: 0.0050; with one try, 0 and 15: 0.0056; with the best of
    50 tries: 0.0049; without minimums, at the best of four scales: 0.0066.
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
    x_group_size: int | None = None,
    block_scales: Tensor | None = None,
    block_minimums: Tensor | None = None,
    narrowed_to: int | None = None,
    out_dtype: torch.dtype | None = None,
    is_invariant: bool = False,
) -> Apply:
    """The layer as a function of x [T, in] in `dtype` that gives [T, out] in `out_dtype`: `dtype` by default, or
    float32. `is_invariant`: a row's bits must depend on that row alone, on a GPU too. `Matrix` says what the tensors
    hold; q is [out, in] uint8 in 0..15. They are needed during this call only."""
    assert q.dtype == torch.uint8
    matrix = Matrix(
        q, scales, bias, zeros, minimums, order, table, x_group_size, block_scales, block_minimums, narrowed_to
    )
    key = matrix.key(dtype, is_invariant=is_invariant)
    return LINEAR_INT4.resolve(key)(matrix, out_dtype or dtype)
