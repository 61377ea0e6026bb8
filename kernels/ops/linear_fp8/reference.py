"""The FP8 linear layer in plain PyTorch. It is slow, and the oracle of the others.

A product of two e4m3 numbers is a multiple of 2^-18 below 2^18, so fp64 sums 65,536 of them exactly, in any order. A
row's bits therefore depend on that row alone. The weights are widened again in every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 128
"""Inputs that share a scale, of a token or of a row of weights; also rows of a block of weights."""

_PIECE = 2**18
"""Weights widened at once: 2 MiB in fp64 stay in the cache. For a 2048 x 4096 weight and one row: 0.7 G weights a
second, against 0.14 in one piece (2 cores, AMD EPYC Zen 4, 2026-11-21)."""
_SHIFTED_BIAS = 2.0**8
"""e4m3 bits that are moved to the sign, exponent and mantissa of float16 read as the number / 2^8: e4m3's exponent is
biased by 7, float16's by 15."""


def bind(q: Tensor, scales: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """The function of quantized activations, their scales and the results' dtype."""
    added = None if bias is None else bias.to(torch.float64)
    product = _row_products if scales.dim() == 1 else _group_products
    wide_scales = scales.to(torch.float64)

    def multiply(x_q: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        out = product(x_q.to(torch.float64), x_scales.to(torch.float64), q, wide_scales)
        return (out if added is None else out + added).to(dtype)

    return multiply


def _row_products(x: Tensor, x_scales: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    sums = torch.cat([x @ _wide(piece).T for piece in torch.split(q, max(1, _PIECE // q.shape[1]))], 1)
    return sums * (scales * _SHIFTED_BIAS) * x_scales[:, None]


def _group_products(x: Tensor, x_scales: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    total = torch.zeros((x.shape[0], q.shape[0]), dtype=torch.float64, device=x.device)
    for block, columns in enumerate(torch.split(q, BLOCK, 1)):
        inputs = x[:, block * BLOCK : block * BLOCK + columns.shape[1]]
        sums = torch.cat([inputs @ _wide(piece).T for piece in torch.split(columns, _PIECE // BLOCK)], 1)
        row_scales = scales[:, block] * _SHIFTED_BIAS
        if len(row_scales) != q.shape[0]:
            row_scales = row_scales.repeat_interleave(BLOCK)[: q.shape[0]]
        total += sums * row_scales * x_scales[:, block, None]
    return total


def _wide(q: Tensor) -> Tensor:
    """The numbers / 2^8 in fp64, four times as fast as by conversion. Shifting the bits also leaves a copy of the sign
    in the exponent's highest bit. Weights hold no NaN, whose two codes would read as 480."""
    bits = q.contiguous().view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16).to(torch.float64)
