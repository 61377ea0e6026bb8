"""Calls the C++ quantization of weights (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    q = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty((weight.shape[0], weight.shape[1] // group_size), dtype=torch.bfloat16)
    native.function("inferd_linear_int8_quantize")(
        weight.data_ptr(),
        native.DTYPE_CODES[weight.dtype],
        scales.numel(),
        group_size,
        q.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return q, scales
