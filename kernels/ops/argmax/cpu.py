"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, size = logits.shape
    ids, is_none = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    native.function("inferd_argmax")(
        logits.data_ptr(),
        ids.data_ptr(),
        is_none.data_ptr(),
        rows,
        size,
        logits.stride(0),
        torch.get_num_threads(),
    )
    return ids, is_none
