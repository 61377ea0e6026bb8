"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native

_SILU, _GELU_TANH, _LIMITED = 0, 1, 2


def silu_mul(gate_up: Tensor) -> Tensor:
    return _run(gate_up, _SILU)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _run(gate_up, _GELU_TANH)


def limited_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    return _run(gate_up, _LIMITED, limit, alpha)


def _run(gate_up: Tensor, activation: int, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    native.function("inferd_gated_mul")(
        gate_up.data_ptr(),
        out.data_ptr(),
        out.numel() // size,
        size,
        activation,
        limit,
        alpha,
        native.DTYPE_CODES[gate_up.dtype],
        torch.get_num_threads(),
    )
    return out
