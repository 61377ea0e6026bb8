"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def mask_tokens(logits: Tensor, masks: Tensor, row_of: Tensor) -> None:
    native.function("inferd_mask_tokens")(
        logits.data_ptr(),
        masks.data_ptr(),
        row_of.data_ptr(),
        logits.shape[1],
        masks.shape[0],
        masks.shape[1],
        torch.get_num_threads(),
    )
