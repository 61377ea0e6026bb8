"""Calls the C++ quantization of weights (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.linear_int8.reference import group_size


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    size = group_size(weight.shape[1])
    q = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty((weight.shape[0], weight.shape[1] // size), dtype=torch.bfloat16)
    native.function("inferd_linear_int8_quantize")(
        weight.data_ptr(),
        native.DTYPE_CODES[weight.dtype],
        scales.numel(),
        size,
        q.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return q, scales
