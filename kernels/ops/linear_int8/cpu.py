"""Calls the C++ quantization of weights (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
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
