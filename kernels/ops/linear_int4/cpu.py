"""Calls the C++ quantization of weights (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages
from inferd.kernels.ops.linear_int4.reference import GROUP_SIZE


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (out_size, in_size), num_threads = weight.shape, torch.get_num_threads()

    def fill(q: Tensor, scales: Tensor, minimums: Tensor) -> None:
        own = weight.contiguous()
        native.function("inferd_linear_int4_quantize")(
            own.data_ptr(),
            native.DTYPE_CODES[own.dtype],
            scales.numel(),
            q.data_ptr(),
            scales.data_ptr(),
            minimums.data_ptr(),
            num_threads,
        )

    groups = (out_size, in_size // GROUP_SIZE), torch.float16
    q, scales, minimums = pages.scratch([((out_size, in_size), torch.uint8), groups, groups], fill)
    return q, scales, minimums
