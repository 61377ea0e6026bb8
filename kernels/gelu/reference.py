"""gelu in plain PyTorch, composed of tanh: torch's own gelu gives a row other bits with the number of rows (see
`gated_mul/reference.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return wide_gelu(x.to(torch.float32)).to(x.dtype)


def wide_gelu(wide: Tensor) -> Tensor:
    """Of fp32, in fp32."""
    inner = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5)
