"""gelu in plain PyTorch, composed of tanh. With torch's own gelu a row's bits depend on the number of rows (see
`gated_mul/reference.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return wide_gelu(x.to(torch.float32)).to(x.dtype)


def wide_gelu(wide: Tensor) -> Tensor:
    """gelu of fp32 numbers, in fp32."""
    inner = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5)
