"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def scaled_add(x: Tensor, multiplier: float, residual: Tensor | None) -> Tensor:
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    native.function("inferd_scaled_add")(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
        x.numel(),
        multiplier,
        native.DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return out
