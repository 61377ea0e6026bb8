"""Ways to quantize activations to FP8: row by row, in groups of inputs, or by a scale from calibration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels.linear_fp8.reference import BLOCK
from inferd.kernels.quantize_fp8 import quantize_fp8
from inferd.kernels.quantize_fp8.reference import E4M3_MAX

Activations = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x [T, in] -> (q [T, in] e4m3, scales fp32: [T], or [T, groups of in])."""

_PIECE = 2**24
"""Numbers of a weight quantized at once: their fp32 copies take 64 MiB."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with a scale for each row."""
    return quantize_fp8(x)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with a scale for each 128 inputs of a row. The last group may be shorter."""
    in_size = x.shape[1]
    if in_size % BLOCK:
        x = torch.nn.functional.pad(x, (0, -in_size % BLOCK))
    q, scales = quantize_fp8(x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK))
    return q.flatten(1)[:, :in_size], scales


def quantize_static(scale: float) -> Activations:
    """Quantize with one scale for every row. Values beyond 448 times the scale are cut to that."""

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = (x.to(torch.float32) / scale).clamp_(-E4M3_MAX, E4M3_MAX)
        return wide.to(torch.float8_e4m3fn), torch.full((x.shape[0],), scale, dtype=torch.float32, device=x.device)

    return apply


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> (q [out, in] e4m3, scales [out, groups of in] fp32), a piece at a time."""
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    shape = (weight.shape[0], -(-weight.shape[1] // BLOCK))
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    num_rows = max(1, _PIECE // weight.shape[1])
    for row in range(0, weight.shape[0], num_rows):
        piece = slice(row, row + num_rows)
        q[piece], scales[piece] = quantize_groups(weight[piece])
    return q, scales
