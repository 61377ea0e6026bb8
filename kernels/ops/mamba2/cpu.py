"""Calls the C++ implementation (`cpu.cpp`), for the cases that it supports."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.mamba2.reference import Weights
from inferd.kernels.ops.states import StateRows, num_groups


def mamba2(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    num_tokens, (_, num_heads, state_size, head_dim) = len(xbc), state.shape
    bc_size = xbc.shape[1] - num_heads * head_dim
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=torch.float32)
    wide = torch.empty((num_tokens, bc_size), dtype=torch.float32)
    factors = torch.empty((num_tokens, 2 * num_heads), dtype=torch.float32)
    native.function("inferd_mamba2")(
        xbc.data_ptr(),
        dt.data_ptr(),
        *(weight.data_ptr() for weight in weights),
        state.data_ptr(),
        rows.query_start.data_ptr(),
        rows.positions.data_ptr(),
        rows.slots.data_ptr(),
        rows.kept_address,
        wide.data_ptr(),
        factors.data_ptr(),
        out.data_ptr(),
        rows.slots.shape[0],
        num_tokens,
        num_groups(xbc.shape[1], state),
        num_heads,
        state_size,
        head_dim,
        dt.stride(0),
        native.DTYPE_CODES[xbc.dtype],
        torch.get_num_threads(),
    )
    return out
