"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _run("inferd_head_gate", x, gate, None, 0.0)


def norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run("inferd_head_gate", x, gate, weight, eps)


def silu_gate_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run("inferd_silu_gate_norm", x, gate, weight, eps)


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    native.function("inferd_add_gated")(
        x.data_ptr(),
        y.data_ptr(),
        gate.data_ptr(),
        out.data_ptr(),
        *x.shape,
        native.DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def _run(name: str, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=gate.dtype)
    native.function(name)(
        x.data_ptr(),
        gate.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        *x.shape,
        gate.stride(0),
        gate.stride(1),
        eps,
        native.DTYPE_CODES[gate.dtype],
        torch.get_num_threads(),
    )
    return out
