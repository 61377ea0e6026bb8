"""The 8-bit linear layer in plain PyTorch. Exact and slow: every call converts the weights again."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import int_dot, quantized
from inferd.kernels.quantized import MAX_X_GROUP_SIZE, Apply, Matrix


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    return int_dot.quantize(weight, weight.shape[1])


def bind(matrix: Matrix) -> Apply:
    if matrix.key(torch.float32)[2:] == (0, torch.float32, "none", "centred", False):
        return _bind_rows(matrix)
    return quantized.bind(matrix, min(matrix.group_size, MAX_X_GROUP_SIZE))


def _bind_rows(matrix: Matrix) -> Apply:
    """Both a row of weights and a row of activations have one scale."""
    scales = matrix.scales.flatten()
    added = torch.zeros_like(scales) if matrix.bias is None else matrix.bias.to(torch.float32)

    def apply(x: Tensor) -> Tensor:
        x_q, x_scales = int_dot.quantize(x, x.shape[1])
        sums = int_dot.product(x_q, matrix.q).to(torch.float32)
        return int_dot.fma(sums * scales, x_scales, added).to(x.dtype)

    return apply
