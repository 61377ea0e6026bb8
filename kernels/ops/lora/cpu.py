"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.lora.weights import LoraWeights


def refuses(device_type: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """Why it cannot run; None if it can."""
    reason = native.refuses(device_type, dtype, weight_dtype)
    if reason is None and dtype == torch.bfloat16 and weight_dtype != dtype:
        return f"multiplies bfloat16 by bfloat16, not by {weight_dtype}"
    return reason


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor, adapters: Tensor) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    _, num_parts, rank, in_size = weights.down.shape
    shrunk = torch.empty((x.shape[0], num_parts, rank), dtype=torch.float32)
    native.function("inferd_lora")(
        x.data_ptr(),
        y.data_ptr(),
        weights.down.data_ptr(),
        weights.up.data_ptr(),
        weights.panels.data_ptr(),
        weights.ranks.data_ptr(),
        weights.scales.data_ptr(),
        slots.data_ptr(),
        adapters.data_ptr(),
        shrunk.data_ptr(),
        x.shape[0],
        x.stride(0),
        in_size,
        y.shape[1],
        num_parts,
        weights.panels.shape[0],
        rank,
        native.DTYPE_CODES[y.dtype],
        native.DTYPE_CODES[weights.down.dtype],
        torch.get_num_threads(),
    )
