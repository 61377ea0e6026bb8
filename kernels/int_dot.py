"""`int_dot.h` in plain PyTorch: quantization of activations and exact integer products. Also calls the C++ linears that
are built on it.

The results equal those of the C++ bit for bit: every floating point operation is the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels import native

_SMALLEST = 1e-30
"""127 / max |x| of a smaller number is near the end of fp32, so smaller numbers count as zeros."""
_CACHE_LINE_BYTES = 64
_EXACT_SIZE = 1024
"""127 x 127 x 1024 < 2^24, so a sum of this many products of signed bytes is exact in fp32, in any order."""


def quantize(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x [R, K] as scales [R, K / group_size] fp32 times q [R, K] int8, symmetric: a group's scale is max |x| / 127. The
    last group may be shorter.

    If a group holds NaN or infinity, its scale is NaN or infinity too and its q are zero.
    """
    num_groups = -(-x.shape[1] // group_size)
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, num_groups * group_size - x.shape[1]))
    groups = padded.reshape(x.shape[0], num_groups, group_size)
    bound = groups.abs().amax(2, keepdim=True)
    is_usable = (bound >= _SMALLEST) & bound.isfinite()
    q = torch.where(is_usable, groups * divided(127.0, bound), 0.0).round().to(torch.int8)
    scales = torch.where(bound < _SMALLEST, 0.0, bound / 127.0)
    return q.flatten(1)[:, : x.shape[1]], scales.squeeze(2)


def divided(number: float, x: Tensor) -> Tensor:
    """number / x, rounded once; torch computes `number / x` as a product with a rounded reciprocal."""
    return torch.full_like(x, number).div_(x)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Exact a b^T of signed bytes [M, K] and [N, K]: [M, N] int32."""
    total = torch.zeros((a.shape[0], b.shape[0]), dtype=torch.int32, device=a.device)
    for left, right in zip(torch.split(a, _EXACT_SIZE, 1), torch.split(b, _EXACT_SIZE, 1), strict=True):
        total += (left.to(torch.float32) @ right.to(torch.float32).T).to(torch.int32)
    return total


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in fp32, rounded once: fp64 holds the product exactly. The sum is rounded to fp64 and then to fp32,
    which differs from a true fused multiply-add about once in 2^29."""
    return (a.double() * b.double() + c.double()).to(torch.float32)


def on_cache_lines(num_bytes: int) -> Tensor:
    """Memory for packed weights that begins on a cache line, so that one vector of 64 bytes is never two reads."""
    padded = torch.empty(num_bytes + _CACHE_LINE_BYTES, dtype=torch.uint8)
    start = -padded.data_ptr() % _CACHE_LINE_BYTES
    return padded[start : start + num_bytes]


def bound(
    name: str, in_size: int, num_units: int, tiles: Tensor, scales: Tensor, bias: Tensor | None, out_size: int
) -> Callable[[Tensor], Tensor]:
    """The C function `name` over packed `tiles` and their `scales`, as a function of x [T, in_size].

    `num_units` is the size of a row of x in that function's unit: inputs, or groups of inputs.
    """
    added = None if bias is None else bias.to(torch.float32, copy=True)
    run = native.function(name)

    def apply(x: Tensor) -> Tensor:
        assert x.shape[1] == in_size
        x = x.contiguous()
        out = torch.empty((x.shape[0], out_size), dtype=x.dtype)
        run(
            x.data_ptr(),
            native.DTYPE_CODES[x.dtype],
            x.shape[0],
            num_units,
            tiles.data_ptr(),
            scales.data_ptr(),
            0 if added is None else added.data_ptr(),
            out_size,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    return apply
