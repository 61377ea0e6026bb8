"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, slots: Tensor | None) -> None:
    assert slots is None or (slots.dtype == torch.int64 and slots.is_contiguous())
    native.function("inferd_top_k_top_p")(
        scores.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        log_min_p.data_ptr(),
        0 if slots is None else slots.data_ptr(),
        scores.shape[0],
        scores.shape[1],
        torch.get_num_threads(),
    )


def weights(scores: Tensor) -> Tensor:
    """The kernel's weights of scores [N] fp32, N a multiple of 16; int64 [N]."""
    assert scores.dtype == torch.float32 and scores.is_contiguous() and len(scores) % 16 == 0
    out = torch.empty(len(scores), dtype=torch.int64)
    native.function("inferd_top_k_top_p_weights")(scores.data_ptr(), out.data_ptr(), len(scores))
    return out
