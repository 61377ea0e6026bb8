"""Calls the C++ quantization of weights (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.linear_int4.reference import GROUP_SIZE


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.contiguous()
    q = torch.empty(weight.shape, dtype=torch.uint8)
    scales, minimums = torch.empty((2, weight.shape[0], weight.shape[1] // GROUP_SIZE), dtype=torch.float16)
    native.function("inferd_linear_int4_quantize")(
        weight.data_ptr(),
        native.DTYPE_CODES[weight.dtype],
        scales.numel(),
        q.data_ptr(),
        scales.data_ptr(),
        minimums.data_ptr(),
        torch.get_num_threads(),
    )
    return q, scales, minimums
