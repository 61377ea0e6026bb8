"""The 8-bit linear layer in plain PyTorch. Exact and slow: every call converts the weights again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels import int_dot


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    q, scales = int_dot.quantize(weight, weight.shape[1])
    return q, scales.flatten()


def bind(q: Tensor, scales: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    added = torch.zeros_like(scales) if bias is None else bias.to(torch.float32)

    def apply(x: Tensor) -> Tensor:
        x_q, x_scales = int_dot.quantize(x, x.shape[1])
        sums = int_dot.product(x_q, q).to(torch.float32)
        return int_dot.fma(sums * scales, x_scales, added).to(x.dtype)

    return apply
