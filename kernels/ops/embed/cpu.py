"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def embed(token_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    token_ids = token_ids.contiguous()
    out = torch.empty((token_ids.shape[0], weight.shape[1]), dtype=dtype)
    native.function("inferd_embed")(
        token_ids.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        token_ids.shape[0],
        weight.shape[0],
        weight.stride(0) * weight.element_size(),
        weight.shape[1] * weight.element_size(),
        0 if dtype == weight.dtype else native.WEIGHT_CODES[weight.dtype],
    )
    return out
