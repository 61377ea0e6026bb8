"""The quantization of weights to 8 bits in plain PyTorch, with the bits of the C++."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-30
"""A group counts as zeros if its largest magnitude is smaller."""


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    groups = weight.to(torch.float32).reshape(weight.shape[0], weight.shape[1] // group_size, group_size)
    largest = groups.abs().amax(2)
    scales = torch.where(largest < _SMALLEST, 0.0, largest / 127.0).to(torch.bfloat16)
    is_usable = (largest >= _SMALLEST) & largest.isfinite()
    inverse = 1.0 / scales.to(torch.float32)
    q = torch.where(is_usable.unsqueeze(2), (groups * inverse.unsqueeze(2)).round(), 0.0)
    return q.to(torch.int8).flatten(1), scales
