"""The quantization of weights to 4 bits: in C++ (`cpu.cpp`), and in plain PyTorch with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages

GROUP_SIZE = 32
LOWEST, HIGHEST = (0.0, 0.5), (15.0, 15.5)
"""Tried places of a group's smallest weight, below 0, and of its largest, before the rounding to 0..15."""
_SMALLEST = 1e-30
"""All weights of a group count as its smallest if they lie closer together."""
_ROWS_AT_ONCE = 1024


def cpp(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (out_size, in_size), num_threads = weight.shape, torch.get_num_threads()

    def fill(q: Tensor, scales: Tensor, minimums: Tensor) -> None:
        own = weight.contiguous()
        native.function("inferd_linear_int4_quantize")(
            own.data_ptr(),
            native.DTYPE_CODES[own.dtype],
            scales.numel(),
            q.data_ptr(),
            scales.data_ptr(),
            minimums.data_ptr(),
            num_threads,
        )

    groups = (out_size, in_size // GROUP_SIZE), torch.float16
    q, scales, minimums = pages.scratch([((out_size, in_size), torch.uint8), groups, groups], fill)
    return q, scales, minimums


def reference(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = [_quantize(rows) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    q, scales, minimums = (torch.cat(each) for each in zip(*parts, strict=True))
    return q, scales, minimums


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.to(torch.float32).reshape(-1, GROUP_SIZE)
    bottom = groups.amin(1, keepdim=True)
    width = groups.amax(1, keepdim=True) - bottom
    is_finite = width.isfinite()
    is_usable = is_finite & (width >= _SMALLEST)
    slope, q_sum, w_sum = _best_slope((groups - bottom) * (1.0 / width))
    scales = torch.where(is_usable, slope * width, torch.where(is_finite, 0.0, torch.nan)).to(torch.float16)
    wide = scales.to(torch.float32)
    above = torch.where(is_usable, (w_sum * width - q_sum * wide) * (1.0 / GROUP_SIZE), 0.0)
    minimums = torch.where(is_finite, above + bottom, torch.nan).to(torch.float16)
    has_scale = is_usable & (wide > 0) & wide.isfinite()
    q = torch.where(has_scale, _cut((groups - minimums.to(torch.float32)) * (1.0 / wide)), 0.0).to(torch.uint8)
    num_rows = weight.shape[0]
    return q.reshape(weight.shape), scales.reshape(num_rows, -1), minimums.reshape(num_rows, -1)


def _best_slope(shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(slope, sum of q, sum of the shares). Slope * q + a constant explains most of the `shares`, from 0 to 1."""
    best = torch.zeros_like(shares[:, :1])
    most, best_sum, w_sum = best - 1.0, best, _sum(shares)
    for below in LOWEST:
        for highest in HIGHEST:
            q = _cut(shares * (below + highest) - below)
            q_sum = _sum(q)
            along = GROUP_SIZE * _sum(q * shares) - q_sum * w_sum
            square = GROUP_SIZE * _sum(q * q) - q_sum * q_sum
            slope = along / square
            explained = along * slope
            is_better = explained > most
            best, best_sum = torch.where(is_better, slope, best), torch.where(is_better, q_sum, best_sum)
            most = torch.where(is_better, explained, most)
    return best, best_sum, w_sum


def _cut(x: Tensor) -> Tensor:
    return x.round().clamp(0, 15)


def _sum(group: Tensor) -> Tensor:
    """Sum [G, 32] to [G, 1] by halving five times, in the order of the C++ code."""
    while group.shape[1] > 1:
        low, high = group.chunk(2, 1)
        group = low + high
    return group
