"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(x, None, weight, bias, None, out, eps)
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _run(x, residual.contiguous(), weight, bias, total, out, eps)
    return out, total


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, total: Tensor | None, out: Tensor, eps: float
) -> None:
    assert weight.dtype == bias.dtype == x.dtype and weight.is_contiguous() and bias.is_contiguous()
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    native.function("inferd_layer_norm")(
        rows.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        0 if total is None else total.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        rows.shape[1],
        eps,
        native.DTYPE_CODES[rows.dtype],
        torch.get_num_threads(),
    )
