"""Layer normalisation in plain PyTorch: means in fp32, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.to(torch.float32) + bias.to(torch.float32)).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
