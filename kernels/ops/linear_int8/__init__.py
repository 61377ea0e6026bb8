"""y = x W^T + b with W in 8 bits, in groups of inputs of an output row that share a scale, or with one scale for a row.
Activations are quantized at each call, to 8 bits in groups of 16 or 32, or to 8 or 16 bits by rows; on a GPU they stay
as they are.

`quantized.py` has the layouts (zero points, minimums and orders of inputs) and the arithmetic.

With one scale a row and 8 bits, compared with oneDNN's product of the same integers: 1.2 to 1.9 times as fast for 1 to
8 rows, 1.03 to 1.13 times for 32, 0.96 to 1.0 times for 256. Only this side's time includes the quantization of x (2
cores of a Zen 4, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops import int_product, quantized
from inferd.kernels.ops.linear_int8 import quantize
from inferd.kernels.ops.quantized import Apply, Bind, Key, Matrix
from inferd.kernels.registry import Deferred, Implementation, Op, always

MAX_IN_SIZE = 65536
"""Most inputs of a layer: sums of so many products of 127 x 255 fit 32 bits."""

GROUP_SIZE, LONG_GROUP_SIZE = 64, 128

Quantize = Callable[[Tensor, int], tuple[Tensor, Tensor]]

QUANTIZE_INT8: Op[Key, Quantize] = Op(
    "quantize_int8",
    [
        Implementation("cpp", quantize.cpp, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", quantize.reference, always),
    ],
)
LINEAR_INT8: Op[Key, Bind] = Op(
    "linear_int8",
    [
        Implementation("cpp", partial(int_product.bind, "linear_int8"), int_product.refuses),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "bind"), quantized.refuses_triton, varies=quantized.VARIES
        ),
        Implementation(
            "triton_invariant", Deferred(f"{__name__}.triton", "bind_invariant"), quantized.refuses_invariant
        ),
        Implementation("reference", quantized.bind, always),
    ],
)


def group_size(in_size: int, device_type: str, most: int = GROUP_SIZE) -> int:
    """Number of inputs that share a scale: `most`, which is 64 or 128. If inputs are no multiple of it, 64; if of
    neither, all. All too if activations of a row with one scale have 16 bits (`has_wide_rows`)."""
    sizes = [size for size in (most, GROUP_SIZE) if in_size % size == 0]
    return in_size if not sizes or quantized.has_wide_rows(device_type) else sizes[0]


def quantize_int8(weight: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> (q [out, in] int8 in -127..127, scales [out, groups] bfloat16). A group
    has `size` inputs, by default `group_size`. With NaN or infinity a group has such a scale.

        scale = max |w| / 127, rounded to bfloat16        q = w / scale, rounded to the nearest integer, ties to even

    Emulated with activations in groups of 32, the KL divergence on SmolLM2-135M-Instruct is 0.0049 nats a token. Groups
    of 32 give 0.0045 for 2 bytes more in 64, groups of 128 give 0.0057, a scale for each row 0.0076. With activations
    of 16 bits a scale for each row gives 0.0046 (2026-11-24).
    """
    size = size or group_size(weight.shape[1], weight.device.type)
    return QUANTIZE_INT8.resolve(Key(weight.device.type, weight.dtype))(weight, size)


def linear_int8(
    q: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    zeros: Tensor | None = None,
    minimums: Tensor | None = None,
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
    hold; q is [out, in] int8. They are needed during this call only."""
    assert q.dtype == torch.int8
    assert q.shape[1] <= MAX_IN_SIZE, f"{q.shape[1]} inputs; at most {MAX_IN_SIZE} can be summed in 32 bits"
    matrix = Matrix(
        q,
        scales,
        bias,
        zeros,
        minimums,
        order,
        x_group_size=x_group_size,
        block_scales=block_scales,
        block_minimums=block_minimums,
        narrowed_to=narrowed_to,
    )
    key = matrix.key(dtype, is_invariant=is_invariant)
    return LINEAR_INT8.resolve(key)(matrix, out_dtype or dtype)
