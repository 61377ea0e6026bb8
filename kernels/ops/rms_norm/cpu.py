"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(_rows(x), None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _run(_rows(x), residual.contiguous(), weight, total, out, eps)
    return out, total


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _run(rows: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    assert weight.dtype in (rows.dtype, torch.float32) and weight.is_contiguous()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    native.function("inferd_rms_norm")(
        rows.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        0 if total is None else total.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        rows.shape[1],
        eps,
        native.DTYPE_CODES[rows.dtype],
        native.DTYPE_CODES[weight.dtype],
        torch.get_num_threads(),
    )
