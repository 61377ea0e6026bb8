"""`kernels/cpu/int_dot.h` in plain PyTorch: quantization of activations, and exact integer products.

The results equal those of the C++ bit for bit: every floating point operation is the same, in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-30
"""127 / max |x| of a smaller number is near the end of fp32, so smaller numbers count as zeros."""
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


WIDE = 254
"""A number of 16 bits is WIDE * high + low, of two signed bytes."""


def quantize_wide(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """x [R, K] as numbers of 16 bits with one scale a row, max |x| / 32258: (high bytes [R, K] int8, their scales
    [R, 1] fp32), and the same of the low ones. NaN and infinity count as in `quantize`."""
    largest = WIDE * 127.0
    x = x.to(torch.float32)
    bound = x.abs().amax(1, keepdim=True)
    is_usable = (bound >= _SMALLEST) & bound.isfinite()
    q = torch.where(is_usable, x * divided(largest, bound), 0.0).round()
    high = (q * (1.0 / WIDE)).round()
    scale = torch.where(bound < _SMALLEST, 0.0, bound / largest)
    return (high.to(torch.int8), scale * WIDE), ((q - WIDE * high).to(torch.int8), scale)


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
