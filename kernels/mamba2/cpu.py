"""Calls the C++ implementation (`cpu.cpp`), for the cases that it supports."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.mamba2.reference import Weights
from inferd.kernels.states import StateRows

MAX_STATE_SIZE = 256
"""A piece of the state is held on the stack."""
HEAD_MULTIPLE = 16


def mamba2(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    assert xbc.is_contiguous() and state.is_contiguous() and dt.stride(1) == 1 and dt.dtype == xbc.dtype
    assert all(weight.is_contiguous() and weight.dtype == torch.float32 for weight in weights)
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
        wide.data_ptr(),
        factors.data_ptr(),
        out.data_ptr(),
        rows.slots.shape[0],
        num_tokens,
        bc_size // (2 * state_size),
        num_heads,
        state_size,
        head_dim,
        dt.stride(0),
        native.DTYPE_CODES[xbc.dtype],
        torch.get_num_threads(),
    )
    return out
