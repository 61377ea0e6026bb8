"""The quantization of weights to 8 bits: in C++ (`cpu.cpp`), and in plain PyTorch with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages

_SMALLEST = 1e-30
"""A group counts as zeros if its largest magnitude is smaller."""


def cpp(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    (out_size, in_size), num_threads = weight.shape, torch.get_num_threads()

    def fill(q: Tensor, scales: Tensor) -> None:
        own = weight.contiguous()
        native.function("inferd_linear_int8_quantize")(
            own.data_ptr(),
            native.DTYPE_CODES[own.dtype],
            scales.numel(),
            group_size,
            q.data_ptr(),
            scales.data_ptr(),
            num_threads,
        )

    groups = (out_size, in_size // group_size)
    q, scales = pages.scratch([((out_size, in_size), torch.int8), (groups, torch.bfloat16)], fill)
    return q, scales


def reference(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    groups = weight.to(torch.float32).reshape(weight.shape[0], weight.shape[1] // group_size, group_size)
    largest = groups.abs().amax(2)
    scales = torch.where(largest < _SMALLEST, 0.0, largest / 127.0).to(torch.bfloat16)
    is_usable = (largest >= _SMALLEST) & largest.isfinite()
    inverse = 1.0 / scales.to(torch.float32)
    q = torch.where(is_usable.unsqueeze(2), (groups * inverse.unsqueeze(2)).round(), 0.0)
    return q.to(torch.int8).flatten(1), scales
