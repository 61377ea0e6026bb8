"""The 4-bit linear layer in plain PyTorch. Exact and slow: every call converts the weights again."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import int_dot, quantized
from inferd.kernels.quantized import MAX_X_GROUP_SIZE, Apply, Matrix

GROUP_SIZE = 32
TRIED = (-7.0, -7.5, -8.0, -8.5)
"""Values of q - 8 tried for the element of the largest magnitude. Each gives a scale."""
_SMALLEST = 1e-30
"""A group counts as zeros if its largest magnitude is smaller."""
_ROWS_AT_ONCE = 1024


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    parts = [_quantize(rows) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    return torch.cat([q for q, _ in parts]), torch.cat([scales for _, scales in parts])


def bind(matrix: Matrix) -> Apply:
    return quantized.bind(matrix, min(matrix.group_size, MAX_X_GROUP_SIZE))


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.to(torch.float32).reshape(-1, GROUP_SIZE)
    top, bottom = groups.amax(1, keepdim=True), (-groups).amax(1, keepdim=True)
    extreme = torch.where(top >= bottom, top, -bottom)
    is_finite = groups.isfinite().all(1, keepdim=True)
    is_usable = is_finite & (extreme.abs() >= _SMALLEST)
    chosen = torch.where(is_usable, _best_scale(groups, extreme), torch.where(is_finite, 0.0, torch.nan))
    scales = chosen.to(torch.bfloat16)
    rounded = _round(groups, 1.0 / scales.to(torch.float32))
    q = torch.where(is_usable & (scales != 0), rounded, 0.0).to(torch.int8) + 8
    return q.to(torch.uint8).reshape(weight.shape), scales.reshape(weight.shape[0], -1)


def _best_scale(groups: Tensor, extreme: Tensor) -> Tensor:
    """The best scale of those tried. Each rounding has a scale of least squares; the one that explains most of the
    group wins."""
    low, high = groups.chunk(2, 1)
    best, most = torch.zeros_like(extreme), torch.full_like(extreme, -1.0)
    for tried in TRIED:
        a, b = _round(groups, int_dot.divided(tried, extreme)).chunk(2, 1)
        along, square = _sum(int_dot.fma(low, a, high * b)), _sum(int_dot.fma(a, a, b * b))
        share = along / extreme
        explained = share * share / square
        is_better = explained > most
        best, most = torch.where(is_better, along / square, best), torch.where(is_better, explained, most)
    return best


def _round(groups: Tensor, inverse: Tensor) -> Tensor:
    return (groups * inverse).round().clamp(-8, 7)


def _sum(lanes: Tensor) -> Tensor:
    """Sum [G, 16] to [G, 1] by halving four times, in the order of the C++ code."""
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, 1)
        lanes = low + high
    return lanes
